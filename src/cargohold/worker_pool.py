"""A pool of processes for parallel work. They leave Ctrl-C to their parent, and end when it ends."""

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

    They end when the pool is left or this process ends for whatever reason, even in the middle of work.

    Args:
        num_processes: most processes at a time.
        start: called first in each process, if given.
        arguments: arguments of ``start``.
    """

    def __init__(self, num_processes: int, start: Callable[..., None] | None = None, *arguments: Any) -> None:
        context = get_context("spawn")  # libraries with threads may have been imported here
        self._their_end, self._lifeline = context.Pipe(duplex=False)
        super().__init__(num_processes, context, initializer=_begin, initargs=(self._their_end, start, arguments))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called in one of the processes."""
        # The base class starts processes here. Its ``__init__`` has already made locks, and thereby started the process that
        # keeps track of them: starting that one here would unblock Ctrl-C.
        with held_back_in_processes():
            return super().submit(fn, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        """End all processes at once: nobody wants the results of unfinished work, which may take minutes."""
        self._lifeline.close()
        self.shutdown(cancel_futures=True)
        self._their_end.close()


def _begin(lifeline: Connection, start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # A terminal sends SIGINT to the parent and all of these processes; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe is closed, or its process has ended."""
    wait([lifeline])
    os._exit(1)
