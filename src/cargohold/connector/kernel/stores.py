"""Stores: decides which chunks to copy down, and when they can be found.

``StorePlanner`` is the port; ``EagerStores`` copies every chunk in the step that completes it.

Leftovers: chunks that were not stored yet when their request ended.

While a request runs, chunks that cannot be stored now are offered again in the next step. A request may end before that: one
with a long prompt and a short answer often does, because stores may hold only a part of the device pool. Its blocks are free
then, but until they are reused the device's prefix cache still knows what they hold. So leftovers hold no blocks; their chunks
are offered as long as the blocks still hold the same KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol, TypeAlias

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkKeys, OffloadKey, StoreHandle
from cargohold.connector.kernel.guest import Part
from cargohold.connector.kernel.jobs import Store, StoreJob
from cargohold.connector.kernel.loads import rows_to_store
from cargohold.connector.kernel.offers import Chooser, Offer, Unstored
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.deadlines import Deadline, HoldTime
from cargohold.protocol import NULL_BLOCK_ID, BlockIds, ScheduledRequest, SchedulerContext, StepView, TransferOutcome
from cargohold.protocol.metrics import DEFERRED_STORES, FAILURES, PLANNED, PLANNED_BLOCKS, STORED, STORED_AGAIN

_SEVERAL: Final = 4
_FEW_PART: Final = 2
"""Part of what stores may hold that blocks of ended requests may be which wait for a slot."""
_MANY: Final = 16
"""So many chunks are worth waiting for, and so many do not wait for others."""

MAX_LEFTOVERS: Final = 256
"""Maximum number of ended requests remembered; beyond it, those that ended first are forgotten."""

_BlockContent: TypeAlias = tuple[bytes, int | None] | None


@dataclass(slots=True)
class Leftover:
    """An ended request with chunks that were not offered for storing.

    Attributes:
        state: the request; its ``next_chunk`` says which chunks come next.
        tables: its block tables when it ended.
        contents: per group, the block hash and group that each block held then, beginning with the first chunk not offered.
        starts: per group, the number of the block that the first entry of ``contents`` is about.
        held: blocks that are held because their KV must not be lost.
        held_until: until when they are held.
    """

    state: RequestState
    tables: tuple[tuple[int, ...], ...]
    contents: tuple[list[_BlockContent], ...]
    starts: tuple[int, ...]
    held: tuple[int, ...] = ()
    held_until: Deadline | None = None

    def known_blocks(self) -> tuple[int, ...]:
        """Return the blocks of the chunks not offered yet whose contents are known."""
        known = zip(self.tables, self.starts, self.contents, strict=True)
        blocks = chain.from_iterable(table[start : start + len(contents)] for table, start, contents in known)
        return tuple(block_id for block_id in blocks if block_id != NULL_BLOCK_ID)

    def unstored(self, blocks_per_chunk: int, context: SchedulerContext, limit: int) -> list[Unstored]:
        """Return the chunks of each group not offered yet whose blocks still hold the same KV.

        Where the engine keeps all blocks, these are the chunks before the first that does not, and ``limit`` at most.
        """
        found = []
        for group, (table, contents, start) in enumerate(zip(self.tables, self.contents, self.starts, strict=True)):
            first = self.state.next_chunk[group]
            each = Unstored(self.state, group, table, first, max(first, (start + len(contents)) // blocks_per_chunk))
            if first * blocks_per_chunk < start:
                each = each._replace(end=first)  # to be offered again; ``contents`` has nothing about their blocks
            elif each.keeps_blocks:
                each = each._replace(end=self._num_kept(each, blocks_per_chunk, context, limit))
            else:
                kept = [
                    block_id if _content_of(block_id, context) == content else NULL_BLOCK_ID
                    for block_id, content in zip(table[start:], contents, strict=False)
                ]
                each = each._replace(table=(*table[:start], *kept))
            found.append(each)
        return found

    def forget_latest(self, offered: Sequence[Offer], deferred: AbstractSet[OffloadKey], blocks_per_chunk: int) -> None:
        """Forget the latest windows and states that were offered, but for deferred ones, so that each is offered once.

        A tier with room for few of them would evict some for others, and lack those from then on.
        """
        for offer in offered:
            if not offer.of.keeps_blocks and deferred.isdisjoint(offer.keys):
                del self.contents[offer.group][max(0, offer.first * blocks_per_chunk - self.starts[offer.group]) :]

    def _num_kept(self, each: Unstored, blocks_per_chunk: int, context: SchedulerContext, limit: int) -> int:
        contents, start = self.contents[each.group], self.starts[each.group]
        number, end = each.first * blocks_per_chunk, min(each.end, each.first + limit) * blocks_per_chunk
        while number < end and _content_of(each.table[number], context) == contents[number - start]:
            number += 1
        return number // blocks_per_chunk


class Leftovers:
    """Ended requests whose chunks are still to be offered, the one that ended first in front."""

    def __init__(self) -> None:
        self._leftovers: deque[Leftover] = deque()

    def __len__(self) -> int:
        return len(self._leftovers)

    def __iter__(self) -> Iterator[Leftover]:
        return iter(tuple(self._leftovers))

    @property
    def num_held(self) -> int:
        """Number of blocks that are held."""
        return sum([len(leftover.held) for leftover in self._leftovers])

    def add(self, state: RequestState, tables: BlockIds, num_tokens: int, context: SchedulerContext) -> Leftover | None:
        """Remember a request that ended, if the prefix cache knows some of its unstored blocks; return what is remembered.

        Only chunks within its first ``num_tokens`` tokens are remembered.
        """
        state.extend_keys()
        starts, contents = [], []
        for keys, first, table in zip(state.keys, state.next_chunk, tables, strict=True):
            per_chunk = keys.chunk_tokens // keys.group.block_tokens
            end = min(num_tokens // keys.chunk_tokens, len(keys.keys)) * per_chunk
            starts.append(first * per_chunk)
            contents.append(_contents(table[first * per_chunk : end], context))
        if not any(contents):
            return None
        leftover = Leftover(state, tuple(tuple(table) for table in tables), tuple(contents), tuple(starts))
        self._leftovers.append(leftover)
        return leftover

    def pop_surplus(self) -> Leftover | None:
        """Forget and return the request that ended first, if more than ``MAX_LEFTOVERS`` are remembered."""
        return self._leftovers.popleft() if len(self._leftovers) > MAX_LEFTOVERS else None

    def remove(self, leftover: Leftover) -> None:
        """Forget a request of which no chunk is left to be offered."""
        self._leftovers.remove(leftover)


def _contents(block_ids: Sequence[int], context: SchedulerContext) -> list[_BlockContent]:
    """Return what blocks hold, up to the first that is not in the prefix cache; ``None`` for null blocks."""
    contents: list[_BlockContent] = []
    for block_id in block_ids:
        held = _content_of(block_id, context)
        if held is None and block_id != NULL_BLOCK_ID:
            break
        contents.append(held)
    return contents


def _content_of(block_id: int, context: SchedulerContext) -> _BlockContent:
    block = context.get_block(block_id)
    return None if block.block_hash is None else (block.block_hash, block.group_id)


# --- stores -----------------------------------------------------------------------------------------------------------


class StorePlanner(Protocol):
    """Decides which chunks are copied down in a step."""

    def note_blocks(self, state: RequestState, block_ids: BlockIds) -> None:
        """Learn which blocks a request has got, before it is in a step. Another connector may fill them."""
        ...

    def begin_request(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> None:
        """Learn that a request is admitted.

        Args:
            state: the request.
            num_ready: number of its leading chunks that the tier has, per group.
            num_computed_tokens: number of its leading tokens that are on the device.
            num_hit_tokens: number of its leading tokens that are on the device, or are loaded now.
        """
        ...

    def plan(self, step: StepView) -> Iterator[StoreJob]:
        """Yield the stores to start after this step's forward pass."""
        ...

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """End a store that all workers have ended: release its blocks; let its chunks be found if they were copied."""
        ...

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Learn that a request ended; its blocks may be free from now on."""
        ...

    def coming(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are being stored, or that a request which has ended has left to be stored."""
        ...

    @property
    def has_pending_work(self) -> bool:
        """Whether stores are to be planned although no request runs."""
        ...

    @property
    def held_blocks(self) -> Sequence[int]:
        """Blocks of ended requests that are held until their KV is stored; see ``EagerStores``."""
        ...

    @property
    def stores_free_blocks(self) -> bool:
        """Whether it stores blocks that no request holds any more."""
        ...


