"""Look-ups and loads: how many tokens of a request the tier can give back, and their way to the device.

A load is planned when a request gets its blocks, and ended when all workers have reported.

A chunk is ``k = blocks_per_chunk`` consecutive blocks of one group. A tier has a slot per chunk; ``cache/rows.py`` tells which
of the tier's rows hold which block::

    blocks of the request    0   1 | 2   3 | 4   5 | 6          k = 2
    computed on the device   x   x   x |
    hit in the tier                  :   chunk 1, chunk 2       the first destination lies inside chunk 1
    destinations                     3 | 4   5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import lcm
from typing import Final

from cargohold.blocks import READY, GroupUnits, PrefixHit, longest_hit
from cargohold.cache.manager import ChunkKeys, ChunkStates, OffloadKey
from cargohold.cache.rows import rows_to_load
from cargohold.connector.kernel.jobs import Load, LoadJob
from cargohold.connector.kernel.requests import Lookup, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.errors import MissingChunkError
from cargohold.protocol import (
    NULL_BLOCK_ID,
    AttentionKind,
    BlockIds,
    KVConnectorOutput,
    Stats,
    TransferOutcome,
    metrics,
)
from cargohold.transfer import Direction

_PLANNED, _PLANNED_BLOCKS = metrics.PLANNED.of("load"), metrics.PLANNED_BLOCKS.of("load")
_COPIES: Final = {what: (metrics.COPIED_BLOCKS.of(what), metrics.COPY_SECONDS.of(what)) for what in ("load", "store")}


class TierLookup:
    """Looks requests up in a tier.

    Args:
        shared: what the scheduler side shares.
        shares_loads: whether blocks loaded for one request can be found by another, so that waiting for them pays.
        shares_load_ends: whether at least those are found with which another request can continue where the load ends.
        full_hits: whether a hit may cover all tokens of a request; see ``SchedulerEnvironment``.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        shares_loads: bool,
        shares_load_ends: bool,
        full_hits: bool,
    ) -> None:
        self._shared = shared
        self._manager = shared.manager
        self._jobs = shared.jobs
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
        below = self._shared.below
        if below.tiers and below.must_wait(state, num_computed_tokens, limit, None):
            return None
        lookup, basis = state.lookup, (self._manager.generation, self._jobs.version)
        # Many requests may wait for one load, while other jobs end in every step.
        if (
            lookup is None
            or (lookup.num_computed_tokens, lookup.num_request_tokens) != (num_computed_tokens, num_tokens)
            or (lookup.basis != basis and (lookup.awaited_job is None or not self._jobs.is_loading(lookup.awaited_job)))
        ):
            lookup = state.lookup = self._find(state, num_computed_tokens, limit, basis)
        if below.tiers and below.must_wait(state, num_computed_tokens, limit, lookup.num_tokens):
            return None
        return None if lookup.undecided else lookup.num_tokens

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
        full = [
            (keys, num_leading)
            for keys, num_leading in zip(state.keys, num_ready, strict=True)
            if keys.group.kind is AttentionKind.FULL
        ]
        for keys, num_leading in full:
            at = num_hit_tokens // keys.chunk_tokens
            if at < num_leading or at >= len(keys.keys):  # the group's chunks may be larger than others'
                continue
            key = keys.keys[at]
            if at == num_leading or self._manager.lookup([key]) != bytes([READY]):
                first_token = at * keys.chunk_tokens
                if where := self._whereabouts(key):
                    return f"because the chunk from token {first_token} on {where}"
                return (
                    f"because nothing of it is kept after token {first_token}"
                    if at
                    else "because nothing of it is kept"
                )
        reach = min((keys.chunk_tokens * num_leading for keys, num_leading in full), default=None)
        return self._what_windows_lack(state, num_hit_tokens, reach)

    def _what_windows_lack(self, state: RequestState, num_hit_tokens: int, num_full_tokens: int | None) -> str:
        """Return why windows and states end a hit, as the end of a sentence.

        Such a group needs only what is just before the end of a hit, but that as a whole. ``num_full_tokens`` is how far full
        attention's KV is kept; ``None`` if the model has none.
        """
        lacking = [keys for keys in state.keys if keys.group.kind is not AttentionKind.FULL]
        num_left = state.request.num_tokens - num_hit_tokens
        if not self._full_hits and num_left <= max((keys.chunk_tokens for keys in lacking), default=0):
            return "because the last token is recomputed, with the window or state that it needs"
        stored = {key for store in self._jobs.stores() for key in store.keys}
        if stored and any(
            key in stored for keys in lacking for key in keys.keys[num_hit_tokens // keys.chunk_tokens :]
        ):
            return f"because windows or states after token {num_hit_tokens} are still being stored"
        kinds = {keys.group.kind is AttentionKind.RECURRENT: keys.group.window_tokens for keys in lacking}
        what = " and ".join(
            "no recurrent state" if is_state else f"no whole window of {window} tokens"
            for is_state, window in kinds.items()
        )
        reach = "" if num_full_tokens is None else f"full attention is kept up to token {num_full_tokens}, but "
        return f"because {reach}{what} that ends after token {num_hit_tokens}"

    def _whereabouts(self, key: OffloadKey) -> str:
        """Return where a chunk is that host memory does not have, as the end of a sentence; empty if it is nowhere."""
        if any(key in store.keys for store in self._jobs.stores()):
            return "is still being stored"
        return self._shared.below.where_is(key)

    def _find(self, state: RequestState, num_computed_tokens: int, limit_tokens: int, basis: tuple[int, int]) -> Lookup:
        """Return what host memory has of a request."""
        state.extend_keys()
        num_tokens = state.request.num_tokens
        # An engine may hash a block only when it has some tokens after it.
        limit_tokens = min(limit_tokens, *[len(keys.keys) * keys.chunk_tokens for keys in state.keys])
        groups = [GroupUnits(keys.group, keys.chunk_tokens, ChunkStates(self._manager, keys)) for keys in state.keys]
        hit = longest_hit(groups, num_tokens, num_computed_tokens, limit_tokens)
        shared_end = _shared_end(groups, hit, num_tokens, num_computed_tokens) if len(groups) > 1 else 0
        # Not worth a transfer: less than one chunk beyond the computed tokens, or the last chunk of a request alone. Its last
        # token is computed again anyway, and the rest of a chunk in the same step takes no longer.
        least_tokens = state.chunk_tokens + (hit.num_tokens == num_tokens)
        if hit.num_tokens - num_computed_tokens < least_tokens:
            return Lookup(
                num_computed_tokens, hit.undecided, num_computed_tokens, num_tokens, basis, shared_end=shared_end
            )
        awaited = None
        if self._jobs.loading:
            awaited = self._load_to_wait_for(state, num_computed_tokens, hit.num_tokens)
        is_undecided = hit.undecided or awaited is not None
        return Lookup(hit.num_tokens, is_undecided, num_computed_tokens, num_tokens, basis, awaited, shared_end)

    def _load_to_wait_for(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> int | None:
        """Return the id of a load for another request, after which this one finds blocks of its hit on the device."""
        if self._shares_loads:
            return self._load_of_part(state, num_computed_tokens, num_hit_tokens)
        return self._load_of_start(state, num_computed_tokens, num_hit_tokens) if self._shares_load_ends else None

    def _load_of_start(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> int | None:
        """Return the id of a job that loads the hit for another request, or its beginning, and ends within it.

        Of any other load, windows and states before its end are not kept, so waiting for it would be useless. Nor is a hit of
        all tokens found again: the prefix cache gives back a block less, whose window begins before the one that was loaded.
        """
        limit = min(num_hit_tokens, state.request.num_tokens - 1)
        return self._jobs.load_up_to(state.keys, num_computed_tokens, limit)

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


def _shared_end(groups: Sequence[GroupUnits], hit: PrefixHit, num_tokens: int, num_computed_tokens: int) -> int:
    """Return how far the groups that keep all blocks are there, if the others are not there as far; else 0.

    It is a place where all groups have a whole chunk, and before the last token, which is computed in any case.
    """
    keeping = [units for units in groups if units.group.kind is AttentionKind.FULL]
    if not keeping or len(keeping) == len(groups):
        return 0
    unit_tokens = lcm(*[lcm(units.unit_tokens, units.group.hit_tokens) for units in groups])
    end = longest_hit(keeping, num_tokens, num_computed_tokens, num_tokens - 1).num_tokens // unit_tokens * unit_tokens
    return end if end > hit.num_tokens else 0


def blocks_to_load(
    table: Sequence[int], block_tokens: int, num_computed_tokens: int, num_hit_tokens: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return a group's blocks between the computed tokens and the end of the hit, without null blocks: numbers and ids.

    Args:
        table: block ids of the request in the group.
        block_tokens: tokens per block of the group.
        num_computed_tokens: number of leading tokens that are on the device.
        num_hit_tokens: number of leading tokens that will be on the device after the load.
    """
    numbers: Sequence[int] = range(num_computed_tokens // block_tokens, -(-num_hit_tokens // block_tokens))
    block_ids = table[numbers[0] : numbers[-1] + 1] if numbers else ()
    if NULL_BLOCK_ID in block_ids:
        numbers = [number for number in numbers if table[number] != NULL_BLOCK_ID]
        block_ids = [table[number] for number in numbers]
    return numbers, block_ids


# --- loads ------------------------------------------------------------------------------------------------------------

MAX_IN_STEP_S: Final = 0.02
"""Maximum number of seconds that a step waits for loads."""
IN_STEP_SHARE: Final = 0.25
"""Maximum share of the time that a step takes which it waits for loads."""


class Loads:
    """Plans loads, and handles their ends.

    Args:
        shared: what the scheduler side shares.
        requests: the requests, by id.

    Attributes:
        planned: the loads of this step.
    """

    def __init__(self, shared: Shared, requests: Mapping[str, RequestState]) -> None:
        self._shared = shared
        self._requests = requests
        self.planned: list[LoadJob] = []
        # Blocks that some worker reported as bad, of loads that have not ended on all workers.
        self._invalid_block_ids: set[int] = set()

    def plan(self, state: RequestState, blocks: BlockIds, lookup: Lookup, num_hit_tokens: int) -> Counter[str]:
        """Plan the load of the tokens between the computed ones and the end of the hit into the request's ``blocks``.

        Pins the chunks and holds the blocks until the load has ended. If some chunks are gone, the load fails on the workers.

        Returns:
            The number of tokens to be loaded, by the tier they came from.
        """
        shared, per_chunk = self._shared, self._shared.config.blocks_per_chunk
        num_computed_tokens = lookup.num_computed_tokens
        block_ids: list[int] = []
        keys_of_blocks: list[OffloadKey] = []
        starts: list[int] = []
        places: list[tuple[ChunkKeys, Sequence[int]]] = []
        for keys in state.keys:
            block_tokens, table = keys.group.block_tokens, blocks[keys.group.index]
            numbers, of_group = blocks_to_load(table, block_tokens, num_computed_tokens, num_hit_tokens)
            block_ids += of_group
            keys_of_blocks += [keys.keys[number // per_chunk] for number in numbers]
            starts += [number * block_tokens for number in numbers]
            places.append((keys, numbers))
        try:
            handle = shared.manager.prepare_load(list(dict.fromkeys(keys_of_blocks)))
        except MissingChunkError:  # the engine has taken its time since the look-up, and it could not be kept
            handle = shared.manager.prepare_load(())
        rows, groups = rows_to_load(handle, places, per_chunk)
        load = Load(
            shared.jobs.new_id(),
            state.request.request_id,
            handle,
            num_computed_tokens,
            tuple(block_ids),
            keys_of_blocks,
            starts,
            shared.below.origins(state, num_computed_tokens, num_hit_tokens),
            is_first=not state.was_admitted,
            is_in_step=state.loads_in_step,
            is_end_shared=not lookup.shared_end,
        )
        self._begin(load, rows, groups)
        return load.count(shared.tiers, len(load.origins))

    def _begin(self, load: Load, rows: tuple[int, ...], groups: tuple[int, ...]) -> None:
        shared = self._shared
        shared.holder.hold(load.block_ids)
        shared.jobs.add_load(load)
        copy = load.job_id, Direction.LOAD, load.block_ids, rows, shared.start_s, groups
        self.planned.append(LoadJob(*copy, request_id=load.request_id, is_in_step=load.is_in_step))
        shared.stats[_PLANNED] += 1
        shared.stats[metrics.LOADS_IN_STEP] += load.is_in_step
        shared.stats[_PLANNED_BLOCKS] += len(load.block_ids)

    def fits_in_step(self, num_blocks: int, step_s: float | None) -> bool:
        """Whether a step may wait for a load of so many blocks, because that hardly makes it longer.

        A load of which a later step learns that it has ended keeps its request waiting for a whole step, however short it is.

        Args:
            num_blocks: device blocks that it fills.
            step_s: seconds that the step takes at least without it; ``None`` if that is not known.
        """
        block_s = self._shared.block_s.get("load", self._shared.block_s.get("store"))
        in_step = [len(load.block_ids) for load in self.planned if load.is_in_step]
        # Behind another load it would have to wait for that one, which may be long, or stuck.
        if block_s is None or step_s is None or self._shared.jobs.num_loads > len(in_step):
            return False
        return block_s * (num_blocks + sum(in_step)) <= min(MAX_IN_STEP_S, IN_STEP_SHARE * step_s)

    def note_copied(self, stats: Stats) -> None:
        """Learn from workers' counters how long their copies took."""
        for what, (blocks, seconds) in _COPIES.items():
            if num_blocks := stats.get(blocks):
                block_s = stats[seconds] / num_blocks
                before = self._shared.block_s.get(what, block_s)
                self._shared.block_s[what] = before + 0.2 * (block_s - before)

    def note_invalid(self, block_ids: frozenset[int]) -> None:
        """Remember blocks that some worker could not fill. Blocks of no load in flight are another connector's: ignored."""
        for load in self._shared.jobs.loads():
            self._invalid_block_ids |= block_ids.intersection(load.block_ids)

    def end_given_up(self, load: Load, outcome: TransferOutcome) -> None:
        """Release the pins and blocks of a load that its request has not waited for. Chunks that may be bad are removed."""
        is_told_which = not self._invalid_block_ids.isdisjoint(load.block_ids)
        bad_blocks = self._take_bad_blocks(load, are_all=outcome is TransferOutcome.FAILED and not is_told_which)
        load.handle.release(_keys_of(load, bad_blocks))
        self._shared.holder.release(load.block_ids)

    def end(self, load: Load, outcome: TransferOutcome, output: KVConnectorOutput) -> None:
        """Release the load's pins and blocks. Chunks that could not be read are removed: they are misses from now on."""
        bad_blocks = self._take_bad_blocks(
            load, are_all=outcome is TransferOutcome.FAILED and load.request_id in output.failed_recving
        )
        bad_keys = _keys_of(load, bad_blocks)
        load.handle.release(bad_keys)
        self._shared.holder.release(load.block_ids)
        if not bad_blocks and outcome is TransferOutcome.DONE and self._shared.device is not None:
            self._shared.note_on_device(load.block_keys, load.block_ids)
        num_restored = len(load.origins)
        if outcome is not TransferOutcome.DONE or bad_blocks or load.request_id in output.failed_recving:
            num_restored = self._num_usable_tokens(load, bad_blocks, output)
            self._note_failure(load, outcome, bad_keys, num_restored)
        self._note_restored(load, num_restored)

    def _take_bad_blocks(self, load: Load, *, are_all: bool) -> set[int]:
        """Return the blocks of a load that were reported as invalid, or all of them; forget the reports."""
        bad_blocks = self._invalid_block_ids.intersection(load.block_ids)
        self._invalid_block_ids -= bad_blocks
        return set(load.block_ids) if are_all else bad_blocks

    def _num_usable_tokens(self, load: Load, bad_blocks: AbstractSet[int], output: KVConnectorOutput) -> int:
        """Return how many leading tokens of a load that failed the engine uses nevertheless."""
        is_whole = not bad_blocks or load.is_in_step or load.request_id in output.failed_recving
        if is_whole or not self._shared.keeps_partial_loads:
            return 0
        starts = zip(load.block_ids, load.block_starts, strict=True)
        first_bad = min(start for block_id, start in starts if block_id in bad_blocks)
        return max(0, first_bad - load.num_computed_tokens)

    def _note_restored(self, load: Load, num_tokens: int) -> None:
        tiers = self._shared.tiers
        counts = load.count(tiers, num_tokens)
        if load.is_first:
            self._shared.stats.add({metrics.PROMPT.of(tier): count for tier, count in counts.items()})
        state = self._requests.get(load.request_id)
        if state is not None and num_tokens:
            first, known = load.num_computed_tokens, state.restored
            new = load.count(tiers, num_tokens, range(known.start - first, known.stop - first))
            state.restored_tokens.update(new)
            end = first + num_tokens
            state.restored = range(min(first, known.start), max(end, known.stop)) if known else range(first, end)

    def _note_failure(self, load: Load, outcome: TransferOutcome, bad_keys: set[OffloadKey], num_kept: int) -> None:
        tier = self._shared.tier
        self._shared.stats[metrics.FAILURES.of("load")] += 1
        too_late = outcome is TransferOutcome.ABANDONED
        reason = "came too late" if too_late else f"failed: {len(bad_keys)} of {len(load.handle.keys)} chunks are bad"
        if not load.handle.keys:
            reason = "failed: its chunks were evicted before the engine had blocks for it"
        self._shared.failures.warning("a load of %d blocks from %s %s", len(load.block_ids), tier, reason)
        state = self._requests.get(load.request_id)
        if state is not None:
            num_lost = len(load.origins) - num_kept
            state.notes.append(f"the load from {tier} {reason}; {num_lost} tokens are computed instead")
            state.offer_again_from(load.num_computed_tokens)


def _keys_of(load: Load, blocks: AbstractSet[int]) -> set[OffloadKey]:
    """Return the chunks of a load that fill some of these blocks; none if it has read nothing."""
    if not load.handle.keys:
        return set()
    return {key for block_id, key in zip(load.block_ids, load.block_keys, strict=True) if block_id in blocks}
