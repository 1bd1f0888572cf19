"""A manager over a block pool: the class that the device side uses, on the host side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cargohold.blocks import ABSENT, READY, BlockPool, KVCacheBlock
from cargohold.errors import LifecycleError, MissingChunkError
from cargohold.offload.keys import offload_key, split_key
from cargohold.offload.manager.base import (
    CannotStore,
    ChunksRemoved,
    ChunksStored,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
)


class BlockPoolManager(OffloadManager):
    """Chunks of one block each, least recently used evicted first.

    A slot is a block of the pool: referenced while it is written or read, in the free queue otherwise, where eviction takes
    it from the head.

    Args:
        capacity: slots.
        record_events: whether ``take_events`` has something to say.
    """

    def __init__(self, capacity: int, *, record_events: bool = False) -> None:
        self.capacity = capacity
        self._pool = BlockPool(capacity, has_null_block=False, on_removed=self._note_removed)
        self._writing: set[OffloadKey] = set()
        self._num_pins = 0
        self._generation = 0
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

    def prepare_load(self, keys: Sequence[OffloadKey]) -> PoolLoadHandle:
        """Pin ready chunks."""
        blocks = []
        for key in keys:
            block = self._find(key)
            if block is None:
                raise MissingChunkError(key)
            blocks.append(block)
        self._pool.touch(blocks)
        self._num_pins += len(blocks)
        return PoolLoadHandle(self, keys, blocks)

    def prepare_store(
        self, keys: Sequence[OffloadKey], parent: OffloadKey | None = None
    ) -> PoolStoreHandle | CannotStore:
        """Reserve slots for the absent ones; if there is room for fewer, for the first of them."""
        del parent
        absent = [
            key for key in dict.fromkeys(keys) if key not in self._writing and not self._pool.contains(*split_key(key))
        ]
        present = [block for key in keys if (block := self._find(key)) is not None]
        # What is offered must not be evicted to make room for the rest of the same offer.
        self._pool.touch(present)
        chosen = absent[: self._pool.num_free_blocks]
        blocks = self._pool.allocate(len(chosen))
        self._pool.free_blocks(present)
        if absent and not chosen:
            return CannotStore.BUSY
        self._writing.update(chosen)
        return PoolStoreHandle(self, chosen, blocks)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks at once; their slots are free when nobody reads them."""
        for key in keys:
            while (block := self._find(key)) is not None:
                self._pool.uncache_block(block)

    def reset(self) -> bool:
        """Forget everything, unless a slot is in use."""
        return self._pool.reset_cache()

    def take_events(self) -> list[ManagerEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def num_ready(self) -> int:
        """Chunks that can be found."""
        return self._pool.num_cached_prefixes

    @property
    def num_writing(self) -> int:
        """Slots being filled."""
        return len(self._writing)

    @property
    def num_pins(self) -> int:
        """Pins of live load handles."""
        return self._num_pins

    def check(self) -> None:
        """Verify that no slot is lost."""
        self._pool.check()
        num_used = self._pool.num_usable_blocks - self._pool.num_free_blocks
        assert num_used <= self._num_pins + len(self._writing), "slots are referenced that no handle stands for"

    def finish_store(self, keys: Sequence[OffloadKey], blocks: Sequence[KVCacheBlock], *, ready: bool) -> None:
        """End a store handle. Called by the handle."""
        self._writing.difference_update(keys)
        if ready:
            for key, block in zip(keys, blocks, strict=True):
                self._pool.cache_block(block, *split_key(key))
            self._generation += 1
            if self._record_events and keys:
                self._events.append(ChunksStored(tuple(keys)))
        self._pool.free_blocks(list(reversed(blocks)), evict_first=not ready)

    def finish_load(self, blocks: Sequence[KVCacheBlock], bad_keys: Iterable[OffloadKey]) -> None:
        """End a load handle. Called by the handle."""
        self._num_pins -= len(blocks)
        self.remove(bad_keys)
        self._pool.free_blocks(list(reversed(blocks)))

    def _find(self, key: OffloadKey) -> KVCacheBlock | None:
        return self._pool.lookup(*split_key(key))

    def _note_removed(self, block_hash: bytes, group: int) -> None:
        self._generation += 1
        if self._record_events:
            self._events.append(ChunksRemoved((offload_key(block_hash, group),)))


class PoolStoreHandle:
    """Slots reserved in a ``BlockPoolManager``; see ``StoreHandle``."""

    def __init__(self, manager: BlockPoolManager, keys: Sequence[OffloadKey], blocks: Sequence[KVCacheBlock]) -> None:
        self.keys = keys
        self.slots = [block.block_id for block in blocks]
        self.deferred: Sequence[OffloadKey] = ()
        self._manager = manager
        self._blocks = blocks
        self._state = "writing"

    def commit(self) -> None:
        """The chunks are ready."""
        self._end("commit", ready=True)

    def forfeit(self) -> None:
        """The slots are free."""
        self._end("forfeit", ready=False)

    def _end(self, move: str, *, ready: bool) -> None:
        if self._state != "writing":
            raise LifecycleError(f"store of {len(self.keys)} chunks", self._state, move)
        self._state = f"ended by {move}"
        self._manager.finish_store(self.keys, self._blocks, ready=ready)


class PoolLoadHandle:
    """Chunks pinned in a ``BlockPoolManager``; see ``LoadHandle``."""

    def __init__(self, manager: BlockPoolManager, keys: Sequence[OffloadKey], blocks: Sequence[KVCacheBlock]) -> None:
        self.keys = keys
        self.slots = [block.block_id for block in blocks]
        self._manager = manager
        self._blocks = blocks
        self._is_released = False

    def release(self, bad_keys: Iterable[OffloadKey] = ()) -> None:
        """The chunks are not read any more."""
        if self._is_released:
            raise LifecycleError(f"load of {len(self.keys)} chunks", "released", "release")
        self._is_released = True
        self._manager.finish_load(self._blocks, bad_keys)
