"""Stores: which chunks to copy down, and when they can be found.

``StorePlanner`` is the port; ``EagerStores`` copies every chunk in the step that completes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from cargohold.connector.offloading.chunks import ChunkBlocks, chunks_to_store
from cargohold.connector.offloading.jobs import Store
from cargohold.connector.offloading.leftovers import Leftovers
from cargohold.connector.offloading.messages import StoreJob
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.shared import Shared
from cargohold.offload.manager.base import CannotStore, OffloadKey, StoreHandle
from cargohold.protocol import BlockIds, ScheduledRequest, StepView, TransferOutcome

logger = logging.getLogger(__name__)


class StorePlanner(Protocol):
    """Decides what is copied down in a step."""

    def plan(self, step: StepView) -> Iterator[StoreJob]:
        """The stores to start after this step's forward pass."""
        ...

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """A store has ended on all workers: release what it held; its chunks can be found if they were copied."""
        ...

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """A request ended, whose blocks may be free from now on."""
        ...

    @property
    def has_pending_work(self) -> bool:
        """Whether stores are to be planned although no request runs."""
        ...


MakeStores: TypeAlias = Callable[[Shared, Mapping[str, RequestState]], StorePlanner]
"""Makes what decides which chunks are copied down, for the requests given."""


class EagerStores:
    """Stores chunks as they are computed.

    Args:
        shared: the connector's common ground.
        requests: its requests.
    """

    def __init__(self, shared: Shared, requests: Mapping[str, RequestState]) -> None:
        self._shared = shared
        self._requests = requests
        self._leftovers = Leftovers()

    @property
    def has_pending_work(self) -> bool:
        """While chunks of ended requests are to be offered."""
        return len(self._leftovers) > 0

    def plan(self, step: StepView) -> Iterator[StoreJob]:
        """Store the chunks that are complete after this step and were not offered yet; first those of ended requests."""
        if self._leftovers:
            yield from self._plan_leftovers()
        for share in step.scheduled:
            state = self._requests[share.request_id]
            num_tokens = self._num_storable_tokens(state, share)
            if state.has_unoffered_chunks(num_tokens):  # seldom while generating
                yield from self._plan_request(state, share, num_tokens)

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """Release the blocks, and let the chunks be found."""
        end_store(self._shared, store, outcome)
        self._shared.holder.release(store.block_ids)

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Remember chunks that could not be stored yet, if their blocks can be recognised when they can."""
        context, num_tokens = self._shared.context, self._num_wanted_tokens(state)
        if context is not None and any(block_ids) and state.has_unoffered_chunks(num_tokens):
            self._leftovers.add(state, block_ids, num_tokens, context)

    def _plan_leftovers(self) -> Iterator[StoreJob]:
        assert self._shared.context is not None, "without it there are none"
        for leftover in self._leftovers:
            is_done = True
            for group, first in enumerate(leftover.state.next_chunk):
                # No further than what can be stored now: all of them together are as long as the device's pool.
                limit = self._shared.num_storable_chunks()
                end = leftover.end_chunk(group, self._shared.config.blocks_per_chunk, self._shared.context, limit)
                yield from self._offer(leftover.state, group, leftover.tables[group], end)
                is_done &= leftover.state.next_chunk[group] >= end and end - first < limit
            if is_done:
                self._leftovers.remove(leftover)
            if not self._shared.num_storable_chunks():
                return

    def _plan_request(self, state: RequestState, share: ScheduledRequest, num_tokens: int) -> Iterator[StoreJob]:
        state.extend_keys()
        for group, keys in enumerate(state.keys):
            end = min(num_tokens // keys.chunk_tokens, len(keys.keys))
            yield from self._offer(state, group, share.block_ids[group], end)

    def _offer(self, state: RequestState, group: int, table: Sequence[int], end: int) -> Iterator[StoreJob]:
        """Offer a group's chunks before ``end``, as far as stores may hold their blocks now."""
        first = state.next_chunk[group]
        num_allowed = self._shared.num_storable_chunks()
        if end - first > num_allowed:
            # What does not fit now is offered again in the next step.
            self._shared.stats["stores_deferred"] += 1
            end = first + num_allowed
        if first < end:
            job = self._plan_group(state, group, table, first, end)
            if job is not None:
                yield job

    def _num_storable_tokens(self, state: RequestState, share: ScheduledRequest) -> int:
        """Leading tokens that may be stored after this step: computed, known, and wanted."""
        # Under asynchronous scheduling the count runs ahead of the tokens that are known.
        return min(share.num_computed_tokens + share.num_scheduled_tokens, self._num_wanted_tokens(state))

    def _num_wanted_tokens(self, state: RequestState) -> int:
        """Leading tokens that may be stored: known, and wanted."""
        request = state.request
        num_tokens = request.num_tokens
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
        # What waits for slots that others use is offered again, with all behind it.
        state.next_chunk[group] = by_key[handle.deferred[0]].index if handle.deferred else end
        self._shared.stats["stores_deferred"] += bool(handle.deferred)
        if not handle.keys:
            handle.commit()
            return None
        if self._shared.events is not None:
            self._shared.events.note_store(state.request, keys, handle.keys, first)
        return self._start(state, handle, by_key)

    def _start(self, state: RequestState, handle: StoreHandle, by_key: Mapping[OffloadKey, ChunkBlocks]) -> StoreJob:
        block_ids, rows = self._shared.places([by_key[key] for key in handle.keys], handle.slots)
        self._shared.holder.hold(block_ids)
        return start_store(
            self._shared, Store(self._shared.jobs.new_id(), state.request.request_id, handle, block_ids), rows
        )


def start_store(shared: Shared, store: Store, rows: tuple[int, ...]) -> StoreJob:
    """Note that a store is in flight; the message that starts it. Its blocks must be held already."""
    shared.jobs.add_store(store)
    shared.stats["stores"] += 1
    shared.stats["stored_blocks"] += len(store.block_ids)
    return StoreJob(store.job_id, store.block_ids, rows, shared.config.transfer_timeout_s)


def end_store(shared: Shared, store: Store, outcome: TransferOutcome) -> None:
    """Let a store's chunks be found, or give their slots back."""
    if outcome is TransferOutcome.DONE and not store.is_spoiled:
        store.handle.commit()
        shared.stats["stored_chunks"] += len(store.handle.keys)
    else:
        store.handle.forfeit()
        if shared.events is not None:
            shared.events.forget(store.handle.keys)
        shared.stats["stores_failed"] += 1
        reason = "spoiled by a failed load" if store.is_spoiled else outcome.name.lower()
        logger.warning("a store of %d blocks in %s was %s", len(store.block_ids), shared.tier, reason)
