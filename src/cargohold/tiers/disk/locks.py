"""Locks on directories, held by a process and released with it, however it ends."""

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

from cargohold.tiers.disk.files import Descriptor

MAX_LOCK_WAIT_S: Final = 60.0
"""Maximum seconds to wait for a brief lock. Deleting chunks of other models takes a while, but a process that was stopped in
the middle of it must not stop all others."""
_POLL_S: Final = 0.05
_held: Final[weakref.WeakSet[Descriptor]] = weakref.WeakSet()
"""The files of this process that may be locked."""


def _let_go_as_child() -> None:
    """Close the lock files in a forked child, which inherits them: else they would stay locked after its parent is killed."""
    for file in list(_held):
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_as_child)


class DirectoryLock:
    """The lock of the process that uses a directory; held from creation to ``release``.

    Args:
        directory: the directory.

    Raises:
        BlockingIOError: another process uses it, or another part of this process.
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
        """Whether the directory was deleted or moved away. Raises ``OSError``.

        Also true after ``release``, and in a forked child, which does not hold the lock.
        """
        file = self._own_file
        if file is None:
            return True
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.number))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except PermissionError:
            return False  # we may not look, but the directory may well be there

    def note_use(self) -> None:
        """Write down that the directory is used now. Only a hint, so a failure is ignored."""
        file = self._own_file
        if file is not None:
            with suppress(OSError):
                os.utime(file.number)

    def set_last_used(self, seconds: float) -> None:
        """Write down when the directory was last used, in seconds since 1970. Raises ``OSError``."""
        file = self._own_file
        if file is not None:
            os.utime(file.number, (seconds, seconds))

    def release(self) -> None:
        """Let other processes use the directory."""
        file, self._file = self._own_file, None
        if file is not None:
            _unlock(file)

    @property
    def _own_file(self) -> Descriptor | None:
        """The lock file; ``None`` after ``release``, and in a forked child, whose copy of the lock is not its own."""
        return self._file if os.getpid() == self._owner else None


@contextmanager
def brief_lock(directory: Path) -> Iterator[None]:
    """Hold a lock that only one process has at a time, for short work on ``directory``. Waits at most ``MAX_LOCK_WAIT_S``.

    Raises:
        OSError: the directory is not there or not writable, or another process does not release the lock.
    """
    path = directory / ".lock"
    owner = os.getpid()
    file = _open(path, os.O_RDWR | os.O_CREAT)
    end = time.monotonic() + MAX_LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                reason = f"another process has held {path} for {MAX_LOCK_WAIT_S:g} s; `fuser {path}` tells which"
                raise OSError(errno.EBUSY, reason) from None
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child has closed its copy
            _unlock(file)
        del file  # closes it even if the traceback of an error keeps this frame


def is_in_use(directory: Path) -> bool:
    """Whether a process uses a directory. Call it under ``brief_lock``, because it takes the directory's lock for a moment."""
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
    """Release a lock, even if a child that was forked meanwhile has the file open, too.

    A failure, which is possible on a network file system, is ignored: the work under the lock is done, and closing the file
    releases the lock as well.
    """
    with suppress(OSError):
        fcntl.flock(file.number, fcntl.LOCK_UN)
