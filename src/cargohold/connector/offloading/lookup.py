"""Look-ups: how many tokens of a request the tier can give back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cargohold.blocks import READY, GroupUnits, longest_hit
from cargohold.cache.manager import OffloadManager
from cargohold.connector.offloading.events import TierEvents
from cargohold.connector.offloading.jobs import JobTable
from cargohold.connector.offloading.requests import Lookup, RequestState
from cargohold.tiers.scheduler_side import HostStates, Prefetcher, Wanted


class TierLookup:
    """Looks requests up in a tier.

    Args:
        manager: the manager of the tier; with lower tiers, that of host memory alone.
        jobs: transfers in flight.
        shares_loads: whether blocks loaded for one request can be found by another, so that waiting for them pays.
        shares_load_ends: whether at least those are found with which another request can continue where the load ends.
        full_hits: whether a hit may cover all tokens of a request; see ``SchedulerEnvironment``.
        prefetcher: fetches chunks from lower tiers first; ``None`` if there are no lower tiers.
        events: KV events of all tiers; ``None`` if nobody listens.
    """

    def __init__(
        self,
        manager: OffloadManager,
        jobs: JobTable,
        *,
        shares_loads: bool,
        shares_load_ends: bool,
        full_hits: bool,
        prefetcher: Prefetcher | None = None,
        events: TierEvents | None = None,
    ) -> None:
        self._manager = manager
        self._prefetcher = prefetcher
        self._events = events
        self._jobs = jobs
        self._shares_loads = shares_loads
        self._shares_load_ends = shares_load_ends
        self._full_hits = full_hits

    def find(self, state: RequestState, num_computed_tokens: int) -> int | None:
        """Return the length in tokens of the longest usable prefix of a request, or ``None`` for "not yet".

        What host memory has is kept in ``state``, and returned again while nothing has changed.
        """
        num_tokens = state.request.num_tokens
        limit = num_tokens if self._full_hits else num_tokens - 1
        if state.params.max_load_tokens is not None:
            limit = min(limit, num_computed_tokens + state.params.max_load_tokens)
        wanted = None
        if self._prefetcher is not None:
            wanted = Wanted(state.keys, num_tokens, num_computed_tokens, limit, state.tenant)
            if state.waiting is not None and state.waiting.has_expired:
                state.waiting = None
                state.notes.append(
                    "the engine had no place for the request for so long that lower tiers were asked anew"
                )
            if state.waiting is not None and state.waiting.num_announced:
                # The first request of an engine waits before a worker has said what the engine's namespace is.
                state.waiting.num_announced = self._num_announced(state)
            if self._prefetcher.must_wait(state.waiting, wanted):
                return None
        lookup, basis = state.lookup, (self._manager.generation, self._jobs.version)
        # Many requests may wait for one load, while other jobs end in every step.
        if (
            lookup is None
            or not lookup.is_of(num_computed_tokens, num_tokens)
            or (lookup.basis != basis and not self._jobs.is_loading(lookup.awaited_job))
        ):
            lookup = state.lookup = self._find(state, num_computed_tokens, limit, basis)
        may_have_more = limit - lookup.num_tokens >= state.chunk_tokens
        if self._prefetcher is not None and wanted is not None and state.waiting is None and may_have_more:
            num_announced, events = self._num_announced(state), self._events
            if events is None:
                state.waiting = self._prefetcher.begin(wanted, state.notes, num_announced)
            else:
                on_ask = partial(events.note_wanted, state.request, state.keys)
                state.waiting = self._prefetcher.begin(wanted, state.notes, num_announced, on_ask)
            if state.waiting.must_wait:
                return None
        return None if lookup.undecided else lookup.num_tokens

    def _num_announced(self, state: RequestState) -> int:
        """Return how many leading tokens another engine has announced that this one can use; note it if that is none."""
        handoff = state.params.handoff
        if handoff is None or self._prefetcher is None:
            return 0
        difference = handoff.difference(self._prefetcher.namespace)
        if difference:
            state.notes.append(
                f"what was announced was computed by an engine that differs in its {difference}, so it cannot be used here"
            )
        return 0 if difference else handoff.num_tokens

    def why_no_more(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> str:
        """Return why no more than ``num_hit_tokens`` leading tokens of a request were found, as the end of a sentence.

        ``num_ready`` is the number of its leading chunks that the tier has, per group.
        """
        num_left, max_load = state.request.num_tokens - num_hit_tokens, state.params.max_load_tokens
        if num_left < state.chunk_tokens:
            return f"less than a chunk of {state.chunk_tokens}"
        if max_load is not None and num_hit_tokens + state.chunk_tokens > num_computed_tokens + max_load:
            return f"because the request allows {max_load} to be loaded"
        for keys, num_leading in zip(state.keys, num_ready, strict=True):
            at = num_hit_tokens // keys.chunk_tokens
            if at < num_leading or at >= len(keys.keys):  # the group's chunks may be larger than others'
                continue
            key = keys.keys[at]
            if at == num_leading or self._manager.lookup([key]) != bytes([READY]):
                first_token = at * keys.chunk_tokens
                if any(key in store.keys for store in self._jobs.stores()):
                    return f"because the chunk from token {first_token} on is still being stored"
                return f"because the chunk from token {first_token} on is not there"
        return "because chunks that later windows reach back to are not there"

    def _find(self, state: RequestState, num_computed_tokens: int, limit_tokens: int, basis: tuple[int, int]) -> Lookup:
        """Return what host memory has of a request."""
        state.extend_keys()
        num_tokens = state.request.num_tokens
        hit = longest_hit(
            [GroupUnits(keys.group, keys.chunk_tokens, HostStates(self._manager, keys)) for keys in state.keys],
            num_tokens,
            num_computed_tokens,
            limit_tokens,
        )
        if hit.num_tokens - num_computed_tokens < state.chunk_tokens:
            # Not worth a transfer: less than one chunk beyond the computed tokens.
            return Lookup(num_computed_tokens, hit.undecided, num_computed_tokens, num_tokens, basis)
        awaited = self._load_to_wait_for(state, num_computed_tokens, hit.num_tokens)
        is_undecided = hit.undecided or awaited is not None
        return Lookup(hit.num_tokens, is_undecided, num_computed_tokens, num_tokens, basis, awaited)

    def _load_to_wait_for(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> int | None:
        """Return the id of a load for another request, after which this one finds blocks of its hit on the device."""
        if self._shares_loads:
            return self._load_of_part(state, num_computed_tokens, num_hit_tokens)
        return self._load_of_whole(state, num_hit_tokens) if self._shares_load_ends else None

    def _load_of_whole(self, state: RequestState, num_hit_tokens: int) -> int | None:
        """Return the id of a job that loads the same prefix for another request, and ends where the hit ends.

        Of any other load, windows and states before its end are not kept, so waiting for it would be in vain. Nor is a hit of
        all tokens found again: the prefix cache gives back a block less, whose window begins before the one that was loaded.
        """
        if num_hit_tokens == state.request.num_tokens:
            return None
        last_keys = [keys.keys[num_hit_tokens // keys.chunk_tokens - 1] for keys in state.keys]
        return self._jobs.load_up_to(num_hit_tokens, last_keys)

    def _load_of_part(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> int | None:
        """Return the id of a job that loads part of the hit for another request: the prefix cache will soon have its blocks.

        The prefix cache gives back no block that has the last token, because its logits must be computed. So each request
        loads that block for itself.
        """
        num_shared_tokens = min(num_hit_tokens, state.request.num_tokens - 1)
        parts = (
            keys.keys[num_computed_tokens // keys.chunk_tokens : num_shared_tokens // keys.chunk_tokens]
            for keys in state.keys
        )
        return next((job for part in parts if (job := self._jobs.load_of_any(part)) is not None), None)
