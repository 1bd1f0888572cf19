"""The disk tier: slots in preallocated files; an index of chunks in memory and an eviction policy, under one lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from cargohold.cache.manager import OffloadKey
from cargohold.cache.policies import find_policy
from cargohold.cache.retention import NO_RETENTION, Retention
from cargohold.deadlines import GROWTH
from cargohold.errors import SparingLog, TierError
from cargohold.tiers.chunk_format import NO_NOTE, Details, Note, unpack_header
from cargohold.tiers.config import Opening
from cargohold.tiers.disk.files import FULL
from cargohold.tiers.disk.shard import Shard, ShardBudget
from cargohold.tiers.disk.slot_index import LastUses, SlotIndex, parents_first, restore_index
from cargohold.tiers.disk.slots import Links
from cargohold.tiers.port import (
    MAX_LOSSES,
    NO_LOSSES,
    NOTHING_LISTED,
    Listing,
    LoadOutcome,
    Losses,
    StoreOutcome,
    Tier,
    TierUsage,
)

logger = logging.getLogger(__name__)

_CURSOR_BYTES: Final = 8


class DiskTier(Tier):
    """A tier that keeps one worker's chunks in files of a directory, where the next process finds them again.

    Nothing is ever synchronised to the disk on purpose: a chunk lost in a power failure is a miss, and a damaged one is found
    by its checksum.

    Args:
        budget: the directory, and the bytes that this worker's chunks may take.
        opening: what this worker keeps there.
        policy: decides what is evicted.
        direct_io: whether to bypass the page cache, if the file system allows it.

    Raises:
        ConfigError: the directory cannot be used, or is used by another process, or the budget is impossible.
    """

    has_index = True

    def __init__(self, budget: ShardBudget, opening: Opening, policy: str, *, direct_io: bool) -> None:
        self.name = "disk"
        self.chunk_bytes = opening.chunk_bytes
        self._mean_bytes = sum(opening.chunk_sizes) / len(opening.chunk_sizes)
        self._codec = opening.codec
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._damage, self._unsaved = SparingLog(logger), SparingLog(logger)
        self._lost: list[OffloadKey] = []
        self._is_all_lost = self._is_gone = False
        self._shard = shard = Shard(budget, opening, direct_io=direct_io)
        if self._codec.number_types and not shard.plan.packs:
            self._codec.number_types = ()
            message = "disk tier in %s: its files are for chunks that are not packed; to pack, delete this directory"
            logger.warning(message, shard.path)
        self._index = SlotIndex(shard.capacity, find_policy(policy), shard.plan)
        self._uses = LastUses(shard)
        self._restore()
        # What is being listed: chunks by number, in order.
        self._roll = np.zeros(0, dtype=np.intp)

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each chunk is in the index and written."""
        with self._lock:
            return [not self._is_gone and self._index.contains(key) for key in keys]

    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        """Write a chunk to free slots, or to those of chunks that the policy evicts for it."""
        with self._errors():
            self._require_directory()
            if self.probe([key])[0]:
                return StoreOutcome.PRESENT
            asked = self._codec.asked_now(note.retention)
            header, body = self._codec.encode(key, payload, parent, asked)
            number = self._reserve(key, parent, self._shard.plan.count_for(len(body)))
            if isinstance(number, StoreOutcome):
                return number
            try:
                self._write(self._index.slots_of(number), header, body, self._codec.encode_details(key, note.details))
            except BaseException as error:
                with self._lock:
                    self._index.forfeit(number)
                if isinstance(error, OSError) and error.errno in FULL:
                    return StoreOutcome.REFUSED
                raise
            with self._lock:
                self._index.commit(number)
                if asked is not NO_RETENTION:
                    self._index.rank(key, asked, self._codec.now_ns() / 1e9)
        return StoreOutcome.STORED

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Read a chunk and verify its header and payload."""
        with self._lock:
            number = None if self._is_gone else self._index.pin(key)
        if number is None:
            return LoadOutcome.ABSENT
        try:
            with self._errors():
                is_good = self._read(number, key, into)
                if not is_good:
                    self._quarantine(number, key)
        finally:
            with self._lock:
                self._index.unpin(number)
        return LoadOutcome.LOADED if is_good else LoadOutcome.CORRUPT

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Tell the policy of the use of chunks, and remember it for the next start."""
        with self._lock:
            slots = self._index.touch(keys)
        if self._uses.note(slots, self._codec.now_ns()):
            self._save()

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks from the index, and wipe their headers on the disk."""
        with self._errors():
            self._discard(keys)

    def rank(self, keys: Sequence[OffloadKey], retentions: Sequence[Retention]) -> None:
        """Let what hints ask count from now on, and write it into the headers, for the next start."""
        with self._errors():
            for key, retention in zip(keys, retentions, strict=True):
                asked = self._codec.asked_now(retention)
                with self._lock:
                    number = self._index.pin(key) if self._index.rank(key, asked, self._codec.now_ns() / 1e9) else None
                if number is None:
                    continue
                try:
                    self._write_retention(self._index.slots_of(number)[0], key, asked)
                finally:
                    with self._lock:
                        self._index.unpin(number)

    def _write_retention(self, slot: int, key: OffloadKey, asked: Retention) -> None:
        """Write another retention into the header of a pinned chunk, unless it is another's by now."""
        segment, at = self._shard.segment_of(slot)
        header = unpack_header(segment.read_header(at))
        if header is not None and header.key == key and header.retention != asked:
            segment.write_header(at, self._codec.with_retention(header, asked))

    def list_chunks(self, cursor: bytes, limit: int, *, with_details: bool) -> Listing:
        """Return the next chunks, each after the one before it in its prefix: routers want to know that first."""
        first = int.from_bytes(cursor, "little")
        if not cursor:
            with self._lock:
                parents, is_ready = self._index.prefixes()
            self._roll = parents_first(parents, is_ready)
        roll, end = self._roll, first + limit
        with self._lock:
            if self._is_gone:
                return NOTHING_LISTED  # which is a loss of everything
            chunks = self._index.chunks_in(roll[first:end].tolist())
        cursor = end.to_bytes(_CURSOR_BYTES, "little") if end < len(roll) else b""
        if not cursor:
            self._roll = roll[:0]
        if not with_details:
            return Listing(tuple([key for _, key in chunks]), (), cursor)
        described = {key: known for slots, key in chunks if (known := self._details(slots, key)) is not None}
        return Listing(tuple(described), tuple(described.values()), cursor)

    def _details(self, slots: Sequence[int], key: OffloadKey) -> Details | None:
        """Return what is kept of a chunk. A bad place on the disk counts as nothing."""
        try:
            return self._codec.decode_details(key, self._shard.place_of(slots).read_details())
        except OSError:
            return None

    def take_losses(self) -> Losses:
        """Return the chunks that were evicted, removed or found to be bad; all of them if the directory was gone."""
        if not self._lost and not self._is_all_lost:
            return NO_LOSSES  # mostly
        with self._lock:
            losses = Losses(tuple(self._lost), self._is_all_lost)
            self._lost, self._is_all_lost = [], False
        return losses

    def _note_lost(self, keys: Sequence[OffloadKey]) -> None:
        """Note losses. The caller holds the lock."""
        self._lost += keys
        if len(self._lost) > MAX_LOSSES:  # they are not asked for
            self._lost, self._is_all_lost = [], True

    def usage(self) -> TierUsage:
        """Return the number of chunks, the bytes of their slots with headers, and the bytes of all slots that there can be."""
        with self._lock:
            shard, index = self._shard, self._index
            slot_bytes = shard.geometry.segment_bytes // shard.geometry.slots_per_segment
            num_bytes, reachable = index.num_ready_slots * slot_bytes, shard.num_reachable * slot_bytes
            return TierUsage(index.num_ready, num_bytes, reachable, int(index.num_ready * self._mean_bytes))

    def close(self) -> None:
        """Save the last uses, let other processes use the directory, and close the files."""
        self._save()
        self._shard.close()

    def check(self) -> None:
        """Verify that no slot is lost. For tests and idle moments. Raises ``AssertionError``."""
        with self._lock:
            self._index.check()

    # --- opening ------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Put the chunks that an earlier process has left into the index."""
        shard, index = self._shard, self._index
        index.add_slots(shard.num_slots)
        links, uses = Links(shard.segments, shard.geometry.slots_per_segment), self._uses.snapshot()
        for slot in restore_index(index, shard.header_tables(), links, uses, self._codec, shard.plan):
            with suppress(OSError):  # the slot counts as free anyway, and the next write to it wipes the header first
                shard.wipe_header(slot)
        logger.info("disk tier in %s: %d chunks are there", shard.path, index.num_ready)

    def _save(self) -> None:
        """Write the last uses of slots to the disk. A failure does no harm and is only logged."""
        try:
            self._uses.save()
            self._shard.note_use()
        except OSError as error:
            self._unsaved.warning(
                "disk tier in %s: cannot save which chunks were used last: %s", self._shard.path, error.strerror
            )

    def _require_directory(self) -> None:
        """Raise ``TierError`` if the directory was deleted or moved away: then nothing is kept or found until a restart."""
        if not self._is_gone and self._shard.is_deleted():
            with self._lock:
                is_news, self._is_gone, self._is_all_lost = not self._is_gone, True, True
            if is_news:
                logger.warning("disk tier: %s is gone; the tier is off until a restart", self._shard.path)
        if self._is_gone:
            raise TierError(self.name, "its directory is gone; it is off until a restart")

    # --- slots --------------------------------------------------------------------------------------------------------

    def _reserve(self, key: OffloadKey, parent: OffloadKey | None, num_slots: int) -> int | StoreOutcome:
        """Reserve slots for a chunk; return its number, or the outcome of the store if there are none."""
        with self._lock:
            if self._index.contains(key):
                return StoreOutcome.PRESENT
            may_grow = not self._index.has_free
        if may_grow and not self._grow():
            return StoreOutcome.LATER
        with self._lock:
            if self._index.contains(key):
                return StoreOutcome.PRESENT
            if self._index.is_known(key):
                return StoreOutcome.LATER
            if not self._index.num_slots:
                return StoreOutcome.REFUSED
            self._index.expire(self._codec.now_ns() / 1e9)
            number = self._index.reserve(key, parent, num_slots)
            self._note_lost(self._index.take_evicted())
        return number

    def _grow(self) -> bool:
        """Add a segment if budget and disk allow it.

        Returns ``False`` if the store must come again, because another thread is doing that.
        """
        if not self._growing.acquire(timeout=GROWTH.seconds()):
            return False
        try:
            if not self._index.has_free and self._shard.num_slots < self._shard.capacity and self._shard.grow():
                with self._lock:
                    self._index.add_slots(self._shard.geometry.slots_per_segment)
        finally:
            self._growing.release()
        return True

    def _write(self, slots: Sequence[int], header: bytes, body: memoryview, details: bytes) -> None:
        place = self._shard.place_of(slots)
        place.wipe()  # from now on the slots are empty
        place.write_payload(body)
        if details:  # without them, those of an earlier chunk stay, but count for that chunk only
            place.write_details(details)
        place.write_header(header)

    def _read(self, number: int, key: OffloadKey, into: memoryview) -> bool:
        place = self._shard.place_of(self._index.slots_of(number))
        try:
            header = self._codec.header_of(place.read_header(), key, len(into))
            if header is None:
                return False
            body = self._codec.body_for(header, into)
            place.read_payload(body.view)
        except OSError:
            # One bad place on the disk must not fail every request that wants this chunk. The next write to the slot may well
            # succeed, because disks replace bad places when they are written to.
            self._forget(number, key)
            raise
        return self._codec.decode(header, key, body, into)

    def _quarantine(self, number: int, key: OffloadKey) -> None:
        """Remove a pinned chunk that is damaged, so that it is never found again, here or after a restart."""
        slot = self._index.slots_of(number)[0]
        self._damage.warning("disk tier: chunk %s in slot %d is damaged; it is dropped", key.hex(), slot)
        if self._forget(number, key):
            self._shard.wipe_header(slot)

    def _forget(self, number: int, key: OffloadKey) -> bool:
        """Take a chunk out of the index if it is the one that is pinned; return whether it was there.

        Another reader may have found the damage first, and a good copy may be in other slots by now.
        """
        with self._lock:
            is_current = self._index.is_current(key, number)
            if is_current:
                self._index.discard([key])
                self._note_lost([key])
        return is_current

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            pinned = [number for key in keys if (number := self._index.pin(key)) is not None]
            self._index.discard(keys)
            self._note_lost(keys)
        try:
            # Pinned slots are not written to.
            for number in pinned:
                self._shard.wipe_header(self._index.slots_of(number)[0])
        finally:
            with self._lock:
                for number in pinned:
                    self._index.unpin(number)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(self.name, error.strerror or str(error)) from error
