"""An ``LLM`` and processes: how it ends with its own, and what happens in one that is forked."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, EngineDeadError, OffloadConfig, SamplingParams
from cargohold.protocol import ClassFactory
from cargohold.protocol.connector import NullConnectorScheduler, NullConnectorWorker

PATIENCE_S = 60.0
PROMPT = [token % 190 for token in range(5, 60)]
RIGHT, WRONG, HANGS = "right", "wrong", "hangs"

# --- the end of its process -------------------------------------------------------------------------------------------

UNFINISHED = """
import sys
from cargohold import LLM, DiskTierConfig, OffloadConfig, SamplingParams

disk = DiskTierConfig(directory=sys.argv[2], max_bytes="1MiB", reserve_bytes=0)
llm = LLM(sys.argv[1], offload=OffloadConfig(host_bytes="1MiB", tiers=[disk]))
stream = llm.stream(list(range(5, 60)), SamplingParams(max_tokens=100))
next(stream)
"""


@pytest.mark.parametrize(
    ("last_line", "status"), [("", 0), pytest.param("raise RuntimeError('of the program')", 1, marks=pytest.mark.long)]
)
def test_a_stream_that_is_not_read_to_its_end_does_not_keep_its_program_from_ending(
    last_line: str, status: int, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """Found by trying: what closed the stream waited for threads of the disk that had ended before."""
    script = UNFINISHED + last_line
    command = [sys.executable, "-c", script, tiny_model("llama"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == status, run.stderr
    assert run.stderr.splitlines()[-1:] == (["RuntimeError: of the program"] if status else [])
    assert "thread" not in run.stderr


# --- a forked process -------------------------------------------------------------------------------------------------


def in_a_fork(what: Callable[[], bool]) -> str:
    """Call a function in a forked process; returns whether it answered ``True``."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if what() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return RIGHT if status == 0 else WRONG
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HANGS


def refuses(what: Callable[[], Any], process: int) -> bool:
    try:
        what()
    except EngineDeadError as error:
        return str(error) == f"this LLM belongs to process {process}; make one in each process"
    return False


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@forks
def test_a_forked_process_is_told_to_make_a_model_of_its_own(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """Found by trying: it waited for ever, for threads that only the other process has."""
    llm = make_llm(tiny_model("llama"), offload=OffloadConfig(host_bytes="1MiB"))
    parent = os.getpid()
    sampling = SamplingParams(max_tokens=9)
    expected = llm.generate(PROMPT, sampling)[0].token_ids
    stream = llm.stream(PROMPT, sampling)
    next(stream)

    def use() -> bool:
        uses: list[Callable[[], Any]] = [
            lambda: llm.generate(PROMPT, sampling),
            lambda: next(llm.stream(PROMPT, sampling)),
            lambda: next(stream),
            llm.stats,
            llm.reset_cache,
        ]
        refused = [refuses(one, parent) for one in uses]
        llm.close()  # as at the end of a ``with`` block around the fork
        return all(refused)

    assert in_a_fork(use) == RIGHT
    assert list(stream)[-1].token_ids == expected


class Closing(NullConnectorScheduler):
    """Makes a file when it is shut down."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def shutdown(self) -> None:
        self._file.touch()


@forks
def test_a_forked_process_does_not_end_what_belongs_to_the_other(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    shut_down = tmp_path / "shut down"
    llms = [
        LLM(tiny_model("llama"), offload=ClassFactory(lambda _: Closing(shut_down), lambda _: NullConnectorWorker()))
    ]

    def forget() -> bool:
        llms.clear()
        gc.collect()
        time.sleep(0.5)  # in the background it would be shut down now
        return not shut_down.exists()

    assert in_a_fork(forget) == RIGHT
    llms[0].close()
    assert shut_down.exists()


def test_it_cannot_be_sent_to_another_process(tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(tiny_model("llama"))
    with pytest.raises(TypeError, match=r"cannot be pickled: .* make one in each process"):
        pickle.dumps(llm)
