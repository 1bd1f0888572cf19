"""The directory that a user names: the shards in it, their total size, and which of them can be deleted.

::

    DIRECTORY/.lock                    held for moments: while a shard is opened, made larger or deleted
    DIRECTORY/<namespace id>/lock      held by the process that uses the shard
    DIRECTORY/<namespace id>/shard.json    what the shard holds, for people and tools
    DIRECTORY/<namespace id>/segment-*     its files
    DIRECTORY/replica-<n>/             the same for another replica of the engine, with a budget of its own

Only the owner may access any of it. What else lies there counts towards the budget, and stays.

Whose the folders in a disk tier's directory are, and how one of ours is deleted.

A folder that is named like a namespace need not be a shard: shared stores, and tiers of third parties, name theirs in the same
way. So a shard is known by what is in it, and only files of the names that a shard has are ever deleted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cargohold.tiers.disk.files import DirectoryLock, Geometry, is_in_use, read_small, write_whole
from cargohold.tiers.memory import PAGE_BYTES
from cargohold.tiers.namespace import DESCRIPTION, ID_PATTERN, MAX_DESCRIPTION_BYTES, as_facts, parse_description

DESCRIPTION_FILE: Final = "shard.json"
REPLICA_DIRECTORY: Final = "replica-{}"
"""Subdirectory, by replica number, in which all engine replicas but the first keep their chunks."""
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
    """It is empty, or gone. What will be in it is unknown."""
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


# --- the directory that a user names ----------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_PRIVATE: Final = 0o700
_NO_DESCRIPTION: Final = frozenset({errno.ENOENT, errno.EINVAL, errno.EFBIG})
"""Errors that say that there is no description: no file, or something that we never wrote, irregular or much too large."""
_told: Final[set[Path]] = set()
"""Shards of which was logged that they cannot be deleted: whenever room is needed, they are looked at again."""


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """The contents of a shard's description file.

    Attributes:
        namespace: the namespace, as ``Namespace.describe`` gives it; empty if it is missing or malformed.
        geometry: sizes of the shard's files; ``None`` if they are missing or malformed.
    """

    namespace: dict[str, str]
    geometry: Geometry | None


def make_private(directory: Path) -> None:
    """Create a directory that only its owner may use, and missing directories above it. Raises ``OSError``."""
    if is_replica(directory.name):
        make_private(directory.parent)  # the directory of the first replica, which may start later
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=_PRIVATE)
    except FileExistsError:
        if not directory.is_dir():
            raise


def shards_in(root: Path) -> Iterator[Path]:
    """Return the shards in a directory, the one used longest ago first. Raises ``OSError``.

    A folder that cannot be listed is among them, because it may be another user's shard.
    """
    owners = (Owner.OURS, Owner.HIDDEN)
    return (path for _, path in sorted((last_used(path), path) for path, owner in folders_in(root) if owner in owners))


def replicas_in(root: Path) -> list[Path]:
    """Return the subdirectories of further engine replicas. Raises ``OSError``."""
    return sorted(path for path in root.iterdir() if is_replica(path.name) and path.is_dir())


def last_used(shard: Path) -> float:
    """Return when a shard was last used, in seconds since 1970; 0 if that is not known.

    For a shard in use, this is when its process last noted the use.
    """
    try:
        return (shard / DirectoryLock.FILE).stat().st_mtime
    except OSError:
        return 0.0


def bytes_in(directory: Path) -> int:
    """Return the bytes of all files below a directory, except those of further engine replicas, and of what is mounted there.

    A file counts with its size, or its space on the disk if that is more. Files that are deleted meanwhile do not count, nor
    files in directories that we may not list or enter. Raises ``OSError`` for other failures: files that could not be counted
    must not pass for free room.
    """
    total = 0
    top = os.fspath(directory)
    for path, directories, names in os.walk(top, onerror=_raise_unless_skippable):
        if path == top:
            directories[:] = [name for name in directories if not is_replica(name)]
        directories[:] = [name for name in directories if not os.path.ismount(f"{path}/{name}")]
        for name in names:
            try:
                status = os.lstat(os.path.join(path, name))  # noqa: PTH118  # many files: pathlib takes three times as long
            except (FileNotFoundError, PermissionError):
                continue
            total += max(status.st_size, 512 * status.st_blocks)
    return total


def _raise_unless_skippable(error: OSError) -> None:
    """Raise ``error`` unless it says that a directory is gone, or that we may not read it."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


