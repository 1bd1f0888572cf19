"""A manager over a block pool: the class that the device side uses, on the host side."""

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
    """Chunks of one block each, least recently used evicted first.

    A slot is a block of the pool: referenced while it is written or read, in the free queue otherwise, where eviction takes
    it from the head. It knows nothing of prefixes: of what is in front of an offer it spares the parent alone.

    Args:
        capacity: slots.
        record_events: whether ``take_events`` has something to say.
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
        """Changes with every commit and removal."""
        return self._generation

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """Presence of each key."""
        return bytes(READY if self._pool.contains(*split_key(key)) else ABSENT for key in keys)

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Presence up to the first absent key."""
        num_ready = 0
        for key in keys:
            if not self._pool.contains(*split_key(key)):
                break
            num_ready += 1
        return bytes([READY]) * num_ready

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Move the chunks to the safe end of the free queue, the last one first: ends of prefixes go before their starts."""
        blocks = [block for key in reversed(keys) if (block := self._find(key)) is not None]
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)

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
        """Reserve slots for the absent ones; if there is room for fewer, for the first of them."""
        num_waiting = self._num_pins + len(self._writing)
        offered = list(dict.fromkeys(key for offer in offers for key in offer.keys))
        # Neither what is offered nor what is in front of it must be evicted to make room for the rest.
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
        """Forget chunks at once; their slots are free when nobody reads them."""
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
        """Forget everything, unless something is being written."""
        if self._writing:
            return False
        for block in map(self._pool.get_block, range(self.capacity)):
            if block.block_hash is not None and block.ref_cnt:
                self._leaving.add(block)
            self._pool.uncache_block(block)
        return True

    def take_events(self) -> list[ManagerEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def num_ready(self) -> int:
        """Chunks that can be found."""
        return self._pool.num_cached_prefixes

    @property
    def num_removed(self) -> int:
        """Chunks that were there and have gone, ever since."""
        return self._num_removed

    @property
    def num_writing(self) -> int:
        """Slots being filled."""
        return len(self._writing)

    @property
    def num_leaving(self) -> int:
        """Slots of removed chunks that are still being read."""
        return len(self._leaving)

    @property
    def num_pins(self) -> int:
        """Pins of live load handles."""
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
        """Nothing is in these free blocks: the next store takes them before it evicts anything."""
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
