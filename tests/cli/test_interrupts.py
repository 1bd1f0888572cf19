"""Ctrl-C and closed pipes, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.data.make_trace import TRACE

WAIT_S = 30.0
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command; whatever is left of it at the end is killed."""
    with ExitStack() as stack:

        def run(*args: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "cargohold", *args],
                start_new_session=True,  # so that its processes can be sent what a terminal would send to all of them
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def read_some(stream: IO[str] | None) -> str:
    """What is there as soon as there is something."""
    assert stream is not None
    return os.read(stream.fileno(), 65536).decode()


LONG = ("--max-tokens", "6000")


def test_ctrl_c_while_it_generates_ends_cleanly(start: Start, chat_model: str) -> None:
    process = start("run", chat_model, "-p", "Hello", *LONG)
    assert read_some(process.stdout)
    _interrupt(process)


def test_ctrl_c_while_it_loads_ends_cleanly(start: Start, chat_model: str) -> None:
    process = start("--verbose", "run", chat_model, "-p", "Hello", "--num-device-blocks", "100")
    assert "sequences are limited" in read_some(process.stderr), "what it says just before it loads the weights"
    _interrupt(process)


def _interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_conversation(start: Start, chat_model: str) -> None:
    process = start("chat", chat_model, *LONG)
    assert process.stdin is not None
    process.stdin.write("Hello\n")
    process.stdin.flush()
    assert read_some(process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate("/new\n/quit\n")
    assert process.returncode == 0
    lines = err.splitlines()
    assert lines[-2:] == ["(interrupted)", "a new conversation"]
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(start: Start, chat_model: str) -> None:
    process = start("run", chat_model, "-p", "Hello", *LONG)
    assert process.stdout is not None
    assert read_some(process.stdout)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == 0
    assert err == ""


IN_PROCESSES = {
    "simulate": ("simulate", "--minutes", "5", "--jobs", "2"),
    "replay": ("replay", str(TRACE), "--jobs", "2"),
    "plan": ("plan", "--trace", str(TRACE), "--bytes-per-token", "1024", "--jobs", "2"),
}


def wait_for_processes(process: subprocess.Popen[str]) -> None:
    """Until the first worker has just been started; beside it, there is the one that keeps track of semaphores."""
    deadline = time.monotonic() + WAIT_S
    while len(psutil.Process(process.pid).children()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("command", IN_PROCESSES)
def test_ctrl_c_while_its_processes_start_prints_nothing_of_theirs(command: str, start: Start) -> None:
    process = start(*IN_PROCESSES[command])
    wait_for_processes(process)
    time.sleep(0.2)  # in the midst of their imports
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_processes_end_with_it_however_it_ends(number: signal.Signals, start: Start) -> None:
    process = start(*IN_PROCESSES["simulate"])
    wait_for_processes(process)
    workers = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(WAIT_S) == -number
    _, alive = psutil.wait_procs(workers, WAIT_S)
    for worker in alive:
        worker.kill()
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_no_files_are_left_when_it_is_killed(
    command: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(*IN_PROCESSES[command])
    wait_for_processes(process)
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "module",
    [
        "numpy",
        "typer",
        pytest.param(
            "pydantic", marks=pytest.mark.skipif(find_spec("pydantic") is None, reason="Typer 0.26 does without")
        ),
    ],
)
def test_ctrl_c_while_it_imports_ends_cleanly(module: str) -> None:
    """NumPy is what the package would import first, pydantic what Typer imports when it reads the command line."""
    script = f"""
import sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
sys.argv = ["cargohold", "simulate", "--seeds", "1", "--jobs", "1"]
import cargohold.cli
sys.exit(cargohold.cli.main())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")
