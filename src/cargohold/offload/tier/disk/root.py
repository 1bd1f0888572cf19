"""The directory that a user names: the shards in it, their total size, and which of them can be deleted.

::

    DIRECTORY/.lock                    held for moments: while a shard is opened, made larger or deleted
    DIRECTORY/<namespace id>/lock      held by the process that uses the shard
    DIRECTORY/<namespace id>/shard.json    what the shard holds, for people and tools
    DIRECTORY/<namespace id>/segment-*     its files
    DIRECTORY/replica-<n>/             the same for another replica of the engine, with a budget of its own

Only the owner may access any of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cargohold.offload.tier.config import REPLICA_DIRECTORY
from cargohold.offload.tier.disk.files import Geometry, read_small, write_whole
from cargohold.offload.tier.disk.locks import DirectoryLock, is_in_use
from cargohold.offload.tier.namespace import MAX_DESCRIPTION_BYTES, as_facts, parse_description

DESCRIPTION_FILE: Final = "shard.json"
_SHARD_NAME: Final = re.compile(r"[0-9a-f]{32}")
_REPLICA_NAME: Final = re.compile(REPLICA_DIRECTORY.format(r"[0-9]+"))
_PRIVATE: Final = 0o700


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """The contents of a shard's description file.

    Attributes:
        namespace: the namespace, as ``Namespace.describe`` gives it; empty if it cannot be read.
        geometry: sizes of the shard's files; ``None`` if they cannot be read.
    """

    namespace: dict[str, str]
    geometry: Geometry | None


def make_private(directory: Path) -> None:
    """Create a directory that only its owner may use, and missing directories above it. Raises ``OSError``."""
    if _REPLICA_NAME.fullmatch(directory.name):
        make_private(directory.parent)  # the directory of the first replica, which may start later
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=_PRIVATE)
    except FileExistsError:
        if not directory.is_dir():
            raise


def shards_in(root: Path) -> Iterator[Path]:
    """Return the shards in a directory, the one used longest ago first. Raises ``OSError``."""
    found = [(last_used(path), path) for path in root.iterdir() if _SHARD_NAME.fullmatch(path.name) and path.is_dir()]
    return (path for _, path in sorted(found))


def replicas_in(root: Path) -> list[Path]:
    """Return the subdirectories of further engine replicas. Raises ``OSError``."""
    return sorted(path for path in root.iterdir() if _REPLICA_NAME.fullmatch(path.name) and path.is_dir())


def last_used(shard: Path) -> float:
    """Return when a shard was last used, in seconds since 1970; 0 if that is not known.

    For a shard in use, this is when its process last noted the use.
    """
    try:
        return (shard / DirectoryLock.FILE).stat().st_mtime
    except OSError:
        return 0.0


def bytes_in(directory: Path) -> int:
    """Return the bytes of all files below a directory, except those of further engine replicas.

    A file counts with its size, or its space on the disk if that is more. Files that are deleted meanwhile do not count, nor
    files in directories that we may not read. Raises ``OSError`` for other failures: files that could not be counted must not
    pass for free room.
    """
    total = 0
    top = os.fspath(directory)
    for path, directories, names in os.walk(top, onerror=_require_uncountable):
        if path == top:
            directories[:] = [name for name in directories if not _REPLICA_NAME.fullmatch(name)]
        for name in names:
            try:
                status = os.lstat(os.path.join(path, name))  # noqa: PTH118  # many files: pathlib takes three times as long
            except FileNotFoundError:
                continue
            total += max(status.st_size, 512 * status.st_blocks)
    return total


def _require_uncountable(error: OSError) -> None:
    """Raise ``error`` unless it says that a directory is gone, or that we may not read it."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


def make_room(root: Path, keep: Path, num_bytes: int, max_bytes: int) -> bool:
    """Delete unused shards, the one used longest ago first, until ``num_bytes`` more fit; return whether they do.

    Call it under ``brief_lock``. Raises ``OSError``.

    Args:
        root: the directory.
        keep: the shard that needs the room; it is not deleted.
        num_bytes: bytes that are wanted; negative if that many bytes will be freed without it.
        max_bytes: maximum size of everything in ``root``.
    """
    excess = bytes_in(root) + num_bytes - max_bytes
    for shard in shards_in(root):
        if excess <= 0:
            break
        # A shard behind a link takes no room here, and is not ours to delete.
        if shard != keep and not shard.is_symlink() and not is_in_use(shard):
            excess -= bytes_in(shard)
            shutil.rmtree(shard)
    return excess <= 0


def write_description(shard: Path, namespace: dict[str, str], geometry: Geometry) -> None:
    """Write a shard's description file, wholly or not at all. Raises ``OSError``."""
    sizes = {"slot_bytes": geometry.slot_bytes, "slots_per_segment": geometry.slots_per_segment}
    write_whole(shard / DESCRIPTION_FILE, json.dumps({"namespace": namespace, **sizes}, indent=2).encode() + b"\n")


def read_description(shard: Path) -> ShardDescription:
    """Read a shard's description file; what cannot be read is empty or ``None``."""
    try:
        data = parse_description(read_small(shard / DESCRIPTION_FILE, MAX_DESCRIPTION_BYTES))
    except OSError:
        return ShardDescription({}, None)
    geometry = _geometry(data.get("slot_bytes"), data.get("slots_per_segment"))
    return ShardDescription(as_facts(data.get("namespace")), geometry)


def _geometry(slot_bytes: Any, slots_per_segment: Any) -> Geometry | None:
    if isinstance(slot_bytes, int) and isinstance(slots_per_segment, int) and slot_bytes > 0 and slots_per_segment > 0:
        return Geometry(slot_bytes, slots_per_segment)
    return None
