"""Stores: decides which chunks to copy down, and when they can be found.

``EagerStores`` copies every chunk in the step that completes it. What a step offers where it has
completed more than stores may hold is chosen in ``offers``; what ended requests have left is in ``pending_stores``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

from cargohold.cache.manager import ChunkKeys, OffloadKey
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.offers import Offering, end_store
from cargohold.connector.kernel.pending_stores import PendingStores
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.protocol import BlockIds, ScheduledRequest, StepView, TransferOutcome
from cargohold.transfer import CopyJob

_SEVERAL: Final = 4
_MANY: Final = 16
"""So many chunks are worth waiting for, and so many do not wait for others."""


class EagerStores:
    """Stores chunks as they are computed. All chunks that a step completes go in one job, of whichever requests they are.

    Args:
        shared: the state that the connector's parts share.
        requests: the connector's requests, by id.
    """

    def __init__(self, shared: Shared, requests: Mapping[str, RequestState]) -> None:
        self._shared = shared
        self._requests = requests
        self._offering = Offering(shared)
        self._pending = PendingStores(shared, self._offering)
        # After as many steps as a chunk has tokens, every request has one to store.
        self._chunk_tokens = shared.layout.groups[0].block_tokens * shared.config.blocks_per_chunk
        self._max_wait = min(shared.config.store_within_steps, self._chunk_tokens)
        self._num_waited = 0

    def use_context(self) -> None:
        """Note that the engine has shown its block pool, before the first request."""

    def expect(self, state: RequestState, num_hit_tokens: int, *, is_loaded: bool = False) -> None:
        """Note that a request may get blocks next, for its hit, which may be loaded first, and what follows."""

    def plan_saves(self) -> tuple[CopyJob, ...]:
        """Return the stores of what was evicted since the last step, to be carried out before this one."""
        return ()

    @property
    def has_pending_work(self) -> bool:
        """Whether chunks of ended requests are still to be offered."""
        return self._pending.has_pending_work

    @property
    def held_blocks(self) -> Sequence[int]:
        """Blocks that are held for pending stores."""
        return self._pending.held_blocks

    def coming(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are in a store, or in a pending one."""
        return {key for key in keys if self._shared.jobs.is_coming(key)} | self._pending.among(set(keys))

    def begin_request(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> None:
        """Offer from the first chunk on that the device has and the tier lacks, or else after the hit.

        Args:
            state: the request.
            num_ready: number of its leading chunks that the tier has, per group.
            num_computed_tokens: number of its leading tokens that are on the device.
            num_hit_tokens: number of its leading tokens that are on the device, or are loaded now.
        """
        if state.is_awaited:
            return
        state.hit_tokens = num_hit_tokens
        firsts = []
        for keys, num_leading in zip(state.keys, num_ready, strict=True):
            first = self._first_hole(keys, num_leading, num_computed_tokens)
            firsts.append(num_hit_tokens // keys.chunk_tokens if first is None else first)
        state.offer_from(firsts)

    def plan(self, step: StepView) -> list[CopyJob]:
        """Return stores of the chunks that this step completes and that were not offered yet; first those of ended requests."""
        requests = self._requests
        due, is_urgent = [], False
        for at, (request_id, num_tokens) in enumerate(step.num_scheduled_tokens.items()):
            state = requests[request_id]
            state.max_computed_tokens += num_tokens
            if state.max_computed_tokens >= state.due_tokens:  # few, while generating
                due.append(at)
                is_urgent |= state.is_awaited or state.due_tokens <= state.request.num_prompt_tokens
        if due and not is_urgent and self._may_wait(len(step.num_scheduled_tokens), len(due)):
            self._num_waited += 1
            due.clear()
        else:
            self._num_waited = 0
        jobs = self._pending.plan() if self._pending.pending else []
        if due:
            scheduled = step.scheduled
            jobs += self.plan_for([scheduled[at] for at in due])
        return jobs

    def _may_wait(self, num_requests: int, num_due: int) -> bool:
        """Whether generated chunks may wait for others, because one alone costs two or three times what it costs among many.

        They may if requests are so many that several chunks will come soon. Those of a request that ends meanwhile become
        pending stores.
        """
        num_to_come = num_requests * self._max_wait // self._chunk_tokens
        is_worth_it = num_to_come >= _SEVERAL and num_due < _MANY
        return is_worth_it and self._num_waited < self._max_wait and self._shared.keeps_ended

    def plan_for(self, shares: Sequence[ScheduledRequest]) -> list[CopyJob]:
        """Return the stores of ``plan`` for some requests' parts of a step."""
        unstored: list[Offer] = []
        requests = self._requests
        for share in shares:
            state = requests[share.request_id]
            num_computed = share.num_computed_tokens + share.num_scheduled_tokens
            state.max_computed_tokens = num_computed
            if num_computed < state.due_tokens:
                continue
            # Under asynchronous scheduling, num_computed may exceed the number of tokens that are known.
            num_tokens = min(num_computed, state.request.num_tokens, state.store_limit)
            if num_tokens >= state.due_tokens:
                state.extend_keys()
                tables = share.block_ids
                for group, keys in enumerate(state.keys):
                    first, end = state.next_chunk[group], min(num_tokens // keys.chunk_tokens, len(keys.keys))
                    if first < end:
                        # What a request waits for may end with this step.
                        unstored.append(Offer(state, group, tables[group], first, end, is_urgent=state.is_awaited))
        return self._store(unstored) if unstored else []

    def _store(self, offers: Sequence[Offer]) -> list[CopyJob]:
        """Return the store of complete chunks that were not offered before."""
        return self._offering.store(offers, self._shared.num_storable_chunks())

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """Release the store's blocks; let its chunks be found if they were copied."""
        end_store(self._shared, store, outcome)
        self._shared.holder.release(store.block_ids)
        if store.is_spoiled:  # only now that it has given up its slots can its chunks be stored again
            for request_id in store.request_ids & self._requests.keys():
                self._requests[request_id].offer_again_from(0)

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Remember the request's chunks that could not be stored yet."""
        self._pending.end_request(state, block_ids)

    def pause(self, states: Iterable[RequestState]) -> None:
        """Note that requests are paused, and that the device may lose all before they go on."""

    def end_step(self) -> None:
        """Note that the engine may have given back blocks in which it has found tails."""

    def give_up(self) -> None:
        """Let go of all pending stores."""
        self._pending.give_up()

    def _first_hole(self, keys: ChunkKeys, num_ready: int, num_computed_tokens: int) -> int | None:
        """Return the number of a group's first chunk that the device has and the tier lacks; ``None`` if there is none."""
        if self._offering.allowance <= 0:
            return None
        first, end = num_ready, num_computed_tokens // keys.chunk_tokens
        num_behind = keys.group.num_skipped_tokens(num_computed_tokens) // keys.chunk_tokens
        if first < num_behind:  # what a window has left behind is not on the device
            first = num_behind + len(self._shared.manager.lookup_run(keys.keys[num_behind:end]))
        return first if first < end else None

    def use_namespace(self) -> None:
        """Note that chunks have other keys from now on."""


MakeStores: TypeAlias = Callable[[Shared, Mapping[str, RequestState]], EagerStores]
"""Makes what decides which chunks are copied down, for the requests of a connector."""
