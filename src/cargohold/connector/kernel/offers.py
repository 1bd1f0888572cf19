"""Which chunks a step offers for storing, where it has completed more than stores may hold.

Some groups keep all blocks of a request: their chunks can be offered in a later step as well. Of windows and states, the engine
frees blocks as the request goes on, and a later request needs all groups at the position where it goes on: an incomplete set of
windows serves no hit. So of these groups the latest chunks go first, across all of them; then come the other groups, from their
first chunk that is missing. What is there already, or on its way, is not copied, so it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import OffloadKey, SlotReservation
from cargohold.cache.rows import Places, rows_to_store
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer
from cargohold.connector.kernel.shared import Shared
from cargohold.protocol import NULL_BLOCK_ID, AttentionKind, KVCacheGroup, TransferOutcome
from cargohold.protocol.metrics import DEFERRED_STORES, FAILURES, PLANNED, PLANNED_BLOCKS, STORED, STORED_AGAIN
from cargohold.transfer import CopyJob, Direction

_DEFERRED: Final = DEFERRED_STORES.of()
_PLANNED, _PLANNED_BLOCKS = PLANNED.of("store"), PLANNED_BLOCKS.of("store")


def blocks_to_store(
    group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, first_chunk: int, end_chunk: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of the chunks in ``[first_chunk, end_chunk)`` that can be stored, and the ids of all their blocks.

    A chunk is left out if one of its blocks that a later request could need is null: its KV is gone. In a window group, blocks
    before the window of the chunk's last token are never needed, so they may be null; null blocks are not copied. A chunk is
    left out, too, if no window reaches it from a place where the engine goes on.
    """
    block_ids = table[first_chunk * blocks_per_chunk : end_chunk * blocks_per_chunk]
    chunk_tokens = group.block_tokens * blocks_per_chunk
    is_reached = group.kind is AttentionKind.FULL or chunk_tokens % group.hit_tokens == 0
    if is_reached and NULL_BLOCK_ID not in block_ids:
        return range(first_chunk, end_chunk), block_ids
    chunks: list[int] = []
    kept: list[int] = []
    for chunk in range(first_chunk, end_chunk):
        start, end = chunk * blocks_per_chunk, (chunk + 1) * blocks_per_chunk
        needed_from = group.num_skipped_tokens(end * group.block_tokens - 1) // group.block_tokens
        last_token = (chunk + 1) * chunk_tokens
        place = -(-last_token // group.hit_tokens) * group.hit_tokens
        if not is_reached and last_token <= min(group.num_skipped_tokens(place), place - 1):
            continue  # the last chunk before such a place says that something is kept there, even if no query reads it
        if NULL_BLOCK_ID not in table[max(start, needed_from) : end]:
            chunks.append(chunk)
            kept += table[start:end]
    return chunks, kept


class Offering:
    """Offers chunks to the manager, and starts the stores of those that it takes.

    Chunks that were not computed, because the device had them, are stored again if the tier has lost them: as many as it holds,
    and then no more than are computed. Otherwise a tier smaller than what is hot on the device would be written again by every
    request.

    Args:
        shared: the state that the connector's parts share.

    Attributes:
        allowance: how many chunks may be stored again.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.allowance = shared.manager.capacity

    def store(
        self,
        offers: Sequence[Offer],
        num_allowed: int,
        on_offered: Callable[[Sequence[Offer], AbstractSet[OffloadKey]], None] | None = None,
    ) -> list[CopyJob]:
        """Offer up to ``num_allowed`` chunks to the manager; return the job that copies those that it takes, if any.

        ``on_offered`` is called with what was offered, and what is to be offered again. Mutates the offers: each has the chunks
        that are stored in the end.
        """
        shared = self._shared
        self._choose(offers, num_allowed)
        for offer in offers:
            offer.level = shared.guests.worth(offer.state).level
        keys, jobs = list(chain.from_iterable([offer.keys for offer in offers])), list[CopyJob]()
        block_ids = list(chain.from_iterable([offer.block_ids for offer in offers]))
        if shared.device is not None:
            shared.note_on_device(keys, block_ids)
        if awaited := [offer for offer in offers if offer.state.is_awaited]:
            shared.consumer.chunks_offered(awaited)
        handle = shared.manager.prepare_stores(offers)
        self._note_offered(offers, handle)
        if on_offered is not None:
            on_offered(offers, frozenset(handle.deferred))
        elif len(keys) > len(handle.keys) and not handle.deferred:  # seldom: nearly always the manager takes all
            jobs = shared.checker.compare(offers, num_allowed - len(handle.keys))
        if not handle.keys:
            handle.commit()
            return jobs
        sources, rows, groups = self._places(block_ids, keys, handle)
        shared.holder.hold(sources)
        store = Store(shared.jobs.new_id(), frozenset(), handle, sources)
        taken = self._note_taken(offers, store.keys, len(keys))
        store.request_ids = frozenset([offer.state.request.request_id for offer in taken])
        shared.guests.store_begins(store, taken)
        return [start_store(shared, store, rows, groups), *jobs]

    def list_on_device(self, offers: Sequence[Offer]) -> bool:
        """List chunks that stay on the device for now. Each request goes on after them. Returns whether some were there."""
        shared = self._shared
        for offer in offers:
            self._offer(offer, offer.first, offer.end)
            offer.level = shared.guests.worth(offer.state).level
            offer.state.note_offered(offer.group, offer.end)
        keys = list(chain.from_iterable([offer.keys for offer in offers]))
        shared.note_on_device(keys, list(chain.from_iterable([offer.block_ids for offer in offers])))
        are_there = shared.manager.list_on_device(offers)
        shared.guests.chunks_listed(offers)
        return are_there

    # --- what to offer ------------------------------------------------------------------------------------------------

    def _choose(self, offers: Sequence[Offer], num_allowed: int) -> None:
        """Let each offer be of what is offered now, which may be nothing, if so many chunks may be stored."""
        num_left = num_allowed - sum([offer.end - offer.first for offer in offers])
        if num_left >= 0:  # nearly always
            for offer in offers:
                self._offer(offer, offer.first, offer.end)
            return
        urgent = [offer for offer in offers if offer.is_urgent]
        for offer in urgent:
            self._offer(offer, offer.first, offer.end)
        num_left = max(0, num_allowed - sum([offer.end - offer.first for offer in urgent]))
        num_left -= self._choose_latest([of for of in offers if not (of.is_urgent or of.keeps_blocks)], num_left)
        for offer in offers:
            if offer.keeps_blocks and not offer.is_urgent:
                first = self._first_missing(offer) if num_left else offer.first
                end = min(offer.end, first + num_left)
                self._offer(offer, first, end, rest=end)
                num_left -= end - first

    def _choose_latest(self, offers: Sequence[Offer], num_allowed: int) -> int:
        """Offer the latest chunks that are missing of all these; return how many they are."""
        if not num_allowed:
            for offer in offers:
                offer.rest = offer.first
            return 0
        missing = sorted(
            ((offer.end - chunk) * offer.of_group.chunk_tokens, at, chunk)
            for at, offer in enumerate(offers)
            for chunk in self._missing(offer)
        )
        first_of = {at: chunk for _, at, chunk in missing[:num_allowed]}
        rest_of = {at: chunk for _, at, chunk in missing[num_allowed:]}
        for at, offer in enumerate(offers):
            self._offer(offer, first_of.get(at, offer.end), offer.end, rest=rest_of.get(at, offer.end))
        return len(missing[:num_allowed])

    def _missing(self, offer: Offer) -> list[int]:
        """Return the numbers of the chunks that can be stored, are not there, and are not on their way."""
        chunks, _ = self._storable(offer, offer.first, offer.end)
        keys = [offer.of_group.keys[chunk] for chunk in chunks]
        found = zip(chunks, keys, self._shared.manager.lookup(keys), strict=True)
        return [chunk for chunk, key, state in found if state != READY and not self._shared.jobs.is_coming(key)]

    def _first_missing(self, offer: Offer) -> int:
        """Return the number of the first chunk that is not there, and not on its way."""
        keys, shared = offer.of_group.keys, self._shared
        first = offer.first + len(shared.manager.lookup_run(keys[offer.first : offer.end]))
        while first < offer.end and shared.jobs.is_coming(keys[first]):
            first += 1
        return first

    def _storable(self, offer: Offer, first: int, end: int) -> tuple[Sequence[int], Sequence[int]]:
        return blocks_to_store(offer.of_group.group, offer.table, self._shared.config.blocks_per_chunk, first, end)

    def _offer(self, offer: Offer, first: int, end: int, rest: int | None = None) -> None:
        """Offer those chunks in ``[first, end)`` that can be stored, and then go on with ``rest``, by default ``end``."""
        offer.take(first, end if rest is None else rest, *self._storable(offer, first, end))

    # --- what the manager takes ---------------------------------------------------------------------------------------

    def _note_offered(self, offers: Sequence[Offer], handle: SlotReservation) -> None:
        """Let each request go on after what was offered, or from the first chunk that is to be offered still, or again."""
        deferred = frozenset(handle.deferred)
        for offer in offers:
            next_chunk, again = offer.rest, deferred
            if offer.state.is_awaited:
                again = deferred | self._offered_again(offer, handle)
            if again:
                next_chunk = offer.next_chunk(again)
            self._shared.stats[_DEFERRED] += next_chunk < offer.end
            offer.state.note_offered(offer.group, next_chunk)

    def _offered_again(self, offer: Offer, handle: SlotReservation) -> AbstractSet[OffloadKey]:
        """Return the awaited chunks that found no slot, and are offered again."""
        shared = self._shared
        there = frozenset(handle.keys).union(*[store.keys for store in shared.jobs.stores()])
        rest = [key for key in offer.keys if key not in there]
        without = [key for key, state in zip(rest, shared.manager.lookup(rest), strict=True) if state != READY]
        return shared.consumer.offer_again(offer.state, without) if without else frozenset()

    def _places(self, block_ids: Sequence[int], keys: Sequence[OffloadKey], handle: SlotReservation) -> Places:
        """Return the device blocks of those of the keys that the manager takes, and the tier's rows for them."""
        per_chunk = self._shared.config.blocks_per_chunk
        starts: Sequence[int] = range(0, len(block_ids), per_chunk)
        if keys != handle.keys:
            start_of = dict(zip(keys, starts, strict=True))
            starts = [start_of[key] for key in handle.keys]
        return rows_to_store(block_ids, starts, handle.keys, handle.slots, per_chunk)

    def _note_taken(self, offers: Sequence[Offer], taken: AbstractSet[OffloadKey], num_offered: int) -> list[Offer]:
        """Count the chunks that the manager takes; return their offers, with these alone."""
        num_again = sum([offer.num_again(taken) for offer in offers])
        if len(taken) < num_offered:
            for offer in offers:
                offer.keys = [key for key in offer.keys if key in taken]
        num_computed = len(taken) - num_again
        self.allowance = min(self.allowance + num_computed - num_again, self._shared.manager.capacity)
        self._shared.stats[STORED_AGAIN] += num_again
        return [offer for offer in offers if offer.keys]


def start_store(
    shared: Shared,
    store: Store,
    rows: tuple[int, ...],
    groups: tuple[int, ...] = (),
    block_ids: tuple[int, ...] | None = None,
) -> CopyJob:
    """Add a store to the jobs in flight, and return the message that starts it.

    Its blocks must be held already; those in ``block_ids`` need not be, because the step does not begin before it has ended.
    """
    block_ids = store.block_ids if block_ids is None else block_ids
    shared.jobs.add_store(store)
    shared.stats[_PLANNED] += 1
    shared.stats[_PLANNED_BLOCKS] += len(block_ids)
    return CopyJob(store.job_id, Direction.STORE, block_ids, rows, shared.start_s, groups)


def end_store(shared: Shared, store: Store, outcome: TransferOutcome) -> None:
    """Let a store's chunks be found if they were copied; otherwise give their slots back."""
    if outcome is TransferOutcome.DONE and not store.is_spoiled:
        store.handle.commit()
        shared.stats[STORED.of(shared.tier)] += len(store.handle.keys)
        if shared.device is not None and not store.is_save:
            shared.manager.note_copies(store.handle.keys)
    else:
        store.handle.forfeit()
        shared.stats[FAILURES.of("store")] += 1
        if store.block_ids or store.is_save:  # it was not given up by order
            reason = "spoiled by a step that failed" if store.is_spoiled else outcome.name.lower()
            shared.failures.warning("a store of %d blocks in %s was %s", len(store.block_ids), shared.tier, reason)