MakeStores: TypeAlias = Callable[[Shared, Mapping[str, RequestState]], StorePlanner]
"""Makes a ``StorePlanner`` for the requests of a connector."""


class EagerStores:
    """Stores chunks as they are computed. All chunks that a step completes go in one job, of whichever requests they are.

    Chunks that were not computed, because the device had them, are stored again if the tier has lost them: as many as it holds,
    and then no more than are computed. Otherwise a tier smaller than what is hot on the device would be written anew by every
    request.

    A request may end before all of its chunks are stored, and its blocks may be reused at once. Those of chunks that must not
    be lost are held until they are stored; for no longer than ``HoldTime`` has it, and no more than stores may hold.

    Args:
        shared: the state that the connector's parts share.
        requests: the connector's requests, by id.
    """

    stores_free_blocks = False

    def __init__(self, shared: Shared, requests: Mapping[str, RequestState]) -> None:
        self._shared = shared
        self._requests = requests
        self._leftovers = Leftovers()
        self._hold_time = HoldTime(shared.clock, shared.config.restore_timeout_s)
        self._chooser = Chooser(shared.manager, shared.config.blocks_per_chunk, shared.jobs.is_coming)
        # How many chunks may be stored again.
        self._allowance = shared.manager.capacity
        # After as many steps as a chunk has tokens, every request has one to store.
        self._chunk_tokens = shared.layout.groups[0].block_tokens * shared.config.blocks_per_chunk
        self._max_wait = min(shared.config.store_within_steps, self._chunk_tokens)
        self._num_waited = 0

    @property
    def has_pending_work(self) -> bool:
        """Whether chunks of ended requests are still to be offered. They may wait for ever for what stuck copies hold."""
        return len(self._leftovers) > 0 and (not self._shared.jobs.num_stuck or self._leftovers.num_held > 0)

    @property
    def held_blocks(self) -> Sequence[int]:
        """Blocks that are held for leftovers."""
        return tuple(chain.from_iterable(leftover.held for leftover in self._leftovers))

    def coming(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are in a store, or in leftovers."""
        wanted = set(keys)
        coming = {key for key in keys if self._shared.jobs.is_coming(key)}
        for leftover in self._leftovers:
            for of_group, at in zip(leftover.state.keys, leftover.state.next_chunk, strict=True):
                coming |= wanted.intersection(of_group.keys[at:])
        return coming

    def note_blocks(self, state: RequestState, block_ids: BlockIds) -> None:
        """Do nothing with the blocks, of which each step tells. How many of the tokens are computed by now is to be asked."""
        state.max_computed_tokens = state.request.num_tokens

    def begin_request(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> None:
        """Offer from the first chunk on that the device has and the tier lacks, or else behind the hit."""
        if state.is_awaited:
            return
        state.hit_tokens = num_hit_tokens
        firsts = []
        for keys, num_leading in zip(state.keys, num_ready, strict=True):
            first = self._first_hole(keys, num_leading, num_computed_tokens) if self._allowance > 0 else None
            firsts.append(num_hit_tokens // keys.chunk_tokens if first is None else first)
        state.offer_from(firsts)

    def plan(self, step: StepView) -> Iterator[StoreJob]:
        """Yield stores of the chunks that this step completes and that were not offered yet; first those of ended requests."""
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
            return self.plan_for(())
        self._num_waited = 0
        scheduled = step.scheduled
        return self.plan_for([scheduled[at] for at in due])

    def _may_wait(self, num_requests: int, num_due: int) -> bool:
        """Whether generated chunks may wait for others, because one alone costs two or three times what it costs among many.

        They may if requests are so many that several chunks will come soon. Those of a request that ends meanwhile become
        leftovers.
        """
        num_to_come = num_requests * self._max_wait // self._chunk_tokens
        is_worth_it = num_to_come >= _SEVERAL and num_due < _MANY
        return is_worth_it and self._num_waited < self._max_wait and self._shared.keeps_ended

    def plan_for(self, shares: Sequence[ScheduledRequest]) -> Iterator[StoreJob]:
        """Yield the stores of ``plan`` for some requests' parts of a step. To be called once in every step."""
        self._hold_time.note_step()
        if self._leftovers:
            yield from self._plan_leftovers()
        unstored: list[Unstored] = []
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
                        # What somebody waits for may end with this step.
                        unstored.append(Unstored(state, group, tables[group], first, end, state.is_awaited))
        if unstored:
            yield from self._store(self._chooser.choose(unstored, self._shared.num_storable_chunks()))

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """Release the store's blocks; let its chunks be found if they were copied."""
        end_store(self._shared, store, outcome)
        self._shared.holder.release(store.block_ids)
        if store.is_spoiled:  # only now that it has given up its slots can its chunks be stored again
            for request_id in store.request_ids & self._requests.keys():
                self._requests[request_id].offer_again_from(0)

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Remember the request's chunks that could not be stored yet, if the context can tell later what their blocks hold."""
        context, num_tokens = self._shared.context, min(state.request.num_tokens, state.store_limit)
        leftover = None
        if context is not None and any(block_ids) and num_tokens >= state.due_tokens:
            leftover = self._leftovers.add(state, block_ids, num_tokens, context)
        if leftover is None:
            self._shared.guests.unstored_let_go(state)
        elif self._must_keep(state) or self._are_few(leftover):
            self._hold(leftover)
        while (surplus := self._leftovers.pop_surplus()) is not None:
            self._let_go(surplus)

    def _are_few(self, leftover: Leftover) -> bool:
        """Whether a request's chunks without a slot are so few that their blocks are held: for lack of a slot, for a moment.

        Without that, the ends of answers are lost while host memory is full of what others fetch and write.
        """
        num_blocks = len(leftover.known_blocks()) + self._leftovers.num_held
        return num_blocks <= self._shared.max_store_blocks // _FEW_PART

    def _must_keep(self, state: RequestState) -> bool:
        return state.is_awaited or self._shared.guests.worth(state).must_keep

    def _hold(self, leftover: Leftover) -> None:
        """Hold the blocks of chunks that are not stored yet, until they are, if stores may hold so many."""
        shared, blocks = self._shared, leftover.known_blocks()
        if len(blocks) + self._leftovers.num_held > shared.max_store_blocks:
            if self._must_keep(leftover.state):
                leftover.state.notes.append("stores may hold too few blocks to keep what was not stored at its end")
            shared.guests.unstored_let_go(leftover.state)
            return
        shared.holder.hold(blocks)
        leftover.held, leftover.held_until = blocks, self._hold_time.deadline()

    def _let_go(self, leftover: Leftover) -> None:
        """Release what is held for a request that has ended."""
        held, leftover.held, leftover.held_until = leftover.held, (), None
        self._shared.holder.release(held)
        self._shared.guests.unstored_let_go(leftover.state)

    def _first_hole(self, keys: ChunkKeys, num_ready: int, num_computed_tokens: int) -> int | None:
        """Return the number of a group's first chunk that the device has and the tier lacks; ``None`` if there is none."""
        first, end = num_ready, num_computed_tokens // keys.chunk_tokens
        num_behind = keys.group.num_skipped_tokens(num_computed_tokens) // keys.chunk_tokens
        if first < num_behind:  # what a window has left behind is not on the device
            first = num_behind + len(self._shared.manager.lookup_run(keys.keys[num_behind:end]))
        return first if first < end else None

    def _plan_leftovers(self) -> Iterator[StoreJob]:
        assert self._shared.context is not None, "without it there are none"
        for leftover in self._leftovers:  # all of them, even if stuck copies leave no room for any store
            if leftover.held_until is not None and self._hold_time.has_passed(leftover.held_until):
                self._let_go(leftover)
        for leftover in self._leftovers:
            # Look no further than what can be stored now: all leftovers together may be as long as the device pool.
            limit = self._shared.num_storable_chunks()
            if not limit:
                return
            unstored = leftover.unstored(self._shared.config.blocks_per_chunk, self._shared.context, limit)
            yield from self._store(self._chooser.choose(unstored, limit), leftover)
            is_all = all(each.end - each.first < limit or not each.keeps_blocks for each in unstored)
            if is_all and all(leftover.state.next_chunk[each.group] >= each.end for each in unstored):
                self._leftovers.remove(leftover)
                self._let_go(leftover)

    def _store(self, offered: Sequence[Offer], leftover: Leftover | None = None) -> Iterator[StoreJob]:
        """Offer chunks to the manager; yield one job that copies those that it takes, as one step completes all of them."""
        if not offered:
            return
        shared = self._shared
        if awaited := [offer.part(offer.keys) for offer in offered if offer.state.is_awaited]:
            shared.guests.chunks_offered(awaited)
        handle = shared.manager.prepare_stores(
            [offer.for_manager(shared.guests.worth(offer.state).level) for offer in offered if offer.keys]
        )
        self._note_offered(offered, handle)
        if leftover is not None:
            leftover.forget_latest(offered, frozenset(handle.deferred), shared.config.blocks_per_chunk)
        if not handle.keys:
            handle.commit()
            return
        block_ids, rows = self._places(offered, handle)
        shared.holder.hold(block_ids)
        store = Store(shared.jobs.new_id(), frozenset(), handle, block_ids)
        parts = self._note_taken(offered, store.keys)
        store.request_ids = frozenset(part.state.request.request_id for part in parts)
        shared.guests.store_begins(store, parts)
        yield start_store(shared, store, rows)

    def _offered_again(self, offer: Offer, handle: StoreHandle) -> AbstractSet[OffloadKey]:
        """Return the chunks that found no slot, and are offered again because somebody waits for them."""
        shared = self._shared
        if not offer.state.is_awaited:
            return frozenset()
        there = frozenset(handle.keys).union(*[store.keys for store in shared.jobs.stores()])
        rest = [key for key in offer.keys if key not in there]
        without = [key for key, state in zip(rest, shared.manager.lookup(rest), strict=True) if state != READY]
        return shared.guests.offer_again(offer.part(without)) if without else frozenset()

    def _note_offered(self, offered: Sequence[Offer], handle: StoreHandle) -> None:
        """Let each request go on behind what was offered, or from the first chunk that is to be offered still, or again."""
        deferred = frozenset(handle.deferred)
        for offer in offered:
            next_chunk = offer.next_chunk(deferred | self._offered_again(offer, handle))
            self._shared.stats[DEFERRED_STORES.of()] += next_chunk < offer.of.end
            offer.state.note_offered(offer.group, next_chunk)

    def _places(self, offered: Sequence[Offer], handle: StoreHandle) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the device blocks of the chunks that the manager takes, and the tier's rows for them, in parallel."""
        per_chunk = self._shared.config.blocks_per_chunk
        block_ids = list(chain.from_iterable([offer.blocks.block_ids for offer in offered]))
        keys = list(chain.from_iterable([offer.keys for offer in offered]))
        starts: Sequence[int] = range(0, len(block_ids), per_chunk)
        if keys != handle.keys:  # seldom: nearly always the manager takes all
            start_of = dict(zip(keys, starts, strict=True))
            starts = [start_of[key] for key in handle.keys]
        return rows_to_store(block_ids, starts, handle.slots, per_chunk)

    def _note_taken(self, offered: Sequence[Offer], taken: AbstractSet[OffloadKey]) -> list[Part]:
        """Count the chunks that the manager takes; return of which requests they are."""
        parts: list[Part] = []
        num_again = 0
        takes_all = len(taken) == sum([len(offer.keys) for offer in offered])
        for offer in offered:
            if taken.isdisjoint(offer.keys):
                continue
            num_again += offer.num_again(taken)
            stored = offer.keys if takes_all else [key for key in offer.keys if key in taken]
            parts.append(offer.part(stored))
        num_computed = len(taken) - num_again
        self._allowance = min(self._allowance + num_computed - num_again, self._shared.manager.capacity)
        self._shared.stats[STORED_AGAIN] += num_again
        return parts


class NoStores:
    """Stores nothing, for ``read_only``. Satisfies ``StorePlanner``."""

    has_pending_work = False
    held_blocks = ()
    stores_free_blocks = False

    def coming(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return none of them."""
        return frozenset()

    def note_blocks(self, state: RequestState, block_ids: BlockIds) -> None:
        """Do nothing."""

    def begin_request(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> None:
        """Do nothing."""

    def plan(self, step: StepView) -> Iterator[StoreJob]:
        """Yield nothing."""
        return iter(())

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """Do nothing: there are no stores."""

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """Do nothing."""


def start_store(shared: Shared, store: Store, rows: tuple[int, ...]) -> StoreJob:
    """Add a store to the jobs in flight, and return the message that starts it. Its blocks must be held already."""
    shared.jobs.add_store(store)
    shared.stats[PLANNED.of("store")] += 1
    shared.stats[PLANNED_BLOCKS.of("store")] += len(store.block_ids)
    return StoreJob(store.job_id, store.block_ids, rows, shared.config.transfer_timeout_s)


def end_store(shared: Shared, store: Store, outcome: TransferOutcome) -> None:
    """Let a store's chunks be found if they were copied; otherwise give their slots back."""
    if outcome is TransferOutcome.DONE and not store.is_spoiled:
        store.handle.commit()
        shared.stats[STORED.of(shared.tier)] += len(store.handle.keys)
    else:
        store.handle.forfeit()
        shared.stats[FAILURES.of("store")] += 1
        reason = "spoiled by a step that failed" if store.is_spoiled else outcome.name.lower()
        shared.failures.warning("a store of %d blocks in %s was %s", len(store.block_ids), shared.tier, reason)
