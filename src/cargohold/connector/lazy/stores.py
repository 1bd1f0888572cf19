"""Stores of the lazy connector: cached blocks that are about to be evicted, and that host memory does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from cargohold.blocks import READY
from cargohold.connector.lazy.scout import FreeQueueScout
from cargohold.connector.offloading.jobs import Store
from cargohold.connector.offloading.messages import StoreJob
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.shared import Shared
from cargohold.connector.offloading.stores import end_store, start_store
from cargohold.errors import ContractError
from cargohold.offload.keys import offload_key
from cargohold.offload.manager.base import OffloadKey, StoreOffer
from cargohold.protocol import BlockIds, KVCacheBlockView, SchedulerContext, StepView, TransferOutcome


class LazyStores:
    """Stores blocks shortly before they would be evicted.

    Args:
        shared: the state that the connector's parts share; its context must be bound before the first step.
        requests: the connector's requests, by id; they tell how many blocks the next step needs.
        lookahead: number of blocks ahead of eviction that are kept safe.
    """

    def __init__(self, shared: Shared, requests: Mapping[str, RequestState], lookahead: int) -> None:
        self._shared = shared
        self._requests = requests
        self._lookahead = lookahead
        self._scout: FreeQueueScout | None = None

    def begin_request(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> None:
        """Do nothing: what the device has and the tier lacks is found when it comes near eviction."""

    def plan(self, step: StepView) -> Iterator[StoreJob]:
        """Yield the store of the blocks that would be evicted next.

        Blocks are not free while they are copied. So many stay free as running requests need in the next step. If they found
        none, some would be preempted, and all of their tokens computed again.
        """
        context = self._context()
        if self._scout is None:
            self._scout = FreeQueueScout(context, self._is_kept, self._lookahead)
        blocks = self._scout.find_unsafe(self._shared.num_storable_blocks())
        if blocks:
            num_reserved = self._num_needed_next(step)
            num_free = sum(1 for _ in islice(context.iter_free_blocks(), len(blocks) + num_reserved))
            blocks = blocks[: max(0, num_free - num_reserved)]
        if blocks:
            yield from self._store(blocks, context)

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """End a store: put its blocks back at the head of the free queue, where they were. Saved ones can go without loss."""
        end_store(self._shared, store, outcome)
        context = self._context()
        blocks = [context.get_block(block_id) for block_id in store.block_ids]  # the next victim first
        context.free_blocks(blocks, evict_first=True)
        if outcome is TransferOutcome.DONE and not store.is_spoiled and self._scout is not None:
            for block in reversed(blocks):
                self._scout.note_saved(block)

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Do nothing: the request's blocks are found when they come near eviction."""

    @property
    def has_pending_work(self) -> bool:
        """``False``: nothing is evicted while no request runs."""
        return False

    def _store(self, unsafe: Sequence[KVCacheBlockView], context: SchedulerContext) -> Iterator[StoreJob]:
        """Yield the store of ``unsafe`` blocks, which are in eviction order.

        Ends of prefixes are evicted before their beginnings, on the device and in host memory: what is stored first counts as
        the oldest there. To which prefixes the blocks belong is not known.
        """
        by_key = {_key(block): block for block in unsafe}
        handle = self._shared.manager.prepare_stores([StoreOffer((key,)) for key in by_key])
        self._shared.stats["stores_deferred"] += bool(handle.deferred)
        if not handle.keys:
            handle.commit()
            return
        blocks = [by_key[key] for key in handle.keys]
        context.touch(blocks)
        block_ids = tuple(block.block_id for block in blocks)
        # No request holds these blocks, so the store has no request ids.
        store = Store(self._shared.jobs.new_id(), frozenset(), handle, block_ids)
        yield start_store(self._shared, store, tuple(handle.slots))

    def _num_needed_next(self, step: StepView) -> int:
        """Return how many blocks the requests of this step may need in the next one: for a next token, or more of a prompt."""
        num_blocks = 0
        for share in step.scheduled:
            num_tokens = self._requests[share.request_id].request.num_tokens
            num_left = num_tokens - share.num_computed_tokens - share.num_scheduled_tokens
            num_next = max(1, min(num_left, share.num_scheduled_tokens))
            num_blocks += sum(-(-num_next // group.block_tokens) for group in self._shared.layout.groups)
        return num_blocks

    def _is_kept(self, block: KVCacheBlockView) -> bool:
        return self._shared.manager.lookup([_key(block)])[0] == READY

    def _context(self) -> SchedulerContext:
        if self._shared.context is None:
            raise ContractError("lazy", "the engine gives no view of its block pool, which lazy offloading walks")
        return self._shared.context


def _key(block: KVCacheBlockView) -> OffloadKey:
    assert block.block_hash is not None and block.group_id is not None, "an empty block needs no copy"
    return offload_key(block.block_hash, block.group_id)
