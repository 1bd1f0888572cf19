"""Which chunks a step offers for storing, where it has completed more than stores may hold.

Some groups keep all blocks of a request: their chunks can be offered in a later step as well. Of windows and states, the engine
frees blocks as the request goes on, and a later request needs all groups at the position where it goes on: an incomplete set of
windows serves no hit. So of these groups the latest chunks go first, across all of them; then come the other groups, from their
first chunk that is missing. What is there already, or on its way, is not copied, so it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkKeys, OffloadKey, OffloadManager, StoreHandle, StoreOffer
from cargohold.cache.rows import Places, rows_to_store
from cargohold.connector.kernel.guest import Part
from cargohold.connector.kernel.jobs import Store, StoreJob
from cargohold.connector.kernel.loads import BlocksToStore, blocks_to_store
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.deadlines import START
from cargohold.protocol import AttentionKind, TransferOutcome
from cargohold.protocol.metrics import DEFERRED_STORES, FAILURES, PLANNED, PLANNED_BLOCKS, STORED, STORED_AGAIN


class Unstored(NamedTuple):
    """Chunks of one request in one group that are complete and were not offered yet.

    Attributes:
        state: the request.
        group: index of the group.
        table: block ids of the request in the group; null where the KV is gone.
        first: number of the first of them.
        end: number of the chunk to stop before.
        is_urgent: whether they are offered whatever stores may hold.
    """

    state: RequestState
    group: int
    table: Sequence[int]
    first: int
    end: int
    is_urgent: bool = False

    @property
    def keys(self) -> ChunkKeys:
        """The request's chunks in the group."""
        return self.state.keys[self.group]

    @property
    def keeps_blocks(self) -> bool:
        """Whether the engine keeps their blocks as long as the request runs."""
        return self.keys.group.kind is AttentionKind.FULL


@dataclass(slots=True)
class Offer:
    """Chunks of one request in one group that are offered to the manager for storing.

    Attributes:
        of: what it is a part of.
        first: number of the first chunk that is offered.
        rest: number of the chunk to go on with: all before it are offered now, or were before.
        blocks: the chunks that can be stored, in prefix order, and their blocks.
        keys: the offload key of each of these chunks.
    """

    of: Unstored
    first: int
    rest: int
    blocks: BlocksToStore
    keys: Sequence[OffloadKey]

    @property
    def state(self) -> RequestState:
        """The request."""
        return self.of.state

    @property
    def group(self) -> int:
        """Index of the group."""
        return self.of.group

    def part(self, keys: Sequence[OffloadKey]) -> Part:
        """Return some of these chunks in the form in which guests are told of them."""
        return Part(self.state, self.group, keys, self.first)

    def for_manager(self, level: int) -> StoreOffer:
        """Return the offer in the form that managers take, at a level."""
        index = self.blocks.chunks[0] if self.keys else 0
        parent = self.state.keys[self.group].keys[index - 1] if index else None
        return StoreOffer(self.keys, parent, self.state.tenant, level)

    def num_again(self, keys: AbstractSet[OffloadKey]) -> int:
        """Return how many of these chunks were not computed for the request, because they were on the device."""
        num_hit = self.state.hit_tokens // self.state.keys[self.group].chunk_tokens
        if self.first >= num_hit:
            return 0
        return sum(key in keys for chunk, key in zip(self.blocks.chunks, self.keys, strict=True) if chunk < num_hit)

    def next_chunk(self, deferred: AbstractSet[OffloadKey]) -> int:
        """Return the number of the chunk to offer next: ``rest``, or the first that is in ``deferred`` before it."""
        if deferred:
            for chunk, key in zip(self.blocks.chunks, self.keys, strict=True):
                if key in deferred:
                    return min(chunk, self.rest)
        return self.rest


class Chooser:
    """Chooses what to offer.

    Args:
        manager: tells what is there.
        blocks_per_chunk: blocks per chunk.
        is_coming: tells whether a chunk is being stored.
    """

    def __init__(self, manager: OffloadManager, blocks_per_chunk: int, is_coming: Callable[[OffloadKey], bool]) -> None:
        self._manager = manager
        self._blocks_per_chunk = blocks_per_chunk
        self._is_coming = is_coming

    def choose(self, unstored: Sequence[Unstored], num_allowed: int) -> list[Offer]:
        """Return what to offer of each now, which may be nothing, if so many chunks may be stored."""
        if sum([each.end - each.first for each in unstored]) <= num_allowed:
            return [self._offer(each, each.first, each.end, each.end) for each in unstored]  # nearly always
        offers = [self._offer(each, each.first, each.end, each.end) for each in unstored if each.is_urgent]
        num_left = max(0, num_allowed - sum([each.end - each.first for each in unstored if each.is_urgent]))
        others = [each for each in unstored if not each.is_urgent]
        if not num_left:
            return [*offers, *(self._offer(each, each.first, each.first, each.first) for each in others)]
        latest, num_chosen = self._latest([each for each in others if not each.keeps_blocks], num_left)
        offers += latest
        num_left -= num_chosen
        for each in others:
            if each.keeps_blocks:
                first = self._first_missing(each)
                end = min(each.end, first + num_left)
                offers.append(self._offer(each, first, end, end))
                num_left -= end - first
        return offers

    def _latest(self, unstored: Sequence[Unstored], num_allowed: int) -> tuple[list[Offer], int]:
        """Offer the latest chunks that are missing of all these; return how many these are, too."""
        missing = sorted(
            ((each.end - chunk) * each.keys.chunk_tokens, at, chunk)
            for at, each in enumerate(unstored)
            for chunk in self._missing(each)
        )
        first_of = {at: chunk for _, at, chunk in missing[:num_allowed]}
        rest_of = {at: chunk for _, at, chunk in missing[num_allowed:]}
        offers = [
            self._offer(each, first_of.get(at, each.end), each.end, rest_of.get(at, each.end))
            for at, each in enumerate(unstored)
        ]
        return offers, len(missing[:num_allowed])

    def _missing(self, each: Unstored) -> list[int]:
        """Return the numbers of the chunks that can be stored, are not there, and are not on their way."""
        chunks = blocks_to_store(each.keys.group, each.table, self._blocks_per_chunk, each.first, each.end).chunks
        keys = [each.keys.keys[chunk] for chunk in chunks]
        found = zip(chunks, keys, self._manager.lookup(keys), strict=True)
        return [chunk for chunk, key, state in found if state != READY and not self._is_coming(key)]

    def _first_missing(self, each: Unstored) -> int:
        """Return the number of the first chunk that is not there, and not on its way."""
        keys = each.keys.keys
        first = each.first + len(self._manager.lookup_run(keys[each.first : each.end]))
        while first < each.end and self._is_coming(keys[first]):
            first += 1
        return first

    def _offer(self, of: Unstored, first: int, end: int, rest: int) -> Offer:
        """Return the offer of those chunks in ``[first, end)`` that can be stored."""
        blocks = blocks_to_store(of.keys.group, of.table, self._blocks_per_chunk, first, end)
        whole = of.keys.keys[first:end]
        keys = whole if len(blocks.chunks) == len(whole) else [of.keys.keys[chunk] for chunk in blocks.chunks]
        return Offer(of, first, rest, blocks, keys)


