"""The files of one shard: segments of equal slots, preallocated, and next to each a table of the slots' headers.

::

    segment-00000.data      slot 0 | slot 1 | ...          payloads, each padded to whole slots (see ``slots``)
    segment-00000.headers   header 0 | header 1 | ...      256 bytes each; zeros where nothing is stored; then, as long as
                            details 0 | details 1 | ...    a namespace has room for them, each chunk's details; and
                            link 0 | link 1 | ...          8 bytes each, where chunks take several slots
    segment-00000.uses      use 0 | use 1 | ...            8 bytes each: when the slot was last used

Headers lie together so that a start reads them at the speed of the disk. A chunk is written in three steps: the slots' old
headers are wiped, payload and details are written, the headers are written. An interruption leaves no first header or, after a
power failure, one whose checksum does not match.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cargohold.deadlines import ROOM
from cargohold.process import ENGINE
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.memory import PAGE_BYTES, address_of, bounce_buffer, copy_bytes, padded

_NO_HEADER: Final = bytes(HEADER_BYTES)
USE_BYTES: Final = 8
_PRIVATE: Final = 0o600
_PIECE_BYTES: Final = 1024**2
_PUNCH_HOLE: Final = 1 | 2
"""Of ``fallocate``: free the space, and keep the size of the file. Python's own function cannot do that."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that say that nothing more can be written: the disk, or what a user may have of it, or a file is full."""
_NO_FILES: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})
"""Errors of opening a link, a socket, or a directory."""


class Descriptor:
    """An open file, which is closed when no object refers to it any more: then no thread can still use its number.

    Only a regular file is opened. Another user who may write to the directory could have put something else in its place: a
    link, through which we would overwrite a file of ours elsewhere, or a pipe, at which we would wait for ever.

    Args:
        path: path of the file.
        flags: as for ``os.open``.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path, flags: int) -> None:
        try:
            self.number = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _PRIVATE)
        except OSError as error:
            if error.errno not in _NO_FILES:
                raise
            raise _irregular(path) from error
        if not stat.S_ISREG(os.fstat(self.number).st_mode):
            raise _irregular(path)

    def close(self) -> None:
        """Close the file now. The caller must know that no other thread uses it."""
        number = self.number
        del self.number
        os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a shard's files.

    Attributes:
        slot_bytes: bytes of a slot; whole pages.
        slots_per_segment: number of slots in a segment.
        details_bytes: room at each slot for the details of its chunk.
        link_bytes: room at each slot for the link to its chunk's next one.
        packs: whether the slots were made for packed chunks; see ``slots``.
    """

    slot_bytes: int
    slots_per_segment: int
    details_bytes: int = 0
    link_bytes: int = 0
    packs: bool = False

    @property
    def data_bytes(self) -> int:
        """Bytes of a segment's payloads."""
        return self.slot_bytes * self.slots_per_segment

    @property
    def header_bytes(self) -> int:
        """Bytes of a segment's headers, details and links."""
        return padded((HEADER_BYTES + self.details_bytes + self.link_bytes) * self.slots_per_segment)

    @property
    def use_bytes(self) -> int:
        """Bytes of a segment's table of last uses."""
        return padded(USE_BYTES * self.slots_per_segment)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment's files together."""
        return self.data_bytes + self.header_bytes + self.use_bytes


