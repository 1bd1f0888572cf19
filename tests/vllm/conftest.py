"""Engines with tiny models in this process, and transfers that fail on demand."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import cargohold.transfer.cpu
from tests.vllm.faults import Faults

if TYPE_CHECKING:
    from tests.vllm.engine import Engine

os.environ |= {
    # One process, so that tests can look inside, and one thread: on models this small, threads wait longer than they work.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # vLLM 0.28 hashes differently in every process without it
}


# The seed is drawn here, before pytest starts several processes, which must all have the same.
os.environ.setdefault("CARGOHOLD_VLLM_SEED", str(random.SystemRandom().randrange(10**9)))


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of a tiny random model by kind, see ``tests.vllm.models``; skips where this version of vLLM cannot offload it."""
    from cargohold.integrations.vllm import compat  # noqa: PLC0415  # this file is read where there is no vLLM too
    from tests.vllm.models import PLAIN, save_model  # noqa: PLC0415  # imports torch

    directory = tmp_path_factory.mktemp("vllm-models")

    def path(kind: str) -> str:
        version = compat.vllm_version()
        if compat.TransferResults is None and kind not in PLAIN:
            pytest.skip(f"vLLM {compat.VLLM_VERSION} cannot be told that a load of {kind} failed; 0.30 and later can")
        if kind == "lfm2" and version in {(0, 30), (0, 31)}:
            pytest.skip(f"vLLM {compat.VLLM_VERSION} has short convolutions for bfloat16 alone, which is not exact")
        return save_model(kind, directory)

    return path


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines, one at a time; each must have nothing left behind when the next one starts or the test ends."""
    from tests.vllm.engine import Engine  # noqa: PLC0415  # this file is read where there is no vLLM too

    running: list[Engine] = []

    def stop() -> None:
        while running:
            engine = running.pop()
            try:
                engine.check_settled()
            finally:
                engine.close()

    def make(model: str, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        stop()
        try:
            running.append(Engine(model, extra, **options))
        except BaseException:
            Engine.clean_up()
            raise
        return running[0]

    yield make
    stop()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults in the transfers of engines that are started after this."""
    faults = Faults()
    monkeypatch.setattr(cargohold.transfer.cpu, "make_transfer_worker", faults.make_transfers)
    return faults


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's build for CPUs keep matrices as they are."""
    from vllm import _custom_ops  # noqa: PLC0415  # after the environment has been set

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
