"""The offloading connector where prefixes may end inside a block; see ``cargohold.cache.tails``.

A prefix that ends in a tail is treated as if the tail were its last whole chunk, wherever chunks are counted: it is loaded,
fetched, pinned and written down like any other. Only three things differ: which tails there are is looked up behind the whole
chunks, the engine says when there is one to store, and its tokens are counted up to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from cargohold.cache.manager import OffloadKey, split_key
from cargohold.cache.rows import rows_to_store
from cargohold.cache.tails import longest_tail
from cargohold.connector.guests.lower_tiers import LowerTierGuest
from cargohold.connector.kernel.answers import KeptAnswers
from cargohold.connector.kernel.jobs import OffloadingMetadata, Store
from cargohold.connector.kernel.loads import Loads, TierLookup
from cargohold.connector.kernel.offers import start_store
from cargohold.connector.kernel.requests import Lookup, Offer, RequestState
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.protocol import BlockIds, KVConnectorMetadata, KVConnectorSchedulerOutput, StepView, Tail
from cargohold.tiers.scheduler_side import Wanted
from cargohold.transfer import CopyJob


@contextmanager
def _as_whole(state: RequestState, num_tokens: int) -> Iterator[int]:
    """Give a request the keys of a prefix of so many tokens whose tail counts as a whole chunk; yield its length then."""
    keys, size = state.keys, state.chunk_tokens
    if num_tokens % size:
        state.keys = tuple(of.cut(num_tokens) for of in keys)
    try:
        yield -(-num_tokens // size) * size
    finally:
        state.keys = keys


class TailLookup(TierLookup):
    """Looks requests up in a tier, and then for a tail behind what was found."""

    def _find(self, state: RequestState, num_computed_tokens: int, limit_tokens: int, basis: tuple[int, int]) -> Lookup:
        lookup = super()._find(state, num_computed_tokens, limit_tokens, basis)
        if lookup.undecided:
            return lookup
        end = longest_tail(state.keys, lookup.num_tokens, limit_tokens, self._manager.lookup)
        if not end:
            return lookup
        # The prefix cache keeps the tail of a load that ends where its request's own prompt leaves one.
        is_kept = self._shares_loads or self._shares_load_ends
        awaited = self._jobs.load_of_any([of.tail(end) for of in state.keys]) if is_kept else None
        if awaited is None:
            awaited = self._load_to_wait_for(state, num_computed_tokens, end)
        return lookup._replace(num_tokens=end, undecided=awaited is not None, awaited_job=awaited)


class TailLoads(Loads):
    """Plans loads that may end with a tail."""

    def plan(self, state: RequestState, blocks: BlockIds, lookup: Lookup, num_hit_tokens: int) -> Counter[str]:
        """See ``Loads.plan``."""
        # Others do not wait for a load that ends with a tail: the prefix cache keeps none but that of a request's own prompt.
        is_tail = num_hit_tokens % state.chunk_tokens > 0
        with _as_whole(state, num_hit_tokens):
            for keys in state.keys if is_tail else ():
                self._shared.manager.touch(keys.keys[-1:])  # nothing else counts as its use
            return super().plan(state, blocks, lookup._replace(shared_end=lookup.shared_end or is_tail), num_hit_tokens)


class TailAnswers(KeptAnswers):
    """Pins tails, too."""

    def _pin(self, state: RequestState, lookup: Lookup) -> None:
        with _as_whole(state, lookup.num_tokens) as num_tokens:
            super()._pin(state, lookup._replace(num_tokens=num_tokens))


class TailsBelow(LowerTierGuest):
    """Brings up tails from lower tiers, too, if it is known what these have, or all of them have an index."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.want = lambda *fields: self._prefetcher.planner.with_tail(Wanted(*fields)._replace(may_end_inside=True))

    def origins(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> bytes:
        """See ``Below.origins``."""
        whole = -(-num_hit_tokens // state.chunk_tokens) * state.chunk_tokens
        return super().origins(state, num_computed_tokens, whole)[: num_hit_tokens - num_computed_tokens]


class TailOffer(Offer):
    """The tail of a prompt in one group."""

    __slots__ = ()

    def __init__(self, state: RequestState, group: int, tail: Tail) -> None:
        at = tail.num_tokens // state.chunk_tokens
        super().__init__(state, group, (), at, at)
        self.keys, self.tail_end = [self.of_group.tail(tail.num_tokens)], tail.num_tokens
        self.parent = self.of_group.keys[at - 1] if at else None

    def parents(self) -> dict[OffloadKey, OffloadKey | None]:
        """See ``Offer.parents``."""
        return dict.fromkeys(self.keys, self.parent)


class TailedScheduler(OffloadingScheduler):
    """Also keeps what prompts leave inside a block."""

    _lookup_type, _loads_type, _answers_type, _below_type = TailLookup, TailLoads, TailAnswers, TailsBelow

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Return this step's loads and stores, those of tails among them."""
        meta = cast("OffloadingMetadata", super().build_connector_meta(step))
        stores = [job for tail in cast("Any", step).tails for job in self._store_tail(tail)]
        return replace(meta, stores=(*meta.stores, *stores)) if stores else meta

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """See ``KernelScheduler``; the engine has given back blocks that it held to copy tails out of them."""
        self.stores.end_step()
        return super().report_to_scheduler()

    def _store_tail(self, tail: Tail) -> Iterator[CopyJob]:
        """Yield the store of a tail, unless it is there, or stores hold too much: the engine shows it only once."""
        shared, state = self.shared, self.requests[tail.request_id]
        state.extend_keys()
        is_known = tail.num_tokens <= min(state.store_limit, state.request.num_prompt_tokens)
        if not is_known or shared.jobs.num_storable_chunks < len(tail.block_ids):
            return
        offers = [TailOffer(state, group, tail) for group in range(len(state.keys))]
        handle = shared.manager.prepare_stores(offers)
        if not handle.keys:
            handle.commit()
            return
        sources = [tail.block_ids[split_key(key)[1]] for key in handle.keys]
        block_ids, rows, groups = rows_to_store(sources, range(len(sources)), handle.keys, handle.slots, 1)
        shared.holder.hold(block_ids)
        store = Store(shared.jobs.new_id(), frozenset([tail.request_id]), handle, block_ids)
        shared.guests.store_begins(store, [offer for offer in offers if offer.keys[0] in store.keys])
        yield start_store(shared, store, rows, groups)
