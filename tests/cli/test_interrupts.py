"""Ctrl-C, SIGTERM and closed pipes, in a process of its own.

Commands that load a model are forked with PyTorch imported, all but one: what matters comes after that.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from cargohold.cli.signals import termination
from tests.command import Command
from tests.data.make_trace import TRACE
from tests.forks import ForkedCommand

WAIT_S = 30.0
Process = subprocess.Popen[str] | ForkedCommand
Start = Callable[..., subprocess.Popen[str]]
Fork = Callable[..., ForkedCommand]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


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
                env={**os.environ, **ENVIRONMENT},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Starts the command at once, with PyTorch imported; whatever is left of it at the end is killed."""
    with ExitStack() as stack:

        def run(*args: str, **options: Any) -> ForkedCommand:
            return stack.enter_context(closing(ForkedCommand(args, {**os.environ, **ENVIRONMENT}, **options)))

        yield run


def read_some(stream: IO[str] | None) -> str:
    """What is there as soon as there is something."""
    assert stream is not None
    return os.read(stream.fileno(), 65536).decode()


LONG = ("--max-tokens", "6000")


def test_ctrl_c_while_it_generates_ends_cleanly(fork: Fork, chat_model: str) -> None:
    process = fork("run", chat_model, "-p", "Hello", *LONG)
    assert read_some(process.stdout)
    _interrupt(process)


WHILE_IT_LOADS = ("--verbose", "run", "-p", "Hello", "--num-device-blocks", "100")
"""With a model, the command that says something just before it loads the weights."""


def test_ctrl_c_while_it_loads_ends_cleanly(fork: Fork, chat_model: str) -> None:
    process = fork(*WHILE_IT_LOADS, chat_model)
    assert "sequences are limited" in read_some(process.stderr)
    _interrupt(process)


@pytest.mark.long  # it imports for seconds before; the quick test above is forked from what has done that
def test_ctrl_c_while_a_command_as_users_start_it_loads_ends_cleanly(start: Start, chat_model: str) -> None:
    process = start(*WHILE_IT_LOADS, chat_model)
    assert "sequences are limited" in read_some(process.stderr)
    _interrupt(process)


def _interrupt(process: Process) -> None:
    _end(process, signal.SIGINT)


ENDS = {signal.SIGINT: (130, "interrupted\n"), signal.SIGTERM: (143, "terminated\n")}
"""Exit status and last words by signal."""


def _end(process: Process, number: signal.Signals) -> None:
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_S)
    # With --verbose it may have come some steps further before the signal reached it.
    said = "".join(line for line in err.splitlines(keepends=True) if " INFO cargohold." not in line)
    assert (process.returncode, said) == ENDS[number]


def test_sigterm_while_it_generates_ends_cleanly(fork: Fork, chat_model: str) -> None:
    process = fork("run", chat_model, "-p", "Hello", *LONG)
    assert read_some(process.stdout)
    _end(process, signal.SIGTERM)


def test_sigterm_while_it_loads_ends_cleanly(fork: Fork, chat_model: str) -> None:
    process = fork(*WHILE_IT_LOADS, chat_model)
    assert "sequences are limited" in read_some(process.stderr)
    _end(process, signal.SIGTERM)


def test_sigterm_ends_a_job_in_the_background_which_ignores_ctrl_c(fork: Fork, chat_model: str) -> None:
    process = fork("run", chat_model, "-p", "Hello", *LONG, ignored=[signal.SIGINT])
    assert read_some(process.stdout)
    process.send_signal(signal.SIGINT)
    assert read_some(process.stdout), "it goes on"
    _end(process, signal.SIGTERM)


@pytest.fixture
def default_sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM as in a new process: other tests' libraries, such as Ray, may have set a handler in this one."""
    monkeypatch.setattr(termination, "is_asked_for", False)  # for those that come after, too
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
def test_processes_that_are_told_to_end_first_are_no_failure(
    cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Service managers send SIGTERM to a whole group, and a worker may be gone before the command notices its own."""

    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a worker is gone")

    monkeypatch.setattr("cargohold.engine.model.hf_runner.HFModelRunner.execute", end)
    result = cargohold("run", chat_model, "-p", "Hello")
    assert (result.status, result.err) == ENDS[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it is this process that was told"


class Terminal:
    """A terminal for a command.

    Attributes:
        theirs: its end of the command.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        self._unread = ""

    def read_until(self, text: str) -> str:
        """What it shows next, up to and with a text; or up to the end of the command."""
        while text not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], WAIT_S)
            assert ready, f"{text!r} is not in {self._unread!r}"
            try:
                self._unread += os.read(self._ours, 65536).decode()
            except OSError:  # the command has ended
                break
        shown, found, self._unread = self._unread.partition(text)
        return shown + found

    def close(self) -> None:
        os.close(self._ours)


ForkInTerminal = Callable[..., tuple[ForkedCommand, Terminal]]


@pytest.fixture
def fork_in_terminal(fork: Fork) -> Iterator[ForkInTerminal]:
    """Starts the command in a terminal of its own."""
    with ExitStack() as stack:

        def run(*args: str) -> tuple[ForkedCommand, Terminal]:
            terminal = stack.enter_context(closing(Terminal()))
            process = fork(*args, terminal=terminal.theirs)
            os.close(terminal.theirs)
            return process, terminal

        yield run


HIDE_CURSOR, SHOW_CURSOR, NEVER = "\x1b[?25l", "\x1b[?25h", "\0"


@pytest.mark.parametrize("number", ENDS)
def test_a_terminal_gets_its_cursor_back(
    number: signal.Signals, fork_in_terminal: ForkInTerminal, chat_model: str
) -> None:
    """Found by a newcomer: SIGTERM while a model was loaded left the terminal without one."""
    process, terminal = fork_in_terminal("run", chat_model, "-p", "Hello", *LONG)
    terminal.read_until(HIDE_CURSOR)
    process.send_signal(number)
    shown = terminal.read_until(NEVER)
    assert process.wait(WAIT_S) == ENDS[number][0]
    assert shown.rfind(SHOW_CURSOR) > shown.rfind(HIDE_CURSOR)


def test_a_reader_that_goes_away_is_no_error(fork: Fork, chat_model: str) -> None:
    process = fork("run", chat_model, "-p", "Hello", *LONG)
    assert read_some(process.stdout)
    process.stdout.close()
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


@pytest.mark.parametrize(
    "command", ["simulate", *(pytest.param(name, marks=pytest.mark.long) for name in ("replay", "plan"))]
)
def test_ctrl_c_while_its_processes_start_prints_nothing_of_theirs(command: str, start: Start) -> None:
    process = start(*IN_PROCESSES[command])
    wait_for_processes(process)
    time.sleep(0.2)  # in the midst of their imports
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long), signal.SIGKILL]
)
def test_its_processes_end_with_it_however_it_ends(number: signal.Signals, start: Start) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup")
    process = start(*IN_PROCESSES["simulate"])
    wait_for_processes(process)
    workers = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(WAIT_S) == (143 if number == signal.SIGTERM else -number)
    _, alive = psutil.wait_procs(workers, WAIT_S)
    for worker in alive:
        worker.kill()
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("command", [pytest.param("replay", marks=pytest.mark.long), "plan"])
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
