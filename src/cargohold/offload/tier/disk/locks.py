"""Locks on directories: held by a process, and gone with it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cargohold.offload.tier.disk.files import Descriptor

MOST_BRIEF_S: Final = 60.0
"""It takes a while to delete what other models left; but whoever was stopped in the middle must not stop everybody."""
_POLL_S: Final = 0.05


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
        self._file: Descriptor | None = Descriptor(self._path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.note_use()

    def is_deleted(self) -> bool:
        """Whether somebody has deleted the directory, or moved it away. Raises ``OSError``."""
        file = self._file  # another thread may release it meanwhile
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
        file = self._file  # another thread may release it meanwhile
        if file is not None:
            with suppress(OSError):
                os.utime(file.number)

    def set_last_used(self, seconds: float) -> None:
        """Say that the directory was last used then, in seconds since 1970."""
        if self._file is not None:
            os.utime(self._file.number, (seconds, seconds))

    def release(self) -> None:
        """Let others use the directory."""
        file, self._file = self._file, None
        # A child that was forked meanwhile must not take the lock from its parent.
        if file is not None and os.getpid() == self._owner:
            _unlock(file)


@contextmanager
def brief_lock(directory: Path) -> Iterator[None]:
    """Hold what only one process may have at a time, for short work on ``directory``. Waits, a minute at most.

    Raises:
        OSError: the directory is not there or not writable, or another process does not let go of it.
    """
    path = directory / ".lock"
    file = Descriptor(path, os.O_RDWR | os.O_CREAT)
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
        _unlock(file)
        del file  # also where an error's traceback would keep it


def is_in_use(directory: Path) -> bool:
    """Whether a process uses a directory. To be asked under ``brief_lock``, for it takes the lock itself for a moment."""
    try:
        file = Descriptor(directory / DirectoryLock.FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    _unlock(file)
    return False


def _unlock(file: Descriptor) -> None:
    """Let go of a lock, also where a child that was forked meanwhile has the file open too.

    What was done under it is done: if this fails, as it can on a file system that is elsewhere, closing the file is left.
    """
    with suppress(OSError):
        fcntl.flock(file.number, fcntl.LOCK_UN)
