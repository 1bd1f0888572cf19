"""Stores: planned in the step that completes their chunks, visible once all workers have copied them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from cargohold.connector.offloading.chunks import ChunkBlocks, chunks_to_store
from cargohold.connector.offloading.jobs import Store
from cargohold.connector.offloading.messages import StoreJob
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.shared import Shared
from cargohold.offload.manager.base import CannotStore, OffloadKey, StoreHandle
from cargohold.protocol import ScheduledRequest, TransferOutcome

logger = logging.getLogger(__name__)


class Stores:
    """Plans stores and draws the consequences of their ends."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._max_blocks = max(1, int(shared.layout.num_blocks * shared.config.max_inflight_fraction))

    def plan(self, state: RequestState, share: ScheduledRequest) -> Iterator[StoreJob]:
        """Store the chunks that are complete after this step and were not offered yet."""
        num_tokens = self._num_storable_tokens(state, share)
        if not state.has_unoffered_chunks(num_tokens):
            return  # the common case while generating
        state.extend_keys()
        for group, keys in enumerate(state.keys):
            first, end = state.next_chunk[group], min(num_tokens // keys.chunk_tokens, len(keys.keys))
            num_allowed = (
                self._max_blocks - self._shared.jobs.num_store_blocks
            ) // self._shared.config.blocks_per_chunk
            if end - first > num_allowed:
                # What does not fit now is offered again in the next step.
                self._shared.stats["stores_deferred"] += 1
                end = first + max(0, num_allowed)
            if first < end:
                job = self._plan_group(state, group, share.block_ids[group], first, end)
                if job is not None:
                    yield job

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """Release what the store held; its chunks can be found from now on, if they were copied."""
        if outcome is TransferOutcome.DONE:
            store.handle.commit()
        else:
            store.handle.forfeit()
            self._shared.stats["stores_failed"] += 1
            logger.warning(
                "a store of %d blocks in %s was %s", len(store.block_ids), self._shared.tier, outcome.name.lower()
            )
        self._shared.holder.release(store.block_ids)

    def _num_storable_tokens(self, state: RequestState, share: ScheduledRequest) -> int:
        """Leading tokens that may be stored after this step: computed, known, and wanted."""
        request = state.request
        # Under asynchronous scheduling the count runs ahead of the tokens that are known.
        num_tokens = min(share.num_computed_tokens + share.num_scheduled_tokens, request.num_tokens)
        if not self._shared.config.store_generated:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        limit = state.params.max_store_tokens
        return num_tokens if limit is None else min(num_tokens, limit)

    def _plan_group(
        self, state: RequestState, group: int, table: Sequence[int], first: int, end: int
    ) -> StoreJob | None:
        """Offer chunks ``[first, end)`` of a group to the manager; ``None`` if nothing is to be copied."""
        keys = state.keys[group]
        chunks = chunks_to_store(keys.group, table, self._shared.config.blocks_per_chunk, first, end)
        by_key = {keys.keys[chunk.index]: chunk for chunk in chunks}
        parent = keys.keys[chunks[0].index - 1] if chunks and chunks[0].index else None
        handle = self._shared.manager.prepare_store(list(by_key), parent)
        if isinstance(handle, CannotStore):
            self._shared.stats["stores_deferred"] += 1
            return None  # the chunks are offered again
        state.next_chunk[group] = end
        if not handle.keys:
            handle.commit()
            return None
        return self._start(state, handle, by_key)

    def _start(self, state: RequestState, handle: StoreHandle, by_key: Mapping[OffloadKey, ChunkBlocks]) -> StoreJob:
        shared = self._shared
        block_ids, rows = shared.places([by_key[key] for key in handle.keys], handle.slots)
        shared.holder.hold(block_ids)
        store = Store(shared.jobs.new_id(), state.request.request_id, handle, block_ids)
        shared.jobs.add_store(store)
        shared.stats["stores"] += 1
        shared.stats["stored_blocks"] += len(block_ids)
        return StoreJob(store.job_id, block_ids, rows, shared.config.transfer_timeout_s)
