"""The files of one shard: segments of equal slots, preallocated, and beside each a table of the slots' headers.

::

    segment-00000.data      slot 0 | slot 1 | ...          payloads, each padded to whole pages
    segment-00000.headers   header 0 | header 1 | ...      256 bytes each; zeros where nothing is stored
    segment-00000.uses      use 0 | use 1 | ...            8 bytes each: when the slot was last used

Headers lie together so that a start reads them at the speed of the disk. A chunk is written in three steps: its old header is
wiped, the payload is written, the header is written. Whatever interrupts that leaves no header, or, after a loss of power, one
whose checksum does not fit.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cargohold.offload.tier.header import HEADER_BYTES
from cargohold.offload.tier.staging import PAGE_BYTES, address_of, bounce_buffer, copy_bytes, padded

_NO_HEADER: Final = bytes(HEADER_BYTES)
USE_BYTES: Final = 8
_PRIVATE: Final = 0o600
_NO_FILES: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})
"""What opening says of links, of sockets, and of directories."""


class Descriptor:
    """An open file, closed when nobody refers to it any more: then no thread can still be using its number.

    Who else may write to the directory could have put something else in its place: a link, through which we would write to what
    is ours elsewhere, or a pipe, at which we would wait for ever.

    Args:
        path: of the file.
        flags: as for ``os.open``.

    Raises:
        OSError: it cannot be opened, or is no regular file.
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
        """Close it now: for who knows that no other thread uses it."""
        number = self.number
        del self.number
        os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of files.

    Attributes:
        slot_bytes: of a slot; whole pages.
        slots_per_segment: slots in each pair of files.
    """

    slot_bytes: int
    slots_per_segment: int

    @property
    def data_bytes(self) -> int:
        """Of a segment's payloads."""
        return self.slot_bytes * self.slots_per_segment

    @property
    def header_bytes(self) -> int:
        """Of a segment's headers."""
        return padded(HEADER_BYTES * self.slots_per_segment)

    @property
    def use_bytes(self) -> int:
        """Of what a segment says of uses."""
        return padded(USE_BYTES * self.slots_per_segment)

    @property
    def segment_bytes(self) -> int:
        """Of a segment's files."""
        return self.data_bytes + self.header_bytes + self.use_bytes


class Segment:
    """The files of one segment. Raises ``OSError``.

    Args:
        path: of the files, without what tells them apart.
        geometry: their sizes.
        direct_io: go around the page cache, if the file system allows.
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
        """Of the largest payload."""
        return self._geometry.slot_bytes

    def is_whole(self) -> bool:
        """Whether payloads and headers have their full size."""
        sizes = (os.fstat(self._headers.number).st_size, os.fstat(self._data.number).st_size)
        return sizes == (self._geometry.header_bytes, self._geometry.data_bytes)

    def allocate(self) -> None:
        """Take all the space on the disk that the files will ever need."""
        os.posix_fallocate(self._headers.number, 0, self._geometry.header_bytes)
        os.posix_fallocate(self._uses.number, 0, self._geometry.use_bytes)
        os.posix_fallocate(self._data.number, 0, self._geometry.data_bytes)

    def is_deleted(self) -> bool:
        """Whether somebody has deleted the files; they can still be used, but nobody will find them again."""
        return not os.fstat(self._data.number).st_nlink or not os.fstat(self._headers.number).st_nlink

    def read_headers(self) -> bytes:
        """The headers of all slots."""
        size = HEADER_BYTES * self._geometry.slots_per_segment
        data = os.pread(self._headers.number, size, 0)
        _require(len(data) == size)
        return data

    def read_header(self, slot: int) -> bytes:
        """A slot's header."""
        return os.pread(self._headers.number, HEADER_BYTES, slot * HEADER_BYTES)

    def write_header(self, slot: int, header: bytes = _NO_HEADER) -> None:
        """Write or wipe a slot's header."""
        _require(os.pwrite(self._headers.number, header, slot * HEADER_BYTES) == HEADER_BYTES)

    def read_uses(self) -> bytes:
        """When each slot was last used: what was written, as far as it is there."""
        return os.pread(self._uses.number, USE_BYTES * self._geometry.slots_per_segment, 0)

    def write_uses(self, uses: bytes) -> None:
        """Write when each slot was last used."""
        assert len(uses) <= self._geometry.use_bytes
        _require(os.pwrite(self._uses.number, uses, 0) == len(uses))

    def read_payload(self, slot: int, into: memoryview, skipped: int = 0) -> None:
        """Read the start of a slot, or what is behind the first ``skipped`` bytes, which are whole pages."""
        at = self._offset(slot) + skipped
        if not self._is_direct:
            _require(os.preadv(self._data.number, [into], at) == len(into))
            return
        main = _aligned_part(into)
        rest = bounce_buffer(len(into) - main)
        _require(os.preadv(self._data.number, [into[:main], rest], at) == padded(len(into)))
        copy_bytes(into[main:], rest[: len(into) - main])

    def write_payload(self, slot: int, payload: memoryview) -> None:
        """Write the start of a slot."""
        if not self._is_direct:
            _require(os.pwritev(self._data.number, [payload], self._offset(slot)) == len(payload))
            return
        main = _aligned_part(payload)
        rest = bounce_buffer(len(payload) - main)
        copy_bytes(rest[: len(payload) - main], payload[main:])
        _require(os.pwritev(self._data.number, [payload[:main], rest], self._offset(slot)) == padded(len(payload)))

    def _offset(self, slot: int) -> int:
        return slot * self._geometry.slot_bytes

    def _reopen_direct(self) -> bool:
        try:
            self._data = Descriptor(self._data_path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False  # this file system cannot
        return True


def read_small(path: Path, max_bytes: int) -> bytes:
    """A whole file that should be small. Raises ``OSError``, also if it is larger."""
    file = Descriptor(path, os.O_RDONLY)
    data = os.pread(file.number, max_bytes + 1, 0)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"{path} is larger than anything that belongs there")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file for its owner only, all or nothing. Raises ``OSError``."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    file = Descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    _require(os.pwrite(file.number, data, 0) == len(data))
    temporary.replace(path)


def segment_files(path: Path) -> tuple[Path, Path]:
    """Payloads and headers of a segment."""
    return path.with_suffix(".data"), path.with_suffix(".headers")


def uses_file(path: Path) -> Path:
    """When a segment's slots were last used. Nothing is lost if it is not there, or says nonsense."""
    return path.with_suffix(".uses")


def _aligned_part(view: memoryview) -> int:
    """How many of the leading bytes can be read or written in place: whole pages, or none."""
    return 0 if address_of(view) % PAGE_BYTES else len(view) // PAGE_BYTES * PAGE_BYTES


def _irregular(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{path} is no regular file")


def _require(is_complete: bool) -> None:
    if not is_complete:
        raise OSError(errno.EIO, "fewer bytes than asked for: the file is damaged or the disk full")
