"""Turns: threads that share one engine use it one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cargohold.errors import EngineDeadError


class Turns:
    """A fair, re-entrant lock: lets threads do in turn what only one of them may do at a time.

    A thread that has waited goes before one that has just had a turn: with one of Python's locks alone, a thread that takes
    turn after turn would keep the others out. Code that runs within a turn may take a nested one, as signal handlers do, also
    while others wait.

    A process that is forked has the lock as it was at that moment, but none of the threads: no one would ever end a turn, or do
    what a turn waits for. So turns are for one process only, the one that made them.
    """

    def __init__(self) -> None:
        self._next = threading.RLock()
        self._now = threading.RLock()
        self._whose: int | None = None
        # Threads that have a turn, wait for one or have just had one. Signal handlers run at any moment: also between the one
        # when a thread gets a lock and the one when it notes that it has it.
        self._near: set[int] = set()
        self._process = os.getpid()

    @property
    def are_here(self) -> bool:
        """Whether this is the process that turns are for."""
        return os.getpid() == self._process

    @contextmanager
    def take(self) -> Iterator[bool]:
        """Wait for a turn, and hold it within the ``with`` block. Yields ``False`` if it is nested in this thread's turn.

        Raises:
            EngineDeadError: this process was forked from the one that turns are for.
        """
        if not self.are_here:
            raise EngineDeadError(f"this LLM belongs to process {self._process}; make one in each process")
        with self._coming_near() as was_near:
            if was_near:
                # Who waits for ``_now`` has ``_next``. This thread, which may have ``_now``, must not wait for that.
                self._now.acquire()
            else:
                with self._next:
                    self._now.acquire()
            before, self._whose = self._whose, threading.get_ident()
            try:
                yield before is None
            finally:
                self._whose = before
                self._now.release()

    @contextmanager
    def take_if_free(self) -> Iterator[bool]:
        """Take a turn without waiting. Yields whether it was taken: not while any thread, even this one, has or awaits a turn.

        In a process that was forked, none is taken.
        """
        with self._coming_near():
            if not self.are_here or self._whose == threading.get_ident() or not self._is_mine_now():
                yield False
                return
            self._whose = threading.get_ident()
            try:
                yield True
            finally:
                self._whose = None
                self._now.release()

    def _is_mine_now(self) -> bool:
        """Get ``_now`` if nobody has it, or waits for it. Returns whether this thread has got it."""
        if not self._next.acquire(blocking=False):
            return False
        try:
            return self._now.acquire(blocking=False)
        finally:
            self._next.release()

    @contextmanager
    def _coming_near(self) -> Iterator[bool]:
        """Note that this thread has a turn, or is about to. Yields whether that was noted already: by what this interrupts."""
        thread = threading.get_ident()
        was_near = thread in self._near
        self._near.add(thread)
        try:
            yield was_near
        finally:
            if not was_near:
                self._near.discard(thread)
