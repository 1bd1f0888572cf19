"""Fixtures of all tests: tiny models, and engines that must leave nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from cargohold import LLM
from cargohold.base_llm import build_engine
from cargohold.connector.factory import connector_factory
from cargohold.engine.config import EngineConfig, plan_engine
from cargohold.engine.llm_engine import LLMEngine
from cargohold.engine.model.info import describe_model
from cargohold.process import made_for_good
from tests.command import cargohold, chat_model
from tests.forks import forked_ranks
from tests.llms import SettledLLM, scheduler_of
from tests.servers import Server, s3_server

__all__ = ["cargohold", "chat_model", "forked_ranks"]

# No deadlines: how long an example takes depends on what else the machine does.
# The same examples at each run, so that a suite that passed passes again; ``make test-long`` draws new ones, from a seed that
# it prints. What fails there becomes an explicit example.
settings.register_profile(
    "cargohold", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", settings.get_profile("cargohold"), max_examples=1000, derandomize=False
)  # see ``effort``
settings.load_profile("cargohold")


# Shells start background jobs with SIGINT ignored. Tests of Ctrl-C need it handled, here and in the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What is shown on a terminal depends on its kind. Tests of that need one that shows all, also in processes that they start.
os.environ["TERM"] = "xterm"


# Where nothing is compiled for good, each process that tests start would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# On models this small, threads wait for each other longer than they work, in all processes: several tests run at once.
os.environ["OMP_NUM_THREADS"] = "1"


_LONGEST_FILES = (
    "executor/test_executors.py",
    "engine/test_real_model.py",
    "connector/test_tiers_with_models.py",
    "executor/test_tensor_parallel.py",
    "cli/test_interrupts.py",
    "connector/test_with_models.py",
    "engine/test_llm.py",
    "simulation/test_seeds.py",
    "vllm/test_workers.py",
    "vllm/test_stages.py",
    "vllm/test_speculation.py",
    "vllm/test_served_model.py",
    "vllm/test_drafted_states.py",
    "vllm/test_models.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what test modules import, and the tests themselves: they stay to the end."""
    with made_for_good():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: each file is run by one process, and at the end the others would wait for a long one."""
    here = Path(__file__).parent
    turns = {here / name: turn for turn, name in enumerate(_LONGEST_FILES)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Asserts at the very end that no process is left behind, but for those of ``multiprocessing``, which end with this one."""
    yield
    if find_spec("vllm") is not None:
        return  # clusters of Ray that vLLM starts end with this process
    started = [child for child in psutil.Process().children(recursive=True) if not is_of_multiprocessing(child)]
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not [child.cmdline() for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def is_of_multiprocessing(process: psutil.Process) -> bool:
    """Whether it is the fork server, or keeps track of semaphores."""
    try:
        command, is_ours = (
            " ".join(process.cmdline()),
            process.ppid() == os.getpid(),
        )  # what it forks has its command line
    except psutil.Error:  # it has ended meanwhile
        return True
    return is_ours and ("multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory in which tiny models are saved, once per session, and read once."""
    with made_for_good():
        from tests.models import read_once  # noqa: PLC0415  # imports torch

    directory = tmp_path_factory.mktemp("models")
    with read_once(directory):
        yield directory


@pytest.fixture(scope="session")
def tiny_model(models_dir: Path) -> Callable[[str], str]:
    """Path of a tiny random model by kind; see ``tests.models``."""
    with made_for_good():
        import torch  # noqa: PLC0415  # tests of scheduler-side code run without it
        from transformers import AutoModelForCausalLM  # noqa: F401, PLC0415  # made when it is asked for

        from tests.models import save_model  # noqa: PLC0415  # imports torch

    torch.set_num_threads(1)  # on models this small, threads wait for each other longer than they work
    return lambda kind: save_model(kind, models_dir)


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes LLMs, and asserts at the end of the test that they leave nothing behind: no block, slot, pin or job.

    Their calls return when copies and writes have ended, unless ``settled`` is false.
    """
    made: list[LLM] = []

    def make(model: str, *, settled: bool = True, **options: Any) -> LLM:
        llm = (SettledLLM if settled else LLM)(model, **options)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()
        scheduler_of(llm).check_settled()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., LLMEngine]]:
    """Makes engines for tests that make the steps themselves; asserts at the end that they leave nothing behind."""
    made: list[LLMEngine] = []

    def make(model: str, *, offload: Any = None, **options: Any) -> LLMEngine:
        config = EngineConfig(model=model, **options)
        plan = plan_engine(config, describe_model(config.model, config.dtype))
        made.append(build_engine(plan, connector_factory(offload)))
        return made[-1]

    yield make
    for engine in made:
        engine.abort_all()
        while engine.has_work():
            engine.step()
        engine.shutdown()
        engine.scheduler.check_settled()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server; it takes seconds to start."""
    with s3_server() as server:
        yield server
