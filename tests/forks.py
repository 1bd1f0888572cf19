"""Processes for tests that start in milliseconds: a fork server has imported before what they need.

It starts with the first of them, one for each process that runs tests, and ends with it.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import Thread

import pytest

from cargohold.cli import main
from cargohold.engine.ranks.processes import RankProcess


def fork_server() -> ForkServerContext:
    """The context of ``multiprocessing`` whose processes are forked from a server with PyTorch and transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that run in processes of their own are forked, where each would otherwise import PyTorch for seconds."""
    fork_server()
    # What starts a process is an attribute of its class; there is no public way to choose it.
    monkeypatch.setattr(RankProcess, "_Popen", ForkServerProcess.__dict__["_Popen"])


class ForkedCommand:
    """The command in a forked process, in a session of its own; for the rest as ``subprocess.Popen``.

    Args:
        args: the command line behind ``cargohold``.
        environment: its environment variables.
        terminal: descriptor of the terminal that it uses, which stays the caller's; by default it has three pipes.
        ignored: signals that it finds ignored, as a shell's job in the background finds Ctrl-C.
    """

    def __init__(
        self,
        args: Sequence[str],
        environment: Mapping[str, str],
        terminal: int | None = None,
        ignored: Sequence[signal.Signals] = (),
    ) -> None:
        with ExitStack() as theirs:
            if terminal is None:
                (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = (os.pipe() for _ in range(3))
                self.stdin, self.stdout, self.stderr = (
                    os.fdopen(our_stdin, "w"),
                    os.fdopen(our_stdout),
                    os.fdopen(our_stderr),
                )
            else:
                stdin, stdout, stderr = (os.dup(terminal) for _ in range(3))
            channels = [theirs.enter_context(Connection(descriptor)) for descriptor in (stdin, stdout, stderr)]
            self._process = fork_server().Process(target=_command, args=(args, dict(environment), channels, ignored))
            self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("cargohold", timeout or 0.0)
        return self.returncode

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        read: list[str] = ["", ""]

        def read_all(number: int) -> None:
            read[number] = (self.stdout, self.stderr)[number].read()

        readers = [Thread(target=read_all, args=(number,), daemon=True) for number in range(2)]
        for reader in readers:
            reader.start()
        with self.stdin:
            self.stdin.write(text)
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return read[0], read[1]

    def close(self) -> None:
        """End it, if it has not ended."""
        self.kill()
        self._process.join()
        for stream in (self.stdin, self.stdout, self.stderr) if hasattr(self, "stdin") else ():
            stream.close()


def _command(
    args: Sequence[str],
    environment: dict[str, str],
    channels: Sequence[Connection],
    ignored: Sequence[signal.Signals],
) -> None:
    """Become what a new process would be; then run the command."""
    os.setsid()  # so that its processes can be sent what a terminal would send to all of them
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for descriptor, channel in enumerate(channels):
        os.dup2(channel.fileno(), descriptor)
        channel.close()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C that is typed becomes a signal
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["cargohold", *args]
    sys.exit(main())
