"""Lists, reads and deletes the objects of a store that are ours, and limits their total size.

In a directory, whoever may write there can put something else in the place of one of our files, such as a link, or a pipe. To
open a pipe is to wait until somebody writes to it. So only regular files are opened, and everything else counts as absent; the
next store of the chunk takes its place. The package ``obstore`` opens whatever is there, even to say its size. So it is not
used to look for files of a directory or to read them.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import obstore
from obstore.store import ObjectStore

from cargohold.offload.tier.disk.files import Descriptor
from cargohold.offload.tier.shared_directory import delete_unfinished, directory_of, files_in

logger = logging.getLogger(__name__)

DESCRIPTION: Final = "namespace.json"
_OURS: Final = re.compile(
    rf"(?P<namespace>[0-9a-f]{{32}})/([0-9a-f]{{2}}/(?P<key>([0-9a-f]{{2}})+)|{re.escape(DESCRIPTION)})(?P<unfinished>#[0-9]+)?"
)
_NO_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL})
"""Errors that say that there is no regular file: those of the system, and ``EINVAL``, which ``Descriptor`` raises."""
_LOOKS_PER_BUDGET: Final = 16
_KEPT: Final = 0.9
"""Fraction of the budget that is used after making room, so that room need not be made for every chunk."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One of our objects in a store.

    Attributes:
        path: its path in the store.
        namespace_id: id of its namespace.
        key: the chunk's key; empty if the object is no whole chunk, but the namespace's description, or a file that is still
            being written, or that a killed process left.
        num_bytes: its size.
        written_s: time of writing, in seconds since 1970.
    """

    path: str
    namespace_id: str
    key: bytes
    num_bytes: int
    written_s: float


def list_ours(store: ObjectStore, prefix: str = "") -> Iterator[StoredObject]:
    """Yield our objects; other objects in the same store are left out. Raises the store's errors.

    Args:
        store: the store.
        prefix: start of the paths: empty, or a namespace's id and a slash.
    """
    directory = directory_of(store)
    if directory is None:
        pages = obstore.list(store, prefix or None)
        entries = (
            (str(one["path"]), int(one["size"]), one["last_modified"].timestamp()) for page in pages for one in page
        )
    else:
        entries = ((path, status.st_size, status.st_mtime) for path, status in files_in(directory, prefix))
    for path, num_bytes, written_s in entries:
        match = _OURS.fullmatch(path)
        if match is not None:
            key = b"" if match["unfinished"] else bytes.fromhex(match["key"] or "")
            yield StoredObject(path, match["namespace"], key, num_bytes, written_s)


def is_there(store: ObjectStore, path: str) -> bool:
    """Whether there is an object. Raises the store's errors."""
    directory = directory_of(store)
    try:
        if directory is None:
            obstore.head(store, path)
            return True
        return stat.S_ISREG(os.lstat(directory / path).st_mode)
    except OSError as error:
        _require_absent(error)
        return False


