"""A directory as an object store: the work that the package ``obstore`` leaves to us.

The package writes each object to a file ``<name>#<number>``, and renames the file when it is whole. It neither lists nor
deletes such files, so those that a killed process left are found and deleted here. And it lists a directory as a whole, which
fails at the first name that is no text, or at a directory that we may not read. In a directory that others use too, we look
only where our files can be, and pass over what we may not read.

The directory is often a mount. When it vanishes, an ordinary directory appears in its place, on a disk that is not meant for
chunks. So ``DirectoryPlace`` remembers the file system.

Lists, reads and deletes the objects of a store that are ours.

In a directory, anyone who may write there can replace one of our files by something else, such as a link, or a pipe. Opening
a pipe waits for a writer. So only regular files are opened, and everything else counts as absent; the next store of the chunk
takes its place. The package ``obstore`` opens whatever is there, even to say its size. So it is not used to look for files of a
directory or to read them.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import obstore
from obstore import exceptions as store_errors
from obstore.store import LocalStore, ObjectStore

from cargohold.errors import TierError, one_line
from cargohold.tiers.disk.files import FULL, Descriptor
from cargohold.tiers.inventory import NAME, PIECE_BYTES, StoredObject, StoreInventory
from cargohold.tiers.namespace import DESCRIPTION, ID_PATTERN, MAX_DESCRIPTION_BYTES

logger = logging.getLogger(__name__)

LEFT_AFTER_S: Final = 3600.0
"""Seconds since its last write after which an unfinished file counts as left behind: no write takes so long.

If one does, its rename fails, and only that one store with it.
"""

_NAMESPACE: Final = re.compile(ID_PATTERN)
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_UNFINISHED: Final = re.compile(rf"{ID_PATTERN}/([0-9a-f]{{2}}/([0-9a-f]{{2}})+|[a-z.]+)#[0-9]+")
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""How the package names the system's error numbers in an error's text; it gives them nowhere else."""
_PRIVATE: Final = 0o700
_told: Final[set[str]] = set()
"""Paths of namespaces of which was logged that we may not look into them: whenever room is needed, they are looked at again."""


class DirectoryPlace:
    """A store's directory, on the file system where it was at the start. Thread-safe.

    Args:
        directory: the directory, which exists.
        mark: path in it of a file that we wrote at the start. A file system that was mounted again may have another number, and
            is known by this file.

    Raises:
        OSError: the directory cannot be looked at.
    """

    def __init__(self, directory: Path, mark: str) -> None:
        self._directory = directory
        self._mark = mark
        self._known = _identity(directory)

    def require(self) -> None:
        """Raise ``OSError`` if the directory was deleted or moved, or its mount has gone: nothing is written in its place."""
        with suppress(FileNotFoundError):
            found = _identity(self._directory)
            if found == self._known or (found[1] == self._known[1] and (self._directory / self._mark).is_file()):
                self._known = found
                return
        gone = "is missing, or its mount is: nothing is stored there until it is back, or the engine restarts"
        raise OSError(f"{self._directory} {gone}")


def directory_of(store: ObjectStore) -> Path | None:
    return store.prefix if isinstance(store, LocalStore) else None


def make_directory(directory: Path) -> None:
    """Create a directory for its owner only, unless it exists. Raises ``OSError``."""
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)


def is_full(error: Exception) -> bool:
    """Whether an error means that a file could not be written: there is no room, or a foreign folder or file has its place."""
    return not {*FULL, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}.isdisjoint(map(int, _OS_ERROR.findall(str(error))))


