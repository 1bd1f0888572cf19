"""A directory as an object store: what the package that writes to it leaves to us.

It writes each object to a file ``<name>#<number>`` and renames that when it is whole. Such files it neither lists nor deletes:
what a process left that was killed meanwhile is found here alone. And it lists a directory as a whole, which fails at the first
name that is no text, or directory that is not for everybody: in one that others use too, we look only where ours can be.
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
"""Nobody writes for so long; if somebody does, the rename fails, and that one store with it."""

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{32}/([0-9a-f]{2}/([0-9a-f]{2})+|[a-z.]+)#[0-9]+")
_FULL: Final = re.compile(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG})\)")
_BAD_PLACE: Final = f"(os error {errno.EIO})"
_PRIVATE: Final = 0o700


def directory_of(store: ObjectStore) -> Path | None:
    """Where a store is, if it is a directory."""
    return store.prefix if isinstance(store, LocalStore) else None


def make_directory(directory: Path) -> None:
    """Make it for its owner only, unless it is there. Raises ``OSError``."""
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)


def is_full(error: Exception) -> bool:
    """Whether something could not be written to a directory for want of room."""
    return _FULL.search(str(error)) is not None


def is_bad_place(error: Exception) -> bool:
    """Whether a file of a directory could not be read though it is there."""
    return _BAD_PLACE in str(error)


def files_in(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Files where ours can be, whosever they are, by path. What links lead to is not ours to delete. Raises ``OSError``.

    Args:
        directory: where.
        prefix: how their paths start: empty, or a namespace's id and a slash.
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
    """Delete files of ours that nobody will finish; other stores than directories have none. Raises ``OSError``.

    Args:
        store: where.
        prefix: how their paths start: empty, or a namespace's id and a slash.
        older_than_s: when they were written to last.
    """
    directory = directory_of(store)
    if directory is None:
        return
    for path, status in files_in(directory, prefix):
        if _UNFINISHED.fullmatch(path) and time.time() - status.st_mtime >= older_than_s:
            try:
                (directory / path).unlink()
            except (FileNotFoundError, PermissionError):
                continue  # finished or deleted meanwhile, or that of another user, who will see to it


def _entries(directory: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """What is in a directory; nothing if it is none, or goes meanwhile."""
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
            continue  # it goes meanwhile
        if stat.S_ISREG(status.st_mode):
            yield "/".join([*names, entry.name]), status