class Segment:
    """The files of one segment. All methods raise ``OSError``.

    Args:
        path: path of the files without their suffix.
        geometry: their sizes.
        direct_io: whether to bypass the page cache, if the file system allows it.
    """

    def __init__(self, path: Path, geometry: Geometry, *, direct_io: bool) -> None:
        self._geometry = geometry
        self._data_path, self._headers_path = segment_files(path)
        self._headers = Descriptor(self._headers_path, os.O_RDWR | os.O_CREAT)
        self._data = Descriptor(self._data_path, os.O_RDWR | os.O_CREAT)
        self._uses = Descriptor(uses_file(path), os.O_RDWR | os.O_CREAT)
        self._is_direct = direct_io and self._reopen_direct()

    @property
    def slot_bytes(self) -> int:
        return self._geometry.slot_bytes

    @property
    def details_bytes(self) -> int:
        """Room at each slot for the details of its chunk."""
        return self._geometry.details_bytes

    @property
    def num_slots(self) -> int:
        return self._geometry.slots_per_segment

    @property
    def last_descriptor(self) -> int:
        """Number of the file that was opened last."""
        return self._uses.number

    def is_whole(self) -> bool:
        """Whether payloads and headers have their full size."""
        sizes = (os.fstat(self._headers.number).st_size, os.fstat(self._data.number).st_size)
        return sizes == (self._geometry.header_bytes, self._geometry.data_bytes)

    def allocate(self) -> None:
        """Allocate all the space on the disk that the files will ever need."""
        os.posix_fallocate(self._headers.number, 0, self._geometry.header_bytes)
        os.posix_fallocate(self._uses.number, 0, self._geometry.use_bytes)
        os.posix_fallocate(self._data.number, 0, self._geometry.data_bytes)

    def is_deleted(self) -> bool:
        """Whether one of the files was deleted. They can still be used, but no later process will find them."""
        return not os.fstat(self._data.number).st_nlink or not os.fstat(self._headers.number).st_nlink

    def read_headers(self) -> bytes:
        """Return the headers of all slots."""
        size = HEADER_BYTES * self._geometry.slots_per_segment
        data = os.pread(self._headers.number, size, 0)
        _require(len(data) == size)
        return data

    def read_header(self, slot: int) -> bytes:
        return os.pread(self._headers.number, HEADER_BYTES, slot * HEADER_BYTES)

    def write_header(self, slot: int, header: bytes = _NO_HEADER) -> None:
        """Write a slot's header, or wipe it with zeros, the default; and those of the slots after it if there are more."""
        _require(os.pwrite(self._headers.number, header, slot * HEADER_BYTES) == len(header))

    def read_details(self, slot: int) -> bytes:
        """Return what lies in a slot's room for details: those of its chunk or, if that has none, of an earlier one."""
        return os.pread(self._headers.number, self._geometry.details_bytes, self._details_offset(slot))

    def write_details(self, slot: int, details: bytes) -> None:
        """Write the details of a slot's chunk."""
        assert len(details) <= self._geometry.details_bytes
        _require(os.pwrite(self._headers.number, details, self._details_offset(slot)) == len(details))

    def read_links(self) -> bytes:
        return os.pread(self._headers.number, self._geometry.link_bytes * self.num_slots, self._link_offset(0))

    def write_links(self, slot: int, links: bytes) -> None:
        """Write the link of a slot, and those of the slots after it if there are more."""
        _require(os.pwrite(self._headers.number, links, self._link_offset(slot)) == len(links))

    def read_uses(self) -> bytes:
        """Return the table of last uses, as far as it was written."""
        return os.pread(self._uses.number, USE_BYTES * self._geometry.slots_per_segment, 0)

    def write_uses(self, uses: bytes) -> None:
        """Write the table of last uses."""
        assert len(uses) <= self._geometry.use_bytes
        _require(os.pwrite(self._uses.number, uses, 0) == len(uses))

    def read_payload(self, slot: int, into: memoryview, skipped: int = 0) -> None:
        """Fill ``into`` from the start of a slot on, or from after its first ``skipped`` bytes, which must be whole pages."""
        at = self._offset(slot) + skipped
        if not self._is_direct:
            _require(os.preadv(self._data.number, [into], at) == len(into))
            return
        main = _aligned_part(into)
        rest = bounce_buffer(len(into) - main)
        _require(os.preadv(self._data.number, [into[:main], rest], at) == padded(len(into)))
        copy_bytes(into[main:], rest[: len(into) - main])

    def write_payload(self, slot: int, payload: memoryview) -> None:
        """Write a payload, or a part of it, from the start of a slot on."""
        if not self._is_direct:
            _require(os.pwritev(self._data.number, [payload], self._offset(slot)) == len(payload))
            return
        main = _aligned_part(payload)
        rest = bounce_buffer(len(payload) - main)
        copy_bytes(rest[: len(payload) - main], payload[main:])
        _require(os.pwritev(self._data.number, [payload[:main], rest], self._offset(slot)) == padded(len(payload)))

    def give_back(self, slot: int, count: int) -> None:
        """Give the file system back the space of the payloads in ``count`` slots from ``slot`` on. They read as zeros then."""
        punch = ctypes.CDLL(None, use_errno=True).fallocate
        punch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
        if punch(self._data.number, _PUNCH_HOLE, self._offset(slot), count * self.slot_bytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(self._data_path))

    def _offset(self, slot: int) -> int:
        return slot * self._geometry.slot_bytes

    def _details_offset(self, slot: int) -> int:
        return HEADER_BYTES * self._geometry.slots_per_segment + slot * self._geometry.details_bytes

    def _link_offset(self, slot: int) -> int:
        return (HEADER_BYTES + self._geometry.details_bytes) * self.num_slots + slot * self._geometry.link_bytes

    def _reopen_direct(self) -> bool:
        try:
            self._data = Descriptor(self._data_path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False  # this file system has no direct I/O
        return True


def read_small(path: Path, max_bytes: int) -> bytes:
    """Read a whole small file. Raises ``OSError``, also if it is larger than ``max_bytes``."""
    file = Descriptor(path, os.O_RDONLY)
    data = os.pread(file.number, max_bytes + 1, 0)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"{path} is larger than anything that belongs there")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that only its owner may access, wholly or not at all. Raises ``OSError``."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    file = Descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    _require(os.pwrite(file.number, data, 0) == len(data))
    temporary.replace(path)


