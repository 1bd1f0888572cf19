"""The inventory of a disk tier's directory."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cargohold.errors import ConfigError, TierError
from cargohold.offload.tier.disk.files import Descriptor, Segment, segment_files
from cargohold.offload.tier.disk.locks import DirectoryLock, brief_lock, is_in_use
from cargohold.offload.tier.disk.root import bytes_in, last_used, read_description, replicas_in, shards_in
from cargohold.offload.tier.header import HEADER_BYTES, unpack_header
from cargohold.offload.tier.inventory.base import PIECE_BYTES, Finding, Holding, Inventory, is_good

_NAME = "disk"
_EMPTY = bytes(HEADER_BYTES)
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DiskInventory(Inventory):
    """The shards in a disk tier's directory, and in its subdirectories for further engine replicas.

    A namespace's id is its path from the directory, because replicas have the same namespaces.

    Args:
        directory: as in ``DiskTierConfig``.

    Raises:
        ConfigError: it is not a directory.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            expected = "it is not a directory" if directory.exists() else "there is no such directory"
            raise ConfigError("PLACE", str(directory), expected)
        self._root = directory

    def holdings(self) -> list[Holding]:
        """Return one holding per shard, from its description and the number of its headers that are not empty."""
        with _errors():
            # A directory without shards may be somebody else's: leave no lock file in it.
            roots = [root for root in (self._root, *replicas_in(self._root)) if any(shards_in(root))]
            found = [self._describe(shard) for root in roots for shard in shards_in(root)]
        return sorted(found, key=lambda holding: holding.last_used_s or 0.0)

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Finding]:
        """Check every slot. The shard is locked meanwhile."""
        shard = self._root / namespace_id
        with _errors():
            lock = self._lock(shard)
            try:
                for segment, num_slots in _segments(shard):
                    for slot in range(num_slots):
                        finding = _check(segment, slot, shard.name)
                        if finding is Finding.DAMAGED and delete:
                            segment.write_header(slot)
                        if finding is not None:
                            yield finding
            finally:
                lock.release()

    def remove(self, namespace_id: str) -> None:
        """Delete the shard's files."""
        shard = self._root / namespace_id
        with _errors(), brief_lock(shard.parent):
            if is_in_use(shard):
                raise TierError(_NAME, f"{namespace_id} is in use")
            shutil.rmtree(shard)

    def _describe(self, shard: Path) -> Holding:
        return Holding(
            id=shard.relative_to(self._root).as_posix(),
            facts=read_description(shard).namespace,
            num_chunks=sum(_count_headers(file) for file in shard.glob("segment-*.headers")),
            num_bytes=bytes_in(shard),
            last_used_s=last_used(shard) or None,
            is_in_use=_is_in_use(shard),
        )

    def _lock(self, shard: Path) -> DirectoryLock:
        with brief_lock(shard.parent):
            when = last_used(shard)
            try:
                lock = DirectoryLock(shard)
            except BlockingIOError as error:
                raise TierError(_NAME, f"{shard.name} is in use") from error
            lock.set_last_used(when)  # verifying a shard does not count as a use
            return lock


def _count_headers(path: Path) -> int:
    try:
        file = Descriptor(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0  # deleted meanwhile: an engine that starts deletes segments above its budget
    count = at = 0
    while data := os.pread(file.number, PIECE_BYTES, at):
        at += len(data)
        ends = range(HEADER_BYTES, len(data) + 1, HEADER_BYTES)
        count += sum(data[end - HEADER_BYTES : end] != _EMPTY for end in ends)
    return count


def _segments(shard: Path) -> Iterator[tuple[Segment, int]]:
    geometry = read_description(shard).geometry
    if geometry is None:
        return
    for file in sorted(shard.glob("segment-*.data")):
        path = file.with_suffix("")
        if all(part.exists() for part in segment_files(path)):
            segment = Segment(path, geometry, direct_io=True)
            if segment.is_whole():
                yield segment, geometry.slots_per_segment


def _check(segment: Segment, slot: int, namespace_id: str) -> Finding | None:
    """Verify the chunk in a slot; return ``None`` if the slot is empty."""
    try:
        data = segment.read_header(slot)
        if data == _EMPTY:
            return None
        header = unpack_header(data)
        is_ours = header is not None and header.namespace.hex().startswith(namespace_id)
        if header is None or not is_ours or header.num_bytes > segment.slot_bytes:
            return Finding.DAMAGED
        is_sound = is_good(header, _payload(segment, slot, header.num_bytes))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return Finding.DAMAGED  # a bad place on the disk; the slots behind it may well be good
    return Finding.GOOD if is_sound else Finding.DAMAGED


def _payload(segment: Segment, slot: int, num_bytes: int) -> Iterator[memoryview]:
    """Yield ``num_bytes`` bytes of a slot's payload, in pieces; each is valid until the next one."""
    piece = memoryview(bytearray(min(num_bytes, PIECE_BYTES)))
    for at in range(0, num_bytes, PIECE_BYTES):
        part = piece[: num_bytes - at]
        segment.read_payload(slot, part, at)
        yield part


def _is_in_use(shard: Path) -> bool:
    """Whether a process uses a shard. Asks under the directory's brief lock, or without it if we may not write there.

    The lock is held only for this question, because engines wait for it, and counting a large shard's chunks takes long. So a
    listing may show a shard partly as it was before a change.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(brief_lock(shard.parent))
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
        return is_in_use(shard)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise TierError(_NAME, f"{where}{error.strerror or error}") from error
