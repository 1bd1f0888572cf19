"""Whose the folders in a disk tier's directory are, and how one of ours is deleted.

A folder that is named like a namespace need not be a shard: shared stores, and tiers of third parties, name theirs in the same
way. So a shard is known by what is in it, and only files of the names that a shard has are ever deleted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

from cargohold.offload.tier.config import REPLICA_DIRECTORY
from cargohold.offload.tier.disk.locks import DirectoryLock
from cargohold.offload.tier.namespace import DESCRIPTION, ID_PATTERN

DESCRIPTION_FILE: Final = "shard.json"
_NAMESPACE: Final = re.compile(ID_PATTERN)
_REPLICA: Final = re.compile(REPLICA_DIRECTORY.format(r"[0-9]+"))
_OWN: Final = re.compile(
    rf"{DirectoryLock.FILE}|{re.escape(DESCRIPTION_FILE)}(\.new)?|segment-[0-9]{{5}}\.(data|headers|uses)"
)
_OF_SHARED: Final = re.compile(rf"{re.escape(DESCRIPTION)}(#[0-9]+)?|[0-9a-f]{{2}}")
"""What is in a namespace of a shared directory: its description, perhaps unfinished, and folders with chunks."""


class Owner(Enum):
    """Whose a folder is."""

    OURS = "ours"
    """A shard: it has files of a shard, and nothing else. A killed process may have left a part of them, its lock at least."""
    SHARED = "shared"
    """A namespace of a shared store, whatever else is in it."""
    OTHERS = "others"
    """It has something that no shard has, such as the files of a third party's tier."""
    NOBODY = "nobody"
    """It is empty, or gone. Nobody can tell what will be in it."""
    HIDDEN = "hidden"
    """It cannot be listed. It may be another user's shard; what cannot be listed, we cannot delete either."""


def owner_of(folder: Path) -> Owner:
    """Return whose a folder is, as far as that is certain."""
    try:
        if os.path.lexists(folder / DESCRIPTION):
            return Owner.SHARED
        found = Owner.NOBODY
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_own(entry.name) or entry.is_dir(follow_symlinks=False):
                    return Owner.SHARED if _OF_SHARED.fullmatch(entry.name) else Owner.OTHERS
                found = Owner.OURS
    except (FileNotFoundError, NotADirectoryError):
        return Owner.NOBODY
    except OSError:
        return Owner.HIDDEN
    return found


def is_own(name: str) -> bool:
    """Whether a shard has files of this name."""
    return _OWN.fullmatch(name) is not None


def is_replica(name: str) -> bool:
    """Whether the subdirectory of a further engine replica has this name."""
    return _REPLICA.fullmatch(name) is not None


def folders_in(root: Path) -> Iterator[tuple[Path, Owner]]:
    """Yield the folders in a directory that are named like namespaces, in no order, and whose they are. Raises ``OSError``."""
    for path in root.iterdir():
        if _NAMESPACE.fullmatch(path.name) and path.is_dir():
            yield path, owner_of(path)


def strange_folders(root: Path) -> dict[Path, Owner]:
    """Return the folders in a directory that are named like namespaces, and are somebody else's. Raises ``OSError``."""
    return {path: owner for path, owner in sorted(folders_in(root)) if owner in (Owner.SHARED, Owner.OTHERS)}


def delete_shard(shard: Path) -> None:
    """Delete the files of a shard, or as many as can be deleted, and then its folder.

    Does not follow a link in the place of the folder. Whatever else came into the folder meanwhile stays.

    Raises:
        OSError: something is left; it names a file.
    """
    failures: list[OSError] = []
    folder = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if is_own(entry.name)]
        for name in names:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            except OSError as error:
                error.filename = os.fspath(shard / name)
                failures.append(error)
    finally:
        os.close(folder)
    if failures:
        raise failures[0]
    shard.rmdir()
