"""The scheduler context that the embedded engine hands to its connector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cargohold.blocks import KVCacheBlock
from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request import Request
from cargohold.engine.core.waiting_queue import WaitingQueue
from cargohold.protocol import KVCacheBlockView


class EngineContext:
    """The device pool and the requests that use it; see ``cargohold.protocol.SchedulerContext``."""

    def __init__(self, kv: KVCacheManager, waiting: WaitingQueue) -> None:
        self._kv = kv
        self._waiting = waiting

    def get_block(self, block_id: int) -> KVCacheBlock:
        """The block with that id."""
        return self._kv.pool.get_block(block_id)

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each."""
        self._kv.pool.touch_ids(block_ids)

    def free_ids(self, block_ids: Sequence[int]) -> None:
        """Give one reference back on each."""
        self._kv.pool.free_ids(block_ids)

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """Take one reference on each."""
        self._kv.pool.touch(blocks)

    def free_blocks(self, blocks: Iterable[KVCacheBlockView], *, evict_first: bool = False) -> None:
        """Give one reference back on each."""
        self._kv.pool.free_blocks(blocks, evict_first=evict_first)

    def iter_free_blocks(self, after: KVCacheBlockView | None = None) -> Iterator[KVCacheBlock]:
        """Walk the free queue in eviction order."""
        return self._kv.pool.iter_free_blocks(after)

    def get_request_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's block table per group."""
        return tuple(table.blocks for table in self._kv.tables(request_id))

    def waiting_requests(self) -> Iterable[Request]:
        """Requests not running yet, in the order in which they will be tried."""
        return tuple(self._waiting)