def segment_files(path: Path) -> tuple[Path, Path]:
    """Return the paths of a segment's payloads and headers."""
    return path.with_suffix(".data"), path.with_suffix(".headers")


def may_hold_chunks(headers: Path) -> bool:
    """Whether a segment's file of headers has one that is not empty, or cannot be read."""
    try:
        return any(piece != bytes(len(piece)) for piece in read_pieces(headers))
    except OSError:
        return True


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file in pieces, the last of which may be shorter. Raises ``OSError``."""
    file = Descriptor(path, os.O_RDONLY)
    at = 0
    while piece := os.pread(file.number, _PIECE_BYTES, at):
        yield piece
        at += len(piece)


def uses_file(path: Path) -> Path:
    """Return the path of a segment's last uses. Nothing is lost if that file is missing or damaged."""
    return path.with_suffix(".uses")


def _aligned_part(view: memoryview) -> int:
    """Return how many leading bytes direct I/O can read or write in place: whole pages, or none."""
    return 0 if address_of(view) % PAGE_BYTES else len(view) // PAGE_BYTES * PAGE_BYTES


def _irregular(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{path} is not a regular file")


def _require(is_complete: bool) -> None:
    if not is_complete:
        raise OSError(errno.EIO, "fewer bytes than asked for: the file is damaged or the disk full")


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
        with suppress(OSError):  # a full disk
            os.ftruncate(self._file.number, 0)
            os.pwrite(self._file.number, os.environ.get(ENGINE, "").encode(), 0)
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
    """Hold a lock that only one process has at a time, for short work on ``directory``. Waits at most ``ROOM.seconds()``.

    Raises:
        OSError: the directory is not there or not writable, or another process does not release the lock.
    """
    path = directory / ".lock"
    owner = os.getpid()
    file = _open(path, os.O_RDWR | os.O_CREAT)
    end = time.monotonic() + ROOM.seconds()
    while True:
        try:
            fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                reason = f"another process has held {path} for {ROOM.seconds():g} s; `fuser {path}` tells which"
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


def is_of_engine(directory: Path) -> bool:
    """Whether the process that uses a directory is of an engine started with the options of this one. Raises ``OSError``."""
    return read_small(directory / DirectoryLock.FILE, PAGE_BYTES) == os.environ[ENGINE].encode()


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
