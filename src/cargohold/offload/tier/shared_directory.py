"""A directory as an object store: the work that the package ``obstore`` leaves to us.

The package writes each object to a file ``<name>#<number>``, and renames the file when it is whole. It neither lists nor
deletes such files, so those that a killed process left are found and deleted here. And it lists a directory as a whole, which
fails at the first name that is no text, or at a directory that we may not read. In a directory that others use too, we look
only where our files can be, and pass over what we may not read.

The directory is often a mount. When it vanishes, an ordinary directory appears in its place, on a disk that is not meant for
chunks. So ``DirectoryPlace`` remembers the file system.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from obstore.store import LocalStore, ObjectStore

from cargohold.offload.tier.namespace import ID_PATTERN

logger = logging.getLogger(__name__)

LEFT_AFTER_S: Final = 3600.0
"""Seconds since its last write after which an unfinished file counts as left behind: no write takes so long.

If one does, its rename fails, and only that one store with it.
"""

_NAMESPACE: Final = re.compile(ID_PATTERN)
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_UNFINISHED: Final = re.compile(rf"{ID_PATTERN}/([0-9a-f]{{2}}/([0-9a-f]{{2}})+|[a-z.]+)#[0-9]+")
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PRIVATE: Final = 0o700
_told: Final[set[str]] = set()
"""Paths of namespaces of which was logged that we may not look into them: whenever room is needed, they are looked at again."""


class DirectoryPlace:
    """A store's directory, on the file system where it was at the start. Thread-safe.

    Args:
        directory: the directory, which exists.
        mark: path in it of a file that we wrote at the start. A file system that was mounted anew may have another number, and
            is known by this file.

    Raises:
        OSError: the directory cannot be looked at.
    """

    def __init__(self, directory: Path, mark: str) -> None:
        self._directory = directory
        self._mark = mark
        self._lock = threading.Lock()
        self._known = _identity(directory)

    def require(self) -> None:
        """Create the directory if it was deleted; then the store is empty, which is logged.

        Raises ``OSError`` if that fails, or if the directory is, or would be, on another file system.
        """
        if self._find() == self._known:
            return
        with self._lock:
            found = self._find()
            if found == self._known:
                return  # another thread has created it
            if found is not None and self._is_mounted_anew(found):
                self._known = found
                return
            if _device_above(self._directory) != self._known[0]:
                raise OSError(f"{self._directory} is on another file system than at the start: has a mount gone?")
            make_directory(self._directory)
            self._known = _identity(self._directory)
            logger.warning("shared tier: %s is gone, and another directory is in its place", self._directory)

    def _find(self) -> tuple[int, int] | None:
        try:
            return _identity(self._directory)
        except FileNotFoundError:
            return None

    def _is_mounted_anew(self, found: tuple[int, int]) -> bool:
        return found[1] == self._known[1] and (self._directory / self._mark).is_file()


def directory_of(store: ObjectStore) -> Path | None:
    """Return a store's directory; ``None`` if the store is not a directory."""
    return store.prefix if isinstance(store, LocalStore) else None


def make_directory(directory: Path) -> None:
    """Create a directory for its owner only, unless it exists. Raises ``OSError``."""
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)


def is_full(error: Exception) -> bool:
    """Whether an error means that a file could not be written because there is no room."""
    return not _FULL.isdisjoint(_numbers_of(error))


def files_in(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of all files where ours can be, whoever wrote them.

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


def delete_unfinished(store: ObjectStore, prefix: str = "", older_than_s: float = LEFT_AFTER_S) -> None:
    """Delete our unfinished files that nobody will finish. Does nothing for stores that are not directories.

    Raises ``OSError``.

    Args:
        store: the store.
        prefix: start of the paths: empty, or a namespace's id and a slash.
        older_than_s: seconds since the last write to a file after which it is deleted.
    """
    directory = directory_of(store)
    if directory is None:
        return
    for path, status in files_in(directory, prefix):
        if _UNFINISHED.fullmatch(path) and time.time() - status.st_mtime >= older_than_s:
            try:
                (directory / path).unlink()
            except (FileNotFoundError, PermissionError):
                continue  # finished or deleted meanwhile, or another user's, whose engines will delete it


def _numbers_of(error: Exception) -> set[int]:
    """Return the system's error numbers that the package names in an error's text; it gives them nowhere else."""
    return set(map(int, _OS_ERROR.findall(str(error))))


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
            "shared tier: not all of %s may be read, so what is there is passed over: %s",
            namespace.path,
            error.strerror,
        )


def _identity(directory: Path) -> tuple[int, int]:
    """Return the numbers of a directory's file system and of the directory in it. Raises ``OSError``."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    return status.st_dev, status.st_ino


def _device_above(path: Path) -> int:
    """Return the number of the file system of a path, or of the nearest directory above it that exists. Raises ``OSError``."""
    try:
        return _identity(path)[0]
    except FileNotFoundError:
        return _device_above(path.parent)
