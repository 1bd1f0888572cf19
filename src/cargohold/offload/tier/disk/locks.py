"""Locks on directories: held by a process, and gone with it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cargohold.offload.tier.disk.files import Descriptor

MOST_BRIEF_S: Final = 60.0
"""It takes a while to delete what other models left; but whoever was stopped in the middle must not stop everybody."""
_POLL_S: Final = 0.05
_held: Final[weakref.WeakSet[Descriptor]] = weakref.WeakSet()
"""The files of this process that may be locked."""


def _let_go_as_child() -> None:
    """A forked child has its parent's files open, too: what it kept would stay locked after a parent that was killed."""
    for file in list(_held):
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_as_child)


class DirectoryLock:
    """Says that a process uses a directory.

    Args:
        directory: which.

    Raises:
        BlockingIOError: another process does, or another part of this one.
        OSError: the directory is not there or not writable.
    """

    FILE = "lock"

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.FILE
        self._owner = os.getpid()
        self._file: Descriptor | None = _open(self._path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.note_use()

    def is_deleted(self) -> bool:
        """Whether somebody has deleted the directory, or moved it away, or this is a child's. Raises ``OSError``."""
        file = self._own_file
        if file is None:
            return True
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.number))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except PermissionError:
            return False  # nobody can see it, but it may well be there

    def note_use(self) -> None:
        """Say that the directory is used now. A hint: that it cannot be written down harms nobody."""
        file = self._own_file
        if file is not None:
            with suppress(OSError):
                os.utime(file.number)

    def set_last_used(self, seconds: float) -> None:
        """Say that the directory was last used then, in seconds since 1970."""
        file = self._own_file
        if file is not None:
            os.utime(file.number, (seconds, seconds))

    def release(self) -> None:
        """Let others use the directory."""
        file, self._file = self._own_file, None
        if file is not None:
            _unlock(file)

    @property
    def _own_file(self) -> Descriptor | None:
        """The file, unless it was released, perhaps by another thread meanwhile; what a forked child has is not its own."""
        return self._file if os.getpid() == self._owner else None


@contextmanager
def brief_lock(directory: Path) -> Iterator[None]:
    """Hold what only one process may have at a time, for short work on ``directory``. Waits, a minute at most.

    Raises:
        OSError: the directory is not there or not writable, or another process does not let go of it.
    """
    path = directory / ".lock"
    owner = os.getpid()
    file = _open(path, os.O_RDWR | os.O_CREAT)
    end = time.monotonic() + MOST_BRIEF_S
    while True:
        try:
            fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                reason = f"another process has held {path} for {MOST_BRIEF_S:g} s; `fuser {path}` tells which"
                raise OSError(errno.EBUSY, reason) from None
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child's is closed
            _unlock(file)
        del file  # also where an error's traceback would keep it


def is_in_use(directory: Path) -> bool:
    """Whether a process uses a directory. To be asked under ``brief_lock``, for it takes the lock itself for a moment."""
    try:
        file = _open(directory / DirectoryLock.FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    _unlock(file)
    return False


def _open(path: Path, flags: int) -> Descriptor:
    file = Descriptor(path, flags)
    _held.add(file)
    return file


def _unlock(file: Descriptor) -> None:
    """Let go of a lock, also where a child that was forked meanwhile has the file open too.

    What was done under it is done: if this fails, as it can on a file system that is elsewhere, closing the file is left.
    """
    with suppress(OSError):
        fcntl.flock(file.number, fcntl.LOCK_UN)
