"""A manager of host memory over ``BlockPool``, the class that the embedded engine uses for the device pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cargohold.blocks import ABSENT, READY, BlockPool, KVCacheBlock
from cargohold.errors import LifecycleError, MissingChunkError
from cargohold.offload.keys import offload_key, split_key
from cargohold.offload.manager.base import (
    ChunksRemoved,
    ChunksStored,
    LoadHandle,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    StoreHandle,
    StoreOffer,
)
from cargohold.offload.manager.handles import ChunkPins, SlotReservation
from cargohold.offload.policy.base import Slots


class BlockPoolManager(OffloadManager):
    """Manages chunks of one block each; the least recently used is evicted first.

    A slot is a block of the pool: referenced while it is written or read, else in the free queue, from whose head eviction
    takes it. The manager knows nothing of prefixes: of the chunks before an offer, it protects only the parent from eviction.

    Args:
        capacity: number of slots.
        record_events: whether to record events for ``take_events``.
    """

    def __init__(self, capacity: int, *, record_events: bool = False) -> None:
        self.capacity = capacity
        self._pool = BlockPool(capacity, has_null_block=False, on_removed=self._note_removed)
        self._writing: set[OffloadKey] = set()
        # Blocks of removed chunks that are still being read.
        self._leaving: set[KVCacheBlock] = set()
        self._num_pins = 0
        self._generation = 0
        self._num_removed = 0
        self._record_events = record_events
        self._events: list[ManagerEvent] = []

    @property
    def generation(self) -> int:
        """A number that changes with every commit and removal."""
        return self._generation

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return ``READY`` or ``ABSENT`` for each key."""
        return bytes(READY if self._pool.contains(*split_key(key)) else ABSENT for key in keys)

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return ``READY`` for each key before the first absent one."""
        num_ready = 0
        for key in keys:
            if not self._pool.contains(*split_key(key)):
                break
            num_ready += 1
        return bytes([READY]) * num_ready

    def touch(self, keys: Sequence[OffloadKey]) -> int:
        """Move chunks to the tail of the free queue, the last one first, so that ends of prefixes are evicted first."""
        found = [self._find(key) for key in keys]
        blocks = [block for block in reversed(found) if block is not None]
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)
        return found.index(None) if len(blocks) < len(found) else len(found)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadHandle:
        """Pin ready chunks."""
        blocks = []
        for key in keys:
            block = self._find(key)
            if block is None:
                raise MissingChunkError(key)
            blocks.append(block)
        self._pool.touch(blocks)
        self._num_pins += len(blocks)
        return ChunkPins(tuple(keys), _slots_of(blocks), self._end_load)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:
        """Reserve slots for the absent chunks on offer, or as many of the first ones as there is room for."""
        num_waiting = self._num_pins + len(self._writing)
        offered = list(dict.fromkeys(key for offer in offers for key in offer.keys))
        # Chunks on offer that are there, and the parents, must not be evicted to make room for the others.
        around = [*offered, *(offer.parent for offer in offers if offer.parent is not None)]
        guarded = [block for key in around if (block := self._find(key)) is not None]
        self._pool.touch(guarded)
        absent = [key for key in offered if key not in self._writing and self._find(key) is None]
        chosen = absent[: self._pool.num_free_blocks]
        blocks = self._pool.allocate(len(chosen))
        self._pool.free_blocks(guarded)
        self._writing.update(chosen)
        deferred = absent[len(chosen) : len(chosen) + num_waiting]
        return SlotReservation(chosen, _slots_of(blocks), deferred, self._end_store)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Remove chunks at once; their slots are free when no load reads them."""
        keys = list(keys)
        for key in keys:
            if key in self._writing:
                raise LifecycleError(f"chunk {key.hex()}", "being written", "remove", ("prepare_stores",))
        for key in keys:
            block = self._find(key)
            if block is not None:
                self._pool.uncache_block(block)
                if block.ref_cnt:
                    self._leaving.add(block)
                else:
                    self._use_first([block])

    def reset(self) -> bool:
        """Remove all chunks, unless one is being written."""
        if self._writing:
            return False
        for block in map(self._pool.get_block, range(self.capacity)):
            if block.block_hash is not None and block.ref_cnt:
                self._leaving.add(block)
            self._pool.uncache_block(block)
        return True

    def take_events(self) -> list[ManagerEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def num_ready(self) -> int:
        """Number of chunks that can be found."""
        return self._pool.num_cached_prefixes

    @property
    def num_removed(self) -> int:
        """Number of chunks evicted or removed since the start."""
        return self._num_removed

    @property
    def num_writing(self) -> int:
        """Number of slots being written."""
        return len(self._writing)

    @property
    def num_leaving(self) -> int:
        """Number of slots of removed chunks that are still being read."""
        return len(self._leaving)

    @property
    def num_pins(self) -> int:
        """Number of chunks pinned by live load handles, counted once per handle."""
        return self._num_pins

    def check(self) -> None:
        """Verify that no slot is lost."""
        self._pool.check()
        num_used = self._pool.num_usable_blocks - self._pool.num_free_blocks
        assert num_used <= self._num_pins + len(self._writing), "slots are referenced that no handle stands for"
        assert self.num_free >= 0, "more slots are in use than there are"

    def _end_store(self, handle: SlotReservation, is_stored: bool) -> None:
        blocks = [self._pool.get_block(slot) for slot in handle.slots]
        self._writing.difference_update(handle.keys)
        if is_stored and handle.keys:
            for key, block in zip(handle.keys, blocks, strict=True):
                self._pool.cache_block(block, *split_key(key))
            self._generation += 1
            if self._record_events:
                self._events.append(ChunksStored(tuple(handle.keys)))
        self._pool.free_blocks(list(reversed(blocks)), evict_first=not is_stored)

    def _end_load(self, handle: ChunkPins, bad_slots: Sequence[int]) -> None:
        blocks = [self._pool.get_block(slot) for slot in handle.slots]
        self._num_pins -= len(blocks)
        for block in map(self._pool.get_block, bad_slots):
            self._pool.uncache_block(block)
            self._leaving.add(block)
        self._pool.free_blocks(list(reversed(blocks)))
        self._use_first([block for block in self._leaving if not block.ref_cnt])
        self._leaving = {block for block in self._leaving if block.ref_cnt}

    def _use_first(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Move free blocks that hold nothing to the head of the queue, so that the next store takes them before it evicts."""
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks, evict_first=True)

    def _find(self, key: OffloadKey) -> KVCacheBlock | None:
        return self._pool.lookup(*split_key(key))

    def _note_removed(self, block_hash: bytes, group: int) -> None:
        self._generation += 1
        self._num_removed += 1
        if self._record_events:
            self._events.append(ChunksRemoved((offload_key(block_hash, group),)))


def _slots_of(blocks: Sequence[KVCacheBlock]) -> Slots:
    return np.array([block.block_id for block in blocks], dtype=np.intp)