def read_object(store: ObjectStore, path: str, max_bytes: int) -> memoryview:
    """Return an object's bytes; none of them if it has more than ``max_bytes``.

    Raises ``FileNotFoundError`` if it is not there, and the store's other errors.
    """
    directory = directory_of(store)
    if directory is None:
        found = obstore.get(store, path)
        return memoryview(found.bytes() if found.meta["size"] <= max_bytes else b"")
    with _open(directory / path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return memoryview(file.read(num_bytes) if num_bytes <= max_bytes else b"")


def read_pieces(store: ObjectStore, path: str, piece_bytes: int) -> Iterator[memoryview]:
    """Yield an object's bytes in pieces of ``piece_bytes``. Raises as ``read_object``, when the first one is asked for."""
    directory = directory_of(store)
    if directory is None:
        yield from (memoryview(piece) for piece in obstore.get(store, path).stream(piece_bytes))
        return
    with _open(directory / path) as file:
        while piece := file.read(piece_bytes):
            yield memoryview(piece)


def delete_if_there(store: ObjectStore, path: str) -> None:
    """Delete an object, unless another process has deleted it already. Raises the store's other errors."""
    directory = directory_of(store)
    try:
        if directory is None:
            obstore.delete(store, path)
        else:
            (directory / path).unlink()
    except OSError as error:
        _require_absent(error)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read. Raises ``FileNotFoundError`` if there is none, whatever else is there."""
    try:
        descriptor = Descriptor(path, os.O_RDONLY)
    except OSError as error:
        _require_absent(error)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    with closing(descriptor), open(descriptor.number, "rb", closefd=False) as file:
        yield file


def _require_absent(error: OSError) -> None:
    """Raise an error again unless it says that there is no object."""
    if not isinstance(error, FileNotFoundError) and error.errno not in _NO_FILE:
        raise error


class StoreBudget:
    """Keeps the total size of our objects in a store below a limit, by deleting the chunks written longest ago. Thread-safe.

    The store is listed before the first chunk, whenever the limit seems to be reached, and each time a sixteenth of the limit
    was written here. So one engine alone never exceeds the limit; each further engine may exceed it by what it writes between
    two listings. With many objects a listing may take minutes: one thread makes it, and no other thread waits for it.

    Args:
        store: the bucket and prefix.
        max_bytes: maximum size of all namespaces in the store together.
    """

    def __init__(self, store: ObjectStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_looking = False
        # Bytes stored or being written. Full at first, so that the first chunk makes a listing.
        self._num_bytes = max_bytes
        self._unseen = 0  # bytes written since the last listing
        self._writing = 0
        self._new = 0  # bytes that a listing under way may not see

    @contextmanager
    def room_for(self, num_bytes: int) -> Iterator[bool]:
        """Make room for a chunk that is written inside the ``with``; yield whether there is room. Raises the store's errors.

        There is no room if the chunk is larger than the limit, or while another thread makes room in a full store.
        """
        is_granted = num_bytes <= self._max_bytes and self._reserve(num_bytes)
        try:
            yield is_granted
        finally:
            if is_granted:
                with self._lock:
                    self._writing -= num_bytes

    def _reserve(self, num_bytes: int) -> bool:
        with self._lock:
            is_full = self._num_bytes + num_bytes > self._max_bytes
            is_due = (self._unseen + num_bytes) * _LOOKS_PER_BUDGET > self._max_bytes
            must_look = (is_full or is_due) and not self._is_looking
            if must_look:
                self._is_looking = True
                self._new = self._writing
            else:
                return not is_full and self._grant(num_bytes)
        try:
            total = self._look(num_bytes)
            with self._lock:
                self._num_bytes, self._unseen = total + self._new, self._new
                return self._num_bytes + num_bytes <= self._max_bytes and self._grant(num_bytes)
        finally:
            self._is_looking = False

    def _grant(self, num_bytes: int) -> bool:
        self._num_bytes += num_bytes
        self._unseen += num_bytes
        self._writing += num_bytes
        self._new += num_bytes
        return True

    def _look(self, num_wanted: int) -> int:
        """List the store, and delete the oldest chunks if ``num_wanted`` bytes more would exceed the limit.

        Returns the bytes that our objects take then, with the unfinished files that may not be deleted yet.
        """
        delete_unfinished(self._store)
        objects = list(list_ours(self._store))
        total = sum(known.num_bytes for known in objects)
        num_wanted += self._new
        if total + num_wanted > self._max_bytes:
            before = total
            limit = min(self._max_bytes - num_wanted, int(_KEPT * self._max_bytes))
            for known in sorted(objects, key=lambda found: found.written_s):
                if total <= limit:
                    break
                if known.key:
                    delete_if_there(self._store, known.path)
                    total -= known.num_bytes
            logger.info("shared tier: %d bytes of the oldest chunks were deleted to make room", before - total)
        return total
