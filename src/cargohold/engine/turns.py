"""One engine, several threads: each uses it in its turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets threads do by turns what only one of them may do at a time.

    Who has waited goes before who has just had a turn: with one of Python's locks alone, a thread that takes turn after turn
    would keep the others out. What a turn calls may take a turn of its own, as signal handlers do.
    """

    def __init__(self) -> None:
        self._next = threading.RLock()
        self._now = threading.RLock()
        self._whose: int | None = None

    @contextmanager
    def take(self) -> Iterator[bool]:
        """Wait for a turn, and have it; whether it is not part of another one."""
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
        """Have a turn if nobody has one, not even this thread; whether that is so."""
        if self._whose == threading.get_ident() or not self._now.acquire(blocking=False):
            yield False
            return
        self._whose = threading.get_ident()
        try:
            yield True
        finally:
            self._whose = None
            self._now.release()
