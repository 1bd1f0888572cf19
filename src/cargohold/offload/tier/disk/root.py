"""The directory that a user names: the shards in it, what they take together, and which of them can go.

::

    DIRECTORY/.lock                    held for moments: while a shard is opened, made larger or deleted
    DIRECTORY/<namespace id>/lock      held by the process that uses the shard
    DIRECTORY/<namespace id>/shard.json    what the shard holds, for people and tools
    DIRECTORY/<namespace id>/segment-*     its files
    DIRECTORY/replica-<n>/             the same for another replica of the engine, with a budget of its own

Everything is for its owner only.
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
    """What is written about a shard.

    Attributes:
        namespace: as ``Namespace.describe`` gives it; empty if it cannot be read.
        geometry: sizes of its files, or ``None`` if they cannot be read.
    """

    namespace: dict[str, str]
    geometry: Geometry | None


def make_private(directory: Path) -> None:
    """Make a directory that only its owner may use, and those above it. Raises ``OSError``."""
    if _REPLICA_NAME.fullmatch(directory.name):
        make_private(directory.parent)  # the first replica's, which may come later
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=_PRIVATE)
    except FileExistsError:
        if not directory.is_dir():
            raise


def shards_in(root: Path) -> Iterator[Path]:
    """The shards in a directory, the one used longest ago first. Raises ``OSError``."""
    found = [(last_used(path), path) for path in root.iterdir() if _SHARD_NAME.fullmatch(path.name) and path.is_dir()]
    return (path for _, path in sorted(found))


def replicas_in(root: Path) -> list[Path]:
    """The directories of further engine replicas. Raises ``OSError``."""
    return sorted(path for path in root.iterdir() if _REPLICA_NAME.fullmatch(path.name) and path.is_dir())


def last_used(shard: Path) -> float:
    """When a process used a shard, in seconds since 1970; 0 if that is not known. Of one in use, when it said so last."""
    try:
        return (shard / DirectoryLock.FILE).stat().st_mtime
    except OSError:
        return 0.0


def bytes_in(directory: Path) -> int:
    """Bytes of all files below a directory, or on the disk if that is more; those of further engine replicas excepted.

    Files that go meanwhile do not count, nor what is in directories that others do not let us see. Raises ``OSError``: what
    could not be counted must not pass for room.
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
    """Raise it unless a directory is gone, or is not for us."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


def make_room(root: Path, keep: Path, num_bytes: int, max_bytes: int) -> bool:
    """Delete unused shards, the one used longest ago first, until ``num_bytes`` more fit; whether they do.

    To be called under ``brief_lock``. Raises ``OSError``.

    Args:
        root: the directory.
        keep: the shard that needs the room.
        num_bytes: that are wanted; below 0 if so many will go by themselves.
        max_bytes: that everything in ``root`` may take.
    """
    excess = bytes_in(root) + num_bytes - max_bytes
    for shard in shards_in(root):
        if excess <= 0:
            break
        # What a link leads to takes no room here, and is not ours to delete.
        if shard != keep and not shard.is_symlink() and not is_in_use(shard):
            excess -= bytes_in(shard)
            shutil.rmtree(shard)
    return excess <= 0


def write_description(shard: Path, namespace: dict[str, str], geometry: Geometry) -> None:
    """Say what a shard holds; all or nothing. Raises ``OSError``."""
    sizes = {"slot_bytes": geometry.slot_bytes, "slots_per_segment": geometry.slots_per_segment}
    write_whole(shard / DESCRIPTION_FILE, json.dumps({"namespace": namespace, **sizes}, indent=2).encode() + b"\n")


def read_description(shard: Path) -> ShardDescription:
    """What a shard says it holds, as far as that can be read."""
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
