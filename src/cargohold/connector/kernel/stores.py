"""Stores: decides which chunks to copy down, and when they can be found.

``EagerStores`` copies every chunk in the step that completes it. What a step offers where it has completed more than stores may
hold is chosen in ``offers``; ``PendingStores`` has what ended requests have left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self, TypeAlias

from cargohold.cache.manager import ChunkKeys, OffloadKey
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.offers import Offering, end_store
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.deadlines import HOLD, Deadline, HoldTime
from cargohold.protocol import NULL_BLOCK_ID, BlockIds, ScheduledRequest, SchedulerContext, StepView, TransferOutcome
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
        return self._offering.store(offers, self._shared.jobs.num_storable_chunks)

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


# --- chunks that were not stored yet when their request ended ----------------------------------------------------------


_FEW_PART: Final = 2
"""Part of what stores may hold that blocks of ended requests may be which wait for a slot."""
MAX_PENDING_STORES: Final = 256
"""Maximum number of ended requests remembered; beyond it, those that ended first are forgotten."""


@dataclass(slots=True)
class PendingStore:
    """An ended request with chunks that were not offered for storing.

    Attributes:
        state: the request; its ``next_chunk`` says which chunks come next.
        tables: its block tables when it ended.
        contents: per group, what each block held then, beginning with the first chunk not offered.
        starts: per group, the number of the block that the first entry of ``contents`` is about.
        held: blocks that are held because their KV must not be lost.
        held_until: until when they are held.
    """

    state: RequestState
    tables: tuple[tuple[int, ...], ...]
    contents: tuple[list[Hashable], ...]
    starts: tuple[int, ...]
    held: tuple[int, ...] = ()
    held_until: Deadline | None = None

    @classmethod
    def of(cls, state: RequestState, tables: BlockIds, num_tokens: int, context: SchedulerContext) -> Self | None:
        """Return what a request has left within its first ``num_tokens`` tokens; ``None`` if its blocks are unknown."""
        starts, contents = [], []
        for keys, first, table in zip(state.keys, state.next_chunk, tables, strict=True):
            per_chunk = keys.chunk_tokens // keys.group.block_tokens
            end = min(num_tokens // keys.chunk_tokens, len(keys.keys)) * per_chunk
            starts.append(first * per_chunk)
            contents.append(_contents(table[first * per_chunk : end], context))
        if not any(contents):
            return None
        return cls(state, tuple(tuple(table) for table in tables), tuple(contents), tuple(starts))

    def known_blocks(self) -> tuple[int, ...]:
        """Return the blocks of the chunks not offered yet whose contents are known."""
        known = zip(self.tables, self.starts, self.contents, strict=True)
        blocks = chain.from_iterable(table[start : start + len(contents)] for table, start, contents in known)
        return tuple([block_id for block_id in blocks if block_id != NULL_BLOCK_ID])

    def unstored(self, blocks_per_chunk: int, context: SchedulerContext, limit: int) -> list[Offer]:
        """Return the chunks of each group not offered yet whose blocks still hold the same KV.

        Where the engine keeps all blocks, these are the chunks before the first that does not, and ``limit`` at most.
        """
        found = []
        for group, (table, contents, start) in enumerate(zip(self.tables, self.contents, self.starts, strict=True)):
            first = self.state.next_chunk[group]
            each = Offer(self.state, group, table, first, max(first, (start + len(contents)) // blocks_per_chunk))
            if first * blocks_per_chunk < start:
                each.end = first  # to be offered again; ``contents`` has nothing about their blocks
            elif each.keeps_blocks:
                each.end = self._num_kept(each, blocks_per_chunk, context, limit)
            else:
                blocks = table[start : start + len(contents)]
                now = zip(blocks, context.contents(blocks), contents, strict=True)
                kept = [block_id if content == before else NULL_BLOCK_ID for block_id, content, before in now]
                each.table = (*table[:start], *kept)
            found.append(each)
        return found

    def forget_latest(self, offered: Sequence[Offer], deferred: AbstractSet[OffloadKey]) -> None:
        """Forget the latest windows and states that were offered, except deferred ones, so that each is offered once.

        A tier with room for few of them would evict some for others, and lack those from then on.
        """
        for offer in offered:
            if not offer.keeps_blocks and deferred.isdisjoint(offer.keys):
                first_block = offer.first * offer.of_group.chunk_tokens // offer.of_group.group.block_tokens
                del self.contents[offer.group][max(0, first_block - self.starts[offer.group]) :]

    def _num_kept(self, each: Offer, blocks_per_chunk: int, context: SchedulerContext, limit: int) -> int:
        number, end = each.first * blocks_per_chunk, min(each.end, each.first + limit) * blocks_per_chunk
        before = self.contents[each.group][number - self.starts[each.group] :]
        for content, content_before in zip(context.contents(each.table[number:end]), before, strict=False):
            if content != content_before:
                break
            number += 1
        return number // blocks_per_chunk


class PendingStores:
    """Ended requests whose chunks are still to be offered, the one that ended first in front.

    While a request runs, chunks that cannot be stored now are offered again in the next step. A request may end before that:
    one with a long prompt and a short answer often does, because stores may hold only a part of the device pool. Its blocks are
    free then, but until they are reused the device's prefix cache still knows what they hold. So pending stores hold no blocks;
    their chunks are offered as long as the blocks still hold the same KV.

    Blocks of chunks that must not be lost are held until they are stored; for no longer than ``HoldTime`` has it, and no more
    than stores may hold.

    Args:
        shared: the state that the connector's parts share.
        offering: offers chunks.

    Attributes:
        pending: what they have left.
    """

    def __init__(self, shared: Shared, offering: Offering) -> None:
        self._shared = shared
        self._offering = offering
        self._hold_time = HoldTime(shared.clock, HOLD.seconds(shared.config.restore_timeout_s))
        self.pending: deque[PendingStore] = deque()

    @property
    def has_pending_work(self) -> bool:
        """Whether chunks are still to be offered. They may wait for ever for what stuck copies hold."""
        return bool(self.pending) and (not self._shared.jobs.num_stuck or bool(self.held_blocks))

    @property
    def held_blocks(self) -> Sequence[int]:
        """Blocks that are held."""
        return tuple(chain.from_iterable(pending.held for pending in self.pending))

    def among(self, wanted: set[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are still to be offered."""
        found: set[OffloadKey] = set()
        for pending in self.pending:
            for of_group, at in zip(pending.state.keys, pending.state.next_chunk, strict=True):
                found |= wanted.intersection(of_group.keys[at:])
        return found

    def end_request(self, state: RequestState, tables: BlockIds) -> None:
        """Remember the chunks that could not be stored yet, if the context can tell later what their blocks hold."""
        num_tokens = min(state.request.num_tokens, state.max_computed_tokens, state.store_limit)
        pending = None
        if self._shared.context is not None and any(tables) and num_tokens >= state.due_tokens:
            pending = PendingStore.of(state, tables, num_tokens, self._shared.context)
        if pending is None:
            self._shared.consumer.stores_abandoned(state)
            return
        self.pending.append(pending)
        self._hold(pending)
        if len(self.pending) > MAX_PENDING_STORES:
            self._let_go(self.pending.popleft())

    def _hold(self, pending: PendingStore) -> None:
        """Hold the blocks of chunks that are not stored yet, if they must be, or are few: for lack of a slot, for a moment.

        Without that, the ends of answers are lost while host memory is full of what others fetch and write.
        """
        shared, state, blocks = self._shared, pending.state, pending.known_blocks()
        num_blocks = len(blocks) + sum([len(other.held) for other in self.pending])
        if (
            num_blocks <= shared.jobs.max_store_blocks // _FEW_PART
            or state.is_awaited
            or shared.guests.worth(state).must_keep
        ):
            if num_blocks > shared.jobs.max_store_blocks:
                state.notes.append(
                    "its last chunks may be lost: max_inflight_fraction lets stores hold no more device blocks"
                )
                shared.consumer.stores_abandoned(state)
                return
            shared.holder.hold(blocks)
            pending.held, pending.held_until = blocks, self._hold_time.deadline()

    def _let_go(self, pending: PendingStore) -> None:
        """Release what is held for a request that has ended."""
        held, pending.held, pending.held_until = pending.held, (), None
        self._shared.holder.release(held)
        self._shared.consumer.stores_abandoned(pending.state)

    def give_up(self) -> None:
        """Let go of all of them."""
        while self.pending:
            self._let_go(self.pending.popleft())

    def plan(self) -> list[CopyJob]:
        """Return pending stores, as far as stores may hold their blocks. To be called in every step while there are any."""
        self._hold_time.note_step()
        jobs: list[CopyJob] = []
        assert self._shared.context is not None, "without it there are none"
        for pending in self.pending:  # all of them, even if stuck copies leave no room for any store
            if pending.held_until is not None and self._hold_time.has_passed(pending.held_until):
                self._let_go(pending)
        for pending in tuple(self.pending):
            # Look no further than what can be stored now: all of them together may be as long as the device pool.
            limit = self._shared.jobs.num_storable_chunks
            if not limit:
                break
            unstored = pending.unstored(self._shared.config.blocks_per_chunk, self._shared.context, limit)
            jobs += self._offering.store(unstored, limit, pending.forget_latest)
            is_all = all(each.end - each.first < limit or not each.keeps_blocks for each in unstored)
            if is_all and all(pending.state.next_chunk[each.group] >= each.end for each in unstored):
                self.pending.remove(pending)
                self._let_go(pending)
        return jobs


def _contents(block_ids: Sequence[int], context: SchedulerContext) -> list[Hashable]:
    """Return what blocks hold, up to the first that is neither in the prefix cache nor the null block."""
    contents = list(context.contents(block_ids))
    for at, (block_id, prefix) in enumerate(zip(block_ids, context.prefixes_of(contents), strict=True)):
        if block_id != NULL_BLOCK_ID and prefix is None:
            return contents[:at]
    return contents
