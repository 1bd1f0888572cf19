"""Ctrl-C, SIGTERM and failed output: how they end a command. Imports nothing that takes time."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@dataclass(slots=True)
class Termination:
    """SIGTERM, which is answered like Ctrl-C: what is open is closed, processes end, and a terminal gets its cursor back.

    Attributes:
        is_asked_for: whether it has come. Code that goes on after Ctrl-C has to end in this case.
    """

    is_asked_for: bool = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGTERM within the ``with`` block.

        Does nothing outside the main thread, or where the signal is ignored or the program handles it itself.
        """
        self.is_asked_for = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, _signal: int, frame: FrameType | None) -> None:
        self.is_asked_for = True
        # Code that holds Ctrl-C back until it does no harm holds this back, too. Jobs in the background ignore Ctrl-C.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)


termination = Termination()
"""There is one for the process, as there is one handler of a signal."""


def interrupted() -> int:
    """Tell the user what ended the command; returns the exit status for that."""
    if sys.stderr is not None:  # the program that started this process may have closed it
        sys.stderr.write("terminated\n" if termination.is_asked_for else "interrupted\n")
    return EXIT_TERMINATED if termination.is_asked_for else EXIT_INTERRUPTED


_WRITERS = ("typer", "click", "rich", "cargohold.cli", "cargohold.cli.vllm_flags")
"""What writes nothing but answers and remarks: packages, and modules of ours."""


def failed(error: OSError) -> int:
    """Tell the user what failed, unless a pipe's reader has seen enough; returns the exit status for that.

    Most often it is a full disk behind standard output. What is left in its buffer would fail again, so it is dropped.
    """
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    logging.getLogger(__name__).info("where it failed:", exc_info=error)
    if sys.stderr is not None:
        sys.stderr.write(f"cargohold: {_describe(error)}\n")
    return EXIT_FAILED


def _describe(error: OSError) -> str:
    """The error's message; the system names only files, so standard output has to be named here."""
    from cargohold.errors import one_line  # noqa: PLC0415  # Ctrl-C is not answered yet when this module is imported

    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals["__name__"]
    is_output = module in _WRITERS or module.partition(".")[0] in _WRITERS
    return f"standard output: {error.strerror}" if is_output and error.strerror else one_line(error)
