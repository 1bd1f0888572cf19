"""The inventory of a disk tier's directory."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cargohold.errors import ConfigError, TierError
from cargohold.tiers.chunk_format import HEADER_BYTES, MAGIC, lengths_in, unpack_header
from cargohold.tiers.disk import trimming
from cargohold.tiers.disk.files import (
    DirectoryLock,
    Geometry,
    Segment,
    brief_lock,
    is_in_use,
    may_hold_chunks,
    read_pieces,
    segment_files,
)
from cargohold.tiers.disk.root import (
    DESCRIPTION_FILE,
    Owner,
    ShardDescription,
    delete_shard,
    folders_in,
    last_used,
    owner_of,
    read_description,
    replicas_in,
    shards_in,
)
from cargohold.tiers.disk.slots import Links, slots_for
from cargohold.tiers.inventory import (
    PIECE_BYTES,
    Holding,
    Inventory,
    Verification,
    in_short,
    is_good,
    noted,
    raise_noted,
    reason_of,
    remarks_on,
)
from cargohold.tiers.places import url_of

logger = logging.getLogger(__name__)

_NAME = "disk"
_EMPTY = bytes(HEADER_BYTES)
_NO_HOLES = "this file system cannot give back a part of a file; `cargohold cache rm` deletes namespaces as a whole"
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DiskInventory(Inventory):
    """The shards in a disk tier's directory, and in its subdirectories for further engine replicas.

    A namespace's id is its path from the directory, because replicas have the same namespaces.

    Args:
        directory: as in ``DiskTierConfig``.

    Raises:
        ConfigError: it is not a directory, or it is a shared store's and no disk tier's.
        TierError: it cannot be listed.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            expected = "it is not a directory" if directory.exists() else "there is no such directory"
            raise ConfigError("PLACE", str(directory), expected)
        self._root = directory
        with _errors():
            _require_not_shared(directory)

    def holdings(self) -> list[Holding]:
        """Return one holding per shard, from its description and the number of its headers that are not empty."""
        with _errors():
            # A directory without shards may belong to others: no lock file is left in it.
            found = [self._describe(shard) for shard in (*shards_in(self._root), *self._shards_of_replicas())]
        return sorted(found, key=lambda holding: holding.last_used_s or 0.0)

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Verification]:
        """Check every slot. The shard is locked meanwhile."""
        shard = self._root / namespace_id
        troubles: list[str] = []
        with _errors():
            lock = self._lock(shard)
            try:
                yield from _Verification(shard, troubles, delete=delete).findings()
            finally:
                lock.release()
        raise_noted(_NAME, troubles)

    def remove(self, namespace_id: str) -> None:
        """Delete the shard's files, or as many as can be deleted."""
        shard = self._root / namespace_id
        with _errors(), brief_lock(shard.parent):
            _require_ours(shard)
            if is_in_use(shard):
                raise TierError(_NAME, f"{namespace_id} is in use")
            with suppress(FileNotFoundError):  # another process has deleted it already
                delete_shard(shard)

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Delete the chunks used longest ago, and give back what no chunk takes; delete the shard if no chunk would be left."""
        shard = self._root / namespace_id
        with _errors():
            if not shard.is_dir():
                return 0  # another process has deleted it already
            holding = self._describe(shard)
            if num_bytes < holding.num_bytes:
                lock = self._lock(shard)
                try:
                    segments = [Segment(path, geometry, direct_io=False) for path, geometry in _segments(shard)]
                    planned = trimming.plan(segments, num_bytes)
                    if planned.num_left:
                        trimming.carry_out(planned, segments)
                        return planned.num_bytes
                finally:
                    lock.release()
        self.remove(namespace_id)
        return holding.num_bytes

    def _shards_of_replicas(self) -> Iterator[Path]:
        for replica in replicas_in(self._root):
            try:
                yield from shards_in(replica)
            except OSError as error:
                logger.warning("what is stored in %s is not known: %s", replica, reason_of(error, replica))

    def _describe(self, shard: Path) -> Holding:
        """Find out about a shard what can be found out: one that is bad, or another user's, must not hide the others."""
        remarks: list[str] = []
        num_bytes = spare_bytes = stored_bytes = plain_bytes = 0
        description = ShardDescription({}, None)
        lengths = _count_chunks(shard, remarks)
        num_chunks = None if lengths is None else lengths.total()
        with noted(remarks, shard):
            description = read_description(shard)
            remarks += remarks_on(description.namespace)
            if description.geometry is None and num_chunks != 0:
                remarks.append(_not_described(shard))
        with noted(remarks, shard):
            num_bytes, payload_bytes = _space(shard)
            if lengths is not None and (geometry := description.geometry) is not None:
                num_slots = sum(
                    slots_for(stored, geometry.slot_bytes) * count for (stored, _), count in lengths.items()
                )
                spare_bytes = max(0, payload_bytes - num_slots * geometry.slot_bytes)
                num_bytes = min(num_bytes, num_slots * geometry.segment_bytes // geometry.slots_per_segment)
                stored_bytes = sum(stored * count for (stored, _), count in lengths.items())
                plain_bytes = sum(plain * count for (_, plain), count in lengths.items())
        is_in_use = _is_in_use(shard, remarks)
        return Holding(
            id=shard.relative_to(self._root).as_posix(),
            facts=description.namespace,
            num_chunks=num_chunks,
            num_bytes=num_bytes,
            last_used_s=last_used(shard) or None,
            is_in_use=is_in_use,
            remark=in_short(remarks),
            spare_bytes=spare_bytes,
            plain_bytes=plain_bytes if plain_bytes > stored_bytes else 0,
        )

    def _lock(self, shard: Path) -> DirectoryLock:
        with brief_lock(shard.parent):
            _require_ours(shard)
            when = last_used(shard)
            try:
                lock = DirectoryLock(shard)
            except BlockingIOError as error:
                raise TierError(_NAME, f"{shard.name} is in use") from error
            lock.set_last_used(when)  # verifying a shard does not count as a use
            return lock


def _require_not_shared(root: Path) -> None:
    """Refuse the directory of a shared store, and log what else is no disk tier's. Raises ``ConfigError``, ``OSError``."""
    owners = {owner for _, owner in folders_in(root)}
    if Owner.SHARED in owners and not owners & {Owner.OURS, Owner.HIDDEN} and not replicas_in(root):
        raise ConfigError("PLACE", str(root), f"it is a shared store; name it as {url_of(root)}")
    for folder in sorted(path for path, owner in folders_in(root) if owner in (Owner.SHARED, Owner.OTHERS))[:1]:
        message = "in %s are folders that are no disk tier's, such as %s; they are left alone. A shared store there is named %s"
        logger.warning(message, root, folder.name, url_of(root))


def _require_ours(shard: Path) -> None:
    """Raise ``TierError`` if a folder has something else than the files of a shard."""
    if owner_of(shard) in (Owner.SHARED, Owner.OTHERS):
        raise TierError(_NAME, f"{shard} has files that are not a disk tier's, so it is left alone")


def _count_chunks(shard: Path, remarks: list[str]) -> Counter[tuple[int, int]] | None:
    """Return how many chunks there are, by length as stored and before; ``None`` and a remark if a header cannot be read."""
    count: Counter[tuple[int, int]] = Counter()
    # A shard may be deleted meanwhile. Unlike ``glob``, a listing says if we may not list.
    with noted(remarks, shard), suppress(FileNotFoundError):
        for file in shard.iterdir():
            if file.match("segment-*.headers"):
                with noted(remarks, file):
                    count += _count_headers(file)
    return None if remarks else count


def _count_headers(path: Path) -> Counter[tuple[int, int]]:
    count: Counter[tuple[int, int]] = Counter()
    with suppress(FileNotFoundError):  # deleted meanwhile: an engine that starts deletes segments above its budget
        for piece in read_pieces(path):
            # Only headers begin like this. Details lie after them, in steps of a header's size.
            starts = [at for at in range(0, len(piece), HEADER_BYTES) if piece.startswith(MAGIC, at)]
            count.update([lengths_in(piece[at : at + HEADER_BYTES]) for at in starts])
    return count


def _space(shard: Path) -> tuple[int, int]:
    """Return the bytes that the files of a shard take on the disk, and those of its payloads alone. Raises ``OSError``."""
    total = payloads = 0
    with suppress(FileNotFoundError, PermissionError), os.scandir(shard) as files:  # deleted meanwhile, or another's
        for file in files:
            taken = 512 * file.stat(follow_symlinks=False).st_blocks
            total += taken
            payloads += taken * file.name.endswith(".data")
    return total, payloads


def _segments(shard: Path) -> Iterator[tuple[Path, Geometry]]:
    """Yield the segments of which both files are there, as paths without suffix.

    Raises:
        OSError: the shard's description cannot be read.
        TierError: it is missing or malformed, though there are chunks.
    """
    geometry = read_description(shard).geometry
    if geometry is None:
        if any(map(may_hold_chunks, shard.glob("segment-*.headers"))):
            raise TierError(_NAME, _not_described(shard))
        return
    payloads, headers = (
        {file.with_suffix("") for file in shard.glob(f"segment-*.{part}")} for part in ("data", "headers")
    )
    for path in sorted(payloads & headers):
        yield path, geometry


def _not_described(shard: Path) -> str:
    return f"{shard / DESCRIPTION_FILE} is missing or damaged, so no chunk can be verified"


class _Verification:
    """Checks the chunks of one shard.

    Args:
        shard: the shard.
        troubles: gets the reasons why chunks cannot be checked or deleted.
        delete: whether to delete damaged chunks.

    Raises ``OSError`` and ``TierError`` as ``_segments`` does.
    """

    def __init__(self, shard: Path, troubles: list[str], *, delete: bool) -> None:
        self._namespace_id, self._troubles, self._delete = shard.name, troubles, delete
        found = list(_segments(shard))
        self._segments = {path: self._open(path, geometry) for path, geometry in found}
        self._per_segment = found[0][1].slots_per_segment if found else 1
        self._links = Links(list(self._segments.values()), self._per_segment)

    def findings(self) -> Iterator[Verification]:
        """Yield a finding per chunk."""
        for number, (path, segment) in enumerate(self._segments.items()):
            if segment is None:
                continue
            with noted(self._troubles, path):
                for slot in range(self._per_segment):
                    finding = self._check(segment, slot, number * self._per_segment + slot)
                    if finding is Verification.DAMAGED and self._delete:
                        with noted(self._troubles, segment_files(path)[1]):
                            segment.write_header(slot)
                    if finding is not None:
                        yield finding

    def _open(self, path: Path, geometry: Geometry) -> Segment | None:
        """Open a segment; return ``None`` if that fails, or it is not whole."""
        with noted(self._troubles, path):
            segment = Segment(path, geometry, direct_io=True)
            if segment.is_whole():
                return segment
            if may_hold_chunks(segment_files(path)[1]):
                self._troubles.append(f"{path} is not whole, so no chunk in it can be verified")
        return None

    def _check(self, segment: Segment, at: int, slot: int) -> Verification | None:
        """Verify the chunk that begins in a slot; return ``None`` if none does.

        Args:
            segment: the slot's segment.
            at: its number in it.
            slot: its number in the shard.
        """
        try:
            data = segment.read_header(at)
            if data == _EMPTY:
                return None
            header = unpack_header(data)
            is_ours = header is not None and header.namespace.hex().startswith(self._namespace_id)
            if header is None or not is_ours:
                return Verification.DAMAGED
            slots = self._links.follow(header, slot, slots_for(header.num_bytes, segment.slot_bytes))
            is_sound = slots is not None and is_good(header, self._pieces(slots, header.num_bytes))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return Verification.DAMAGED  # a bad place on the disk; the slots after it may well be good
        return Verification.GOOD if is_sound else Verification.DAMAGED

    def _pieces(self, slots: Sequence[int], num_bytes: int) -> Iterator[memoryview]:
        """Yield ``num_bytes`` bytes of a chunk's payload, in pieces."""
        segments = list(self._segments.values())
        for slot in slots:
            segment = segments[slot // self._per_segment]
            if segment is None:
                return  # the checksum will be another
            in_slot = min(num_bytes, segment.slot_bytes)
            for begin in range(0, in_slot, PIECE_BYTES):
                piece = memoryview(bytearray(min(PIECE_BYTES, in_slot - begin)))
                segment.read_payload(slot % self._per_segment, piece, begin)
                yield piece
            num_bytes -= in_slot


def _is_in_use(shard: Path, remarks: list[str]) -> bool:
    """Whether a process uses a shard, or may use it: its lock cannot be opened, and a remark says why.

    Asks under the directory's brief lock, or without it if we may not write there.

    The lock is held only for this question, because engines wait for it, and counting a large shard's chunks takes long. So a
    listing may show a shard partly as it was before a change.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(brief_lock(shard.parent))
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
        may_be = True
        with noted(remarks, shard / DirectoryLock.FILE):
            may_be = is_in_use(shard)
    return may_be


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _NO_HOLES if error.errno == errno.EOPNOTSUPP else reason_of(error)
        raise TierError(_NAME, reason) from error