def make_room(root: Path, keep: Path, num_bytes: int) -> bool:
    """Delete unused shards, the one used longest ago first, until they have freed ``num_bytes``; return whether they have.

    If all unused shards together are too small, none is deleted: their chunks would be lost for nothing. Call it under
    ``brief_lock``. Raises ``OSError``.

    Args:
        root: the directory.
        keep: the shard that needs the room; it is not deleted.
        num_bytes: bytes to free; with 0 or less there is room already.
    """
    if num_bytes <= 0:
        return True
    unused = _unused(root, keep)
    return sum(map(bytes_in, unused)) >= num_bytes and _delete(unused, num_bytes)


def make_smaller(root: Path, keep: Path, num_bytes: int) -> None:
    """Delete unused shards as ``make_room`` does, but also if all of them together have fewer bytes than ``num_bytes``."""
    if num_bytes > 0:
        _delete(_unused(root, keep), num_bytes)


def _unused(root: Path, keep: Path) -> list[Path]:
    """Return the shards but ``keep`` that can be deleted, the one used longest ago first. Raises ``OSError``."""
    # A shard behind a link takes no room here, and is not ours to delete.
    return [path for path in shards_in(root) if path != keep and not path.is_symlink() and not _may_be_in_use(path)]


def _may_be_in_use(shard: Path) -> bool:
    """Whether a process uses a shard. If its lock cannot be opened, for instance because it is another user's, it may be so."""
    try:
        return is_in_use(shard)
    except OSError as error:
        _tell(shard, error)
        return True


def _delete(shards: Iterable[Path], num_bytes: int) -> bool:
    """Delete shards until they have freed ``num_bytes``; return whether they have. Skips what cannot be deleted."""
    for shard in shards:
        if num_bytes <= 0:
            break
        size = bytes_in(shard)
        try:
            delete_shard(shard)
        except OSError as error:
            _tell(shard, error)
        num_bytes -= size - bytes_in(shard)
    return num_bytes <= 0


def _tell(shard: Path, error: OSError) -> None:
    """Log, once per shard, why it cannot be deleted."""
    if shard not in _told:
        _told.add(shard)
        logger.warning("disk tier: %s cannot be deleted to make room: %s", shard, error.strerror or error)


def write_description(shard: Path, namespace: dict[str, str], geometry: Geometry) -> None:
    """Write a shard's description file, wholly or not at all. Raises ``OSError``."""
    text = json.dumps({"namespace": namespace, **asdict(geometry)}, indent=2)
    write_whole(shard / DESCRIPTION_FILE, text.encode() + b"\n")


def read_description(shard: Path) -> ShardDescription:
    """Read a shard's description file; what is missing or malformed is empty or ``None``.

    Raises ``OSError``, which names the file, if it is there but cannot be read: without it a shard's chunks are given up, and
    that must not happen for a failure that may pass.
    """
    path = shard / DESCRIPTION_FILE
    try:
        data = parse_description(read_small(path, MAX_DESCRIPTION_BYTES))
    except OSError as error:
        if error.errno not in _NO_DESCRIPTION:
            error.filename = os.fspath(path)
            raise
        return ShardDescription({}, None)
    return ShardDescription(as_facts(data.get("namespace")), _geometry(data))


def _geometry(data: dict[str, Any]) -> Geometry | None:
    # Earlier descriptions have neither room for details nor links.
    names = ("slot_bytes", "slots_per_segment", "details_bytes", "link_bytes")
    sizes = {name: data.get(name, 0) for name in names}
    if not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
        return None
    geometry = Geometry(**sizes, packs=data.get("packs") is True)
    is_possible = geometry.slot_bytes and geometry.slots_per_segment and not geometry.slot_bytes % PAGE_BYTES
    return geometry if is_possible else None
