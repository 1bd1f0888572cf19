"""Processes for work that is done side by side: Ctrl-C is their parent's to handle, and without the parent they end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec, TypeVar

from cargohold.interrupts import held_back_in_processes

P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool(ProcessPoolExecutor):
    """A pool of processes, each started when there is work for it.

    They end when the pool is left or this process ends, however it does, also in the middle of work.

    Args:
        num_processes: at most so many.
        start: called first in each of them, if given.
        arguments: of ``start``.
    """

    def __init__(self, num_processes: int, start: Callable[..., None] | None = None, *arguments: Any) -> None:
        context = get_context("spawn")  # libraries with threads may have been imported here
        self._their_end, self._lifeline = context.Pipe(duplex=False)
        super().__init__(num_processes, context, initializer=_begin, initargs=(self._their_end, start, arguments))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called in one of the processes."""
        # This is where the base class starts them. It has made locks before, and with them the process that keeps track of
        # those, at whose start Ctrl-C would be let through.
        with held_back_in_processes():
            return super().submit(fn, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        """End all processes: whoever still works does so for nobody, and may take minutes."""
        self._lifeline.close()
        self.shutdown(cancel_futures=True)
        self._their_end.close()


def _begin(lifeline: Connection, start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # A terminal sends it to all of us, and the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe is closed, or its process has ended."""
    wait([lifeline])
    os._exit(1)
