"""A directory as an object store: what the package that writes to it leaves to us.

It writes each object to a file ``<name>#<number>`` and renames that when it is whole. Such files it neither lists nor deletes:
what a process left that was killed meanwhile is found here alone.
"""

from __future__ import annotations

import errno
import re
import time
from pathlib import Path
from typing import Final

from obstore.store import LocalStore, ObjectStore

LEFT_AFTER_S: Final = 3600.0
"""Nobody writes for so long; if somebody does, the rename fails, and that one store with it."""

_UNFINISHED: Final = re.compile(r"[0-9a-f]{32}/([0-9a-f]{2}/([0-9a-f]{2})+|[a-z.]+)#[0-9]+")
_FULL: Final = re.compile(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG})\)")
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


def delete_unfinished(store: ObjectStore, namespace_id: str = "*", older_than_s: float = LEFT_AFTER_S) -> None:
    """Delete files of ours that nobody will finish; other stores than directories have none. Raises ``OSError``.

    Args:
        store: where.
        namespace_id: whose, or ``*`` for all.
        older_than_s: when they were written to last.
    """
    directory = directory_of(store)
    if directory is None:
        return
    for pattern in ("*#*", "*/*#*"):
        for file in directory.glob(f"{namespace_id}/{pattern}"):
            if _UNFINISHED.fullmatch(file.relative_to(directory).as_posix()):
                try:
                    if time.time() - file.stat().st_mtime >= older_than_s:
                        file.unlink()
                except (FileNotFoundError, PermissionError):
                    continue  # finished or deleted meanwhile, or that of another user, who will see to it
