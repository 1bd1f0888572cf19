"""The lazy connector: copies cached blocks down shortly before they would be evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import OffloadKey, StoreOffer, offload_key
from cargohold.cache.rows import rows_to_store
from cargohold.connector.config import LAZY, OffloadConfig
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.offers import end_store, start_store
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.connector.kernel.stores import EagerStores, StorePlanner
from cargohold.connector.offloading.factory import OffloadingFactory, host_manager, scheduler_side, tier_options
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.errors import ConfigError, ContractError
from cargohold.protocol import (
    BlockIds,
    KVCacheBlockView,
    SchedulerContext,
    SchedulerEnvironment,
    StepView,
    TransferOutcome,
    WorkerEnvironment,
    metrics,
)
from cargohold.transfer import CopyJob

# --- walks the free queue ahead of eviction ---------------------------------------------------------------------------


class FreeQueueScout:
    """Finds blocks that must be saved so that those that will be evicted next are *safe*: empty, or kept elsewhere.

    ::

        free queue   | safe | safe | safe | not safe | ? | ? | ...
                      next                ^ cursor: behind the last block known to be safe
                      victim

    Allocation takes blocks from the left, so the stretch of safe blocks shrinks by as many, and the scout walks on from its
    cursor until the stretch is ``lookahead`` long again. Safe blocks that are used again leave the stretch; if the block at the
    cursor does, the walk goes on behind the safe block before it.

    Args:
        context: the engine's block pool.
        is_kept: tells whether a block's KV is kept elsewhere, ready to be loaded.
        lookahead: number of blocks ahead of eviction to keep safe.
    """

    def __init__(self, context: SchedulerContext, is_kept: Callable[[KVCacheBlockView], bool], lookahead: int) -> None:
        self._context = context
        self._is_kept = is_kept
        self._lookahead = lookahead
        # The safe blocks up to the cursor, with their block hashes when they were found safe.
        self._safe: deque[tuple[KVCacheBlockView, bytes | None]] = deque()

    def find_unsafe(self, limit: int) -> list[KVCacheBlockView]:
        """Return the blocks within the lookahead that are not safe, next victim first; at most ``limit``.

        The caller is expected to take them out of the free queue and to save them.
        """
        while self._safe and not self._is_still_there(*self._safe[0]):
            self._safe.popleft()
        if any(block.ref_cnt for block, _ in self._safe):
            # Blocks that are used again will return to the tail of the queue.
            self._safe = deque(entry for entry in self._safe if not entry[0].ref_cnt)
        if limit < 1 or len(self._safe) >= self._lookahead:
            return []
        unsafe: list[KVCacheBlockView] = []
        # All safe blocks are without references here, so they are in the queue, and the cursor is not stale.
        for block in self._context.iter_free_blocks(after_block=self._safe[-1][0] if self._safe else None):
            if block.block_hash is None or self._is_kept(block):
                # Behind an unsafe block there is a hole in the stretch, until that block is saved and put back at the head.
                if not unsafe:
                    self._safe.append((block, block.block_hash))
            else:
                unsafe.append(block)
            if len(self._safe) + len(unsafe) >= self._lookahead or len(unsafe) >= limit:
                break
        return unsafe

    def note_saved(self, block: KVCacheBlockView) -> None:
        """Note that a block was saved and put back at the head of the queue."""
        if block.ref_cnt == 0:
            self._safe.appendleft((block, block.block_hash))

    @staticmethod
    def _is_still_there(block: KVCacheBlockView, block_hash: bytes | None) -> bool:
        return block.ref_cnt == 0 and block.block_hash == block_hash


# --- stores of the lazy connector -------------------------------------------------------------------------------------


class LazyStores(StorePlanner):
    """Stores blocks shortly before they would be evicted.

    Args:
        shared: the state that the connector's parts share; its context must be bound before the first step.
        requests: the connector's requests, by id; they tell how many blocks the next step needs.
        lookahead: number of blocks ahead of eviction that are kept safe.
    """

    stores_free_blocks = True

    def __init__(self, shared: Shared, requests: Mapping[str, RequestState], lookahead: int) -> None:
        self._shared = shared
        self._requests = requests
        self._lookahead = lookahead
        self._scout: FreeQueueScout | None = None
        # Stores what somebody waits for, as it is computed.
        self._awaited = EagerStores(shared, requests)

    def coming(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are being stored, or that somebody waits for."""
        return self._awaited.coming(keys)

    def plan(self, step: StepView) -> Iterator[CopyJob]:
        """Yield the stores of chunks that somebody waits for, and that of the blocks that would be evicted next.

        Blocks are not free while they are copied. So many stay free as running requests need in the next step. If they found
        none, some would be preempted, and all of their tokens computed again.
        """
        shares = [share for share in step.scheduled if self._requests[share.request_id].is_awaited]
        yield from self._awaited.plan_for(shares)
        context = self._context()
        if self._scout is None:
            self._scout = FreeQueueScout(context, self._needs_no_copy, self._lookahead)
        blocks = self._scout.find_unsafe(self._shared.num_storable_blocks())
        if blocks:
            num_reserved = self._num_needed_next(step)
            num_free = sum(1 for _ in islice(context.iter_free_blocks(), len(blocks) + num_reserved))
            blocks = blocks[: max(0, num_free - num_reserved)]
        if blocks:
            yield from self._store(blocks, context)

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """End a store: put its blocks back at the head of the free queue, where they were. Saved ones can go without loss."""
        if store.request_ids:
            self._awaited.end(store, outcome)
            return
        end_store(self._shared, store, outcome)
        context = self._context()
        blocks = [context.get_block(block_id) for block_id in store.block_ids]  # the next victim first
        context.free_blocks(blocks, evict_first=True)
        if outcome is TransferOutcome.DONE and not store.is_spoiled and self._scout is not None:
            for block in reversed(blocks):
                self._scout.note_saved(block)

    def give_up(self) -> None:
        """Let go of what is held for those who wait."""
        self._awaited.give_up()

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Remember what somebody waits for; all other blocks are found when they come near eviction."""
        if state.is_awaited:
            self._awaited.end_request(state, block_ids)

    @property
    def has_pending_work(self) -> bool:
        """Whether chunks that somebody waits for are still to be stored. Nothing is evicted while no request runs."""
        return self._awaited.has_pending_work

    @property
    def held_blocks(self) -> Sequence[int]:
        """Blocks of ended requests that are held because somebody waits for their KV."""
        return self._awaited.held_blocks

    def _store(self, unsafe: Sequence[KVCacheBlockView], context: SchedulerContext) -> Iterator[CopyJob]:
        """Yield the store of ``unsafe`` blocks, which are in eviction order.

        Ends of prefixes are evicted before their beginnings, on the device and in host memory: what is stored first counts as
        the oldest there. To which prefixes the blocks belong is not known.
        """
        by_key = {self._key(block): block for block in unsafe}
        handle = self._shared.manager.prepare_stores([StoreOffer((key,)) for key in by_key])
        self._shared.stats[metrics.DEFERRED_STORES.of()] += bool(handle.deferred)
        if not handle.keys:
            handle.commit()
            return
        blocks = [by_key[key] for key in handle.keys]
        context.touch(blocks)
        block_ids = tuple(block.block_id for block in blocks)
        # No request holds these blocks, so the store has no request ids.
        store = Store(self._shared.jobs.new_id(), frozenset(), handle, block_ids)
        self._shared.guests.store_begins(store, ())
        _, rows, groups = rows_to_store(block_ids, range(len(block_ids)), handle.keys, handle.slots, 1)
        yield start_store(self._shared, store, rows, groups)

    def _num_needed_next(self, step: StepView) -> int:
        """Return how many blocks the requests of this step may need in the next one: for a next token, or more of a prompt."""
        num_blocks = 0
        for share in step.scheduled:
            num_tokens = self._requests[share.request_id].request.num_tokens
            num_left = num_tokens - share.num_computed_tokens - share.num_scheduled_tokens
            num_next = max(1, min(num_left, share.num_scheduled_tokens))
            num_blocks += sum(-(-num_next // group.block_tokens) for group in self._shared.layout.groups)
        return num_blocks

    def _needs_no_copy(self, block: KVCacheBlockView) -> bool:
        """Whether a block is kept already, or must not be kept."""
        key = self._key(block)
        return self._shared.manager.lookup([key])[0] == READY or not self._shared.guests.may_store(key, block.block_id)

    def _key(self, block: KVCacheBlockView) -> OffloadKey:
        assert block.block_hash is not None and block.group_id is not None, "an empty block needs no copy"
        return offload_key(block.block_hash, block.group_id, self._shared.namespace)

    def _context(self) -> SchedulerContext:
        if self._shared.context is None:
            raise ContractError("lazy", "the engine gives no view of its block pool, which lazy offloading walks")
        return self._shared.context


# --- makes both sides of the lazy offloading connector ----------------------------------------------------------------

_NAME: Final = LAZY
"""Name of both sides: a composed connector puts it in front of their counters."""


@dataclass(frozen=True, slots=True)
class LazyOffloadingFactory:
    """Makes the lazy offloading connector. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Loads, the worker side and the manager of host memory are those of the eager connector. What differs is which blocks are
    stored, and when.

    Attributes:
        config: options.
    """

    config: OffloadConfig

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """Make the scheduler side. Raises ``ConfigError`` if host memory cannot hold a block, or prefix caching is off."""
        if not environment.prefix_caching:
            raise ConfigError(
                "prefix_caching", value=False, expected="lazy offloading keeps what the prefix cache evicts"
            )
        config = self.config
        layout = environment.layout
        num_slots = OffloadingFactory(config).num_slots(layout)
        host = host_manager(config, layout, num_slots, {}, record_events=environment.emits_events)
        scheduler = scheduler_side(
            config,
            environment,
            host,
            tier_options(config, layout),
            make_stores=partial(LazyStores, lookahead=lookahead(config, environment)),
        )
        scheduler.name = _NAME
        return scheduler

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """Make the worker side, which is the eager connector's under another name."""
        worker = OffloadingFactory(self.config).make_worker_side(environment)
        worker.name = _NAME
        return worker


def lookahead(config: OffloadConfig, environment: SchedulerEnvironment) -> int:
    """Return ``lookahead_blocks``, or its default for the engine's step size."""
    if config.lookahead_blocks is not None:
        return config.lookahead_blocks
    return 2 * sum(-(-environment.max_step_tokens // group.block_tokens) for group in environment.layout.groups)
