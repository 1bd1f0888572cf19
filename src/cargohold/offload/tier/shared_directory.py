"""A directory as an object store: the work that the package ``obstore`` leaves to us.

The package writes each object to a file ``<name>#<number>``, and renames the file when it is whole. It neither lists nor
deletes such files, so those that a killed process left are found and deleted here. And it lists a directory as a whole, which
fails at the first name that is no text, or at a directory that we may not read. In a directory that others use too, we look
only where our files can be.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from obstore.store import LocalStore, ObjectStore

LEFT_AFTER_S: Final = 3600.0
"""Seconds since its last write after which an unfinished file counts as left behind: no write takes so long.

If one does, its rename fails, and only that one store with it.
"""

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{32}/([0-9a-f]{2}/([0-9a-f]{2})+|[a-z.]+)#[0-9]+")
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PRIVATE: Final = 0o700


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

    Does not follow links: what they lead to is not ours to delete. Raises ``OSError``.

    Args:
        directory: the store's directory.
        prefix: start of the paths: empty, or a namespace's id and a slash.
    """
    for namespace in _entries(directory):
        is_ours = _NAMESPACE.fullmatch(namespace.name) and f"{namespace.name}/".startswith(prefix)
        if is_ours and not namespace.is_symlink():
            for entry in _entries(namespace):
                if _FOLDER.fullmatch(entry.name) and not entry.is_symlink():
                    yield from _files([namespace.name, entry.name], _entries(entry))
                else:
                    yield from _files([namespace.name], [entry])


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


def _files(names: list[str], entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # deleted meanwhile
        if stat.S_ISREG(status.st_mode):
            yield "/".join([*names, entry.name]), status