class Offering:
    """Offers chunks to the manager, and starts the stores of those that it takes.

    Chunks that were not computed, because the device had them, are stored again if the tier has lost them: as many as it holds,
    and then no more than are computed. Otherwise a tier smaller than what is hot on the device would be written anew by every
    request.

    Args:
        shared: the state that the connector's parts share.

    Attributes:
        allowance: how many chunks may be stored again.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._chooser = Chooser(shared.manager, shared.config.blocks_per_chunk, shared.jobs.is_coming)
        self.allowance = shared.manager.capacity

    def store(
        self,
        unstored: Sequence[Unstored],
        num_allowed: int,
        on_offered: Callable[[Sequence[Offer], AbstractSet[OffloadKey]], None] | None = None,
    ) -> Iterator[StoreJob]:
        """Offer up to ``num_allowed`` chunks to the manager; yield one job that copies those that it takes.

        ``on_offered`` is called with what was offered, and what is to be offered again.
        """
        offered, shared = self._chooser.choose(unstored, num_allowed), self._shared
        if awaited := [offer.part(offer.keys) for offer in offered if offer.state.is_awaited]:
            shared.guests.chunks_offered(awaited)
        handle = shared.manager.prepare_stores(
            [offer.for_manager(shared.guests.worth(offer.state).level) for offer in offered if offer.keys]
        )
        self._note_offered(offered, handle)
        if on_offered is not None:
            on_offered(offered, frozenset(handle.deferred))
        if not handle.keys:
            handle.commit()
            return
        places = self._places(offered, handle)
        shared.holder.hold(places.block_ids)
        store = Store(shared.jobs.new_id(), frozenset(), handle, places.block_ids)
        parts = self._note_taken(offered, store.keys)
        store.request_ids = frozenset(part.state.request.request_id for part in parts)
        shared.guests.store_begins(store, parts)
        yield start_store(shared, store, places)

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

    def _places(self, offered: Sequence[Offer], handle: StoreHandle) -> Places:
        """Return the device blocks of the chunks that the manager takes, and the tier's rows for them."""
        per_chunk = self._shared.config.blocks_per_chunk
        block_ids = list(chain.from_iterable([offer.blocks.block_ids for offer in offered]))
        keys = list(chain.from_iterable([offer.keys for offer in offered]))
        starts: Sequence[int] = range(0, len(block_ids), per_chunk)
        if keys != handle.keys:  # seldom: nearly always the manager takes all
            start_of = dict(zip(keys, starts, strict=True))
            starts = [start_of[key] for key in handle.keys]
        return rows_to_store(block_ids, starts, handle.keys, handle.slots, per_chunk)

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
        self.allowance = min(self.allowance + num_computed - num_again, self._shared.manager.capacity)
        self._shared.stats[STORED_AGAIN] += num_again
        return parts


def start_store(shared: Shared, store: Store, places: Places) -> StoreJob:
    """Add a store to the jobs in flight, and return the message that starts it. Its blocks must be held already."""
    shared.jobs.add_store(store)
    shared.stats[PLANNED.of("store")] += 1
    shared.stats[PLANNED_BLOCKS.of("store")] += len(store.block_ids)
    timeout_s = START.seconds(shared.config.transfer_timeout_s)
    return StoreJob(store.job_id, store.block_ids, places.rows, timeout_s, places.groups)


def end_store(shared: Shared, store: Store, outcome: TransferOutcome) -> None:
    """Let a store's chunks be found if they were copied; otherwise give their slots back."""
    if outcome is TransferOutcome.DONE and not store.is_spoiled:
        store.handle.commit()
        shared.stats[STORED.of(shared.tier)] += len(store.handle.keys)
    else:
        store.handle.forfeit()
        shared.stats[FAILURES.of("store")] += 1
        if store.block_ids:  # it was not given up by order
            reason = "spoiled by a step that failed" if store.is_spoiled else outcome.name.lower()
            shared.failures.warning("a store of %d blocks in %s was %s", len(store.block_ids), shared.tier, reason)