def files_in(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of all files where ours can be, no matter who wrote them.

    Does not follow links: what they lead to is not ours to delete. What we may not read in the directory is passed over, and
    logged once per namespace. Raises ``OSError`` for other failures, or if we may not read the directory itself.

    Args:
        directory: the store's directory.
        prefix: start of the paths: empty, or a namespace's id and a slash.
    """
    for namespace in _entries(directory):
        is_ours = _NAMESPACE.fullmatch(namespace.name) and f"{namespace.name}/".startswith(prefix)
        if is_ours and not namespace.is_symlink():
            for entry in _readable(namespace, namespace):
                if _FOLDER.fullmatch(entry.name) and not entry.is_symlink():
                    yield from _files(namespace, [entry.name], _readable(namespace, entry))
                else:
                    yield from _files(namespace, [], [entry])


def delete_unfinished(store: ObjectStore, prefix: str = "", older_than_s: float = LEFT_AFTER_S) -> int:
    """Delete our unfinished files that no writer will finish; return their bytes. There are none where a server is the store.

    Raises ``OSError``.

    Args:
        store: the store.
        prefix: start of the paths: empty, or a namespace's id and a slash.
        older_than_s: seconds since the last write to a file after which it is deleted.
    """
    directory, num_bytes = directory_of(store), 0
    if directory is None:
        return 0
    for path, status in files_in(directory, prefix):
        if _UNFINISHED.fullmatch(path) and time.time() - status.st_mtime >= older_than_s:
            # Finished or deleted meanwhile, or another user's, whose engines will delete it.
            with suppress(FileNotFoundError, PermissionError):
                (directory / path).unlink()
                num_bytes += status.st_size
    return num_bytes


def _entries(directory: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory; nothing if it is not a directory, or is deleted meanwhile."""
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


def _readable(namespace: os.DirEntry[str], folder: os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder of a namespace, or of its own; nothing if we may not read it."""
    try:
        yield from _entries(folder)
    except PermissionError as error:
        _tell(namespace, error)


def _files(
    namespace: os.DirEntry[str], above: list[str], entries: Iterable[os.DirEntry[str]]
) -> Iterator[tuple[str, os.stat_result]]:
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except PermissionError as error:
            _tell(namespace, error)
            continue
        if stat.S_ISREG(status.st_mode):
            yield "/".join([namespace.name, *above, entry.name]), status


def _tell(namespace: os.DirEntry[str], error: OSError) -> None:
    """Log, once per namespace, that something in it cannot be looked at."""
    if namespace.path not in _told:
        _told.add(namespace.path)
        logger.warning(
            "shared tier: not all of %s can be read, so it is skipped: %s",
            namespace.path,
            error.strerror,
        )


def _identity(directory: Path) -> tuple[int, int]:
    """Return the numbers of a directory's file system and of the directory in it. Raises ``OSError``."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    return status.st_dev, status.st_ino


# --- lists ------------------------------------------------------------------------------------------------------------

_OURS: Final = re.compile(
    rf"(?P<namespace>{ID_PATTERN})/([0-9a-f]{{2}}/(?P<key>([0-9a-f]{{2}})+)|{re.escape(DESCRIPTION)})(?P<unfinished>#[0-9]+)?"
)
_NO_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL})
"""Errors that say that there is not a regular file: those of the system, and ``EINVAL``, which ``Descriptor`` raises."""
_ACCESS_ERRORS: Final = (store_errors.PermissionDeniedError, store_errors.UnauthenticatedError, PermissionError)
_ACCESS_ANSWER: Final = re.compile(r"AccessDenied|status code: 40[13]\b")
"""What a server says that refuses access. The package does not tell such errors of listing and deleting from others by type."""
_NO_CREDENTIALS: Final = (
    "169.254.169.254",
    "/latest/api/token",
    "metadata.google.internal",
    "/computeMetadata/",
    "/metadata/identity/",
)
"""Where machines in a cloud look for credentials if none were given. An error names one of these only in that case."""


def list_ours(store: ObjectStore, prefix: str = "") -> Iterator[StoredObject]:
    """Yield our objects; other objects in the same store are left out. Raises the store's errors.

    Args:
        store: the store.
        prefix: start of the paths: empty, or a namespace's id and a slash.
    """
    directory = directory_of(store)
    if directory is None:
        entries = _listed(store, prefix)
    else:
        entries = ((path, status.st_size, status.st_mtime) for path, status in files_in(directory, prefix))
    for path, num_bytes, written_s in entries:
        match = _OURS.fullmatch(path)
        if match is not None:
            key = b"" if match["unfinished"] else bytes.fromhex(match["key"] or "")
            yield StoredObject(path, match["namespace"], key, num_bytes, written_s, match["unfinished"] is not None)


def _listed(store: ObjectStore, prefix: str) -> Iterator[tuple[str, int, float]]:
    """Yield path, size and time of writing of the objects in a store that is not a directory.

    Raises ``ValueError`` if the listing starts over: a server that does not understand where to go on would list for ever.
    """
    first = None
    for page in obstore.list(store, prefix or None):
        for one in page:
            path = str(one["path"])
            if path == first:
                raise ValueError(f"the store's listing does not end: after the last page, it begins with {path} again")
            first = first or path
            yield path, int(one["size"]), one["last_modified"].timestamp()


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


def lacks_credentials(error: Exception) -> bool:
    """Whether a store could not be asked because no credentials were given."""
    return any(place in str(error) for place in _NO_CREDENTIALS)


def first_line(error: Exception) -> str:
    """Return the text of an error without the debug text that the package appends."""
    text = str(error).partition("\n")[0]
    return text or one_line(error)


# --- the inventory ----------------------------------------------------------------------------------------------------


class ObjectInventory(StoreInventory):
    """The namespaces in an object store.

    Args:
        store: the bucket and prefix.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def remove(self, namespace_id: str) -> None:
        """Delete every object of a namespace."""
        super().remove(namespace_id)
        with self._session():
            delete_unfinished(self._store, f"{namespace_id}/", older_than_s=0.0)

    def tidy(self) -> int:
        """Delete files that killed writers have left."""
        with self._session():
            return delete_unfinished(self._store)

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Delete the oldest chunks; engines that want them compute instead."""
        gone = 0
        with self._session():
            for chunk in sorted(self._chunks(namespace_id), key=lambda found: found.written_s):
                if gone >= num_bytes:
                    break
                self._delete(chunk.path)
                gone += chunk.num_bytes
        return gone

    @contextmanager
    def _session(self) -> Iterator[None]:
        try:
            yield
        except (store_errors.BaseError, OSError, ValueError) as error:
            reason = "no credentials were found in the environment" if lacks_credentials(error) else first_line(error)
            raise TierError(NAME, reason) from error

    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        yield from list_ours(self._store, namespace_id and f"{namespace_id}/")

    def _pieces(self, chunk: StoredObject) -> Iterator[memoryview]:
        return read_pieces(self._store, chunk.path, PIECE_BYTES)

    def _description(self, namespace_id: str) -> bytes:
        try:
            return bytes(read_object(self._store, f"{namespace_id}/{DESCRIPTION}", MAX_DESCRIPTION_BYTES))
        except FileNotFoundError:
            return b""

    def _delete(self, path: str) -> None:
        delete_if_there(self._store, path)
