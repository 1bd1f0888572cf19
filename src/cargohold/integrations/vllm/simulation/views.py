"""Views of vLLM's scheduler and block pool with the interface that the simulation's oracles need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from cargohold.integrations.vllm.blocks import BlockView
from cargohold.integrations.vllm.scheduler import SchedulerSide
from cargohold.integrations.vllm.simulation.published import from_vllm
from cargohold.protocol import MEDIUM_DEVICE, MEDIUM_HOST, ConnectorGuard, KVCacheGroup, KVEvent


class PoolView:
    """vLLM's block pool. Blocks are given out by ``allocate`` alone, so that oracles can watch it.

    Args:
        pool: vLLM's own.
        groups: the KV-cache groups.
    """

    def __init__(self, pool: Any, groups: tuple[KVCacheGroup, ...]) -> None:
        self._pool = pool
        self._groups = groups
        self._get_new_blocks = pool.get_new_blocks
        # ``_allocate`` looks up ``allocate`` at each call: oracles replace that by functions of their own.
        pool.get_new_blocks = self._allocate

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return len(self._pool.blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Without the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_cached_prefixes(self) -> int:
        """Prefixes that can be found."""
        return len(self._pool.cached_block_hash_to_block)

    def get_block(self, block_id: int) -> BlockView:
        """One block."""
        return BlockView(self._pool.blocks[block_id], self._groups)

    def allocate(self, num_blocks: int) -> Any:
        """Allocate blocks; returns vLLM's block objects."""
        return self._get_new_blocks(num_blocks)

    def _allocate(self, num_blocks: int) -> Any:
        return self.allocate(num_blocks)

    def check(self) -> None:
        """Every block is free or held, and the free queue has just the free ones. Raises ``AssertionError``."""
        free = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
        unheld = {block.block_id for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null}
        assert len(free) == self.num_free_blocks, f"{len(free)} blocks queue to be used, {self.num_free_blocks} counted"
        assert len(set(free)) == len(free), "a block is in the free queue twice"
        assert set(free) == unheld, f"blocks {sorted(set(free) ^ unheld)} are in the free queue or unheld, not both"


class CacheView:
    """vLLM's KV-cache manager.

    Args:
        scheduler: vLLM's own.
        pool: its block pool.
    """

    def __init__(self, scheduler: Any, pool: PoolView) -> None:
        self._scheduler = scheduler
        self.pool = pool

    def reference_counts(self) -> Counter[int]:
        """References that requests hold by block id, including those that vLLM gives back when a step in flight has ended."""
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        tables = [table for manager in managers for table in manager.req_to_blocks.values()]
        tables += [blocks for _, blocks in self._scheduler.deferred_frees]
        return Counter(block.block_id for table in tables for block in table if not block.is_null)

    def check(self) -> None:
        """Verify that no block is lost. Raises ``AssertionError``."""
        self.pool.check()


class SchedulerView:
    """vLLM's scheduler.

    Args:
        scheduler: vLLM's own.
        side: the adapter's scheduler side.
        is_busy: whether steps are in flight.
    """

    def __init__(self, scheduler: Any, side: SchedulerSide, is_busy: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._side = side
        self._is_busy = is_busy
        self.kv = CacheView(scheduler, PoolView(scheduler.kv_cache_manager.block_pool, side.layout.groups))
        self._events: list[KVEvent] = []
        self._num_resets = 0
        manager, connector = scheduler.kv_cache_manager, scheduler.connector
        manager.take_events = self._watched(manager.take_events, MEDIUM_DEVICE)
        connector.take_events = self._watched(connector.take_events, MEDIUM_HOST)

    @property
    def connector(self) -> ConnectorGuard:
        """The connector, contained."""
        return self._side.guard

    def has_work(self) -> bool:
        """Whether vLLM's engine would go on stepping."""
        return self._is_busy() or bool(self._scheduler.has_requests())

    def waiting_requests(self) -> Iterable[Any]:
        """Requests not running."""
        return [*self._scheduler.kv_holding_waiting, *self._scheduler.waiting]

    def reset_cache(self) -> bool:
        """Reset vLLM's prefix cache; whether it could be. Every other time, the connector is not to be reset with it."""
        self._num_resets += 1
        return bool(self._scheduler.reset_prefix_cache(reset_connector=self._num_resets % 2 == 0))

    def take_events(self) -> list[KVEvent]:
        """Events that vLLM published since the last call, and those that it is about to publish."""
        for source in (self._scheduler.kv_cache_manager, self._scheduler.connector):
            source.take_events()
        events, self._events = self._events, []
        return events

    def check_settled(self) -> None:
        """Verify that nothing is left behind. Raises ``AssertionError`` naming what is."""
        assert not self.has_work(), "work is pending"
        scheduler, pool = self._scheduler, self.kv.pool
        assert not scheduler.requests, f"vLLM still knows {sorted(scheduler.requests)}"
        assert not (scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting)
        self.kv.check()
        num_used, num_stuck = pool.num_usable_blocks - pool.num_free_blocks, len(self.connector.held_references())
        assert num_used == num_stuck, f"{num_used} device blocks are referenced, {num_stuck} of them for stuck copies"

    def _watched(self, take: Callable[[], Any], medium: str) -> Callable[[], Any]:
        """Wrap ``take`` so that events taken are noted here, too. ``medium`` is for vLLM's event of a cleared medium."""

        def take_and_note() -> Any:
            events = take()
            self._events += [from_vllm(event, medium) for event in events or ()]
            return events

        return take_and_note
