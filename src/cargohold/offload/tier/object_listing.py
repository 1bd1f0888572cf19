"""Lists, reads and deletes the objects of a store that are ours.

In a directory, whoever may write there can put something else in the place of one of our files, such as a link, or a pipe. To
open a pipe is to wait until somebody writes to it. So only regular files are opened, and everything else counts as absent; the
next store of the chunk takes its place. The package ``obstore`` opens whatever is there, even to say its size. So it is not
used to look for files of a directory or to read them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import obstore
from obstore import exceptions as store_errors
from obstore.store import ObjectStore

from cargohold.offload.tier.disk.files import Descriptor
from cargohold.offload.tier.namespace import DESCRIPTION, ID_PATTERN
from cargohold.offload.tier.shared_directory import directory_of, files_in

_OURS: Final = re.compile(
    rf"(?P<namespace>{ID_PATTERN})/([0-9a-f]{{2}}/(?P<key>([0-9a-f]{{2}})+)|{re.escape(DESCRIPTION)})(?P<unfinished>#[0-9]+)?"
)
_NO_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL})
"""Errors that say that there is no regular file: those of the system, and ``EINVAL``, which ``Descriptor`` raises."""
_ACCESS_ERRORS: Final = (store_errors.PermissionDeniedError, store_errors.UnauthenticatedError, PermissionError)
_ACCESS_ANSWER: Final = re.compile(r"AccessDenied|status code: 40[13]\b")
"""What a server says that refuses access. The package does not tell such errors of listing and deleting from others by type."""


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


def try_listing(store: ObjectStore, prefix: str) -> None:
    """Find out whether a store can be listed, from its first page. Raises the store's errors.

    Args:
        store: the store.
        prefix: a namespace's id; in a directory, its folder must be there, and is tried as well.
    """
    directory = directory_of(store)
    if directory is None:
        next(iter(obstore.list(store)), None)
        return
    for place in (directory, directory / prefix):
        with os.scandir(place):
            pass


def refuses_access(error: Exception) -> bool:
    """Whether an error of a store says that we lack a right."""
    return isinstance(error, _ACCESS_ERRORS) or _ACCESS_ANSWER.search(str(error)) is not None


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
