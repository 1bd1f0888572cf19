"""Turns: threads that share one engine use it one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A fair, re-entrant lock: lets threads do in turn what only one of them may do at a time.

    A thread that has waited goes before one that has just had a turn: with one of Python's locks alone, a thread that takes
    turn after turn would keep the others out. Code that runs within a turn may take a nested one, as signal handlers do.
    """

    def __init__(self) -> None:
        self._next = threading.RLock()
        self._now = threading.RLock()
        self._whose: int | None = None

    @contextmanager
    def take(self) -> Iterator[bool]:
        """Wait for a turn, and hold it within the ``with`` block. Yields ``False`` if it is nested in this thread's turn."""
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
        """Take a turn without waiting. Yields whether it was taken: not if any thread, even this one, has a turn."""
        if self._whose == threading.get_ident() or not self._now.acquire(blocking=False):
            yield False
            return
        self._whose = threading.get_ident()
        try:
            yield True
        finally:
            self._whose = None
            self._now.release()
