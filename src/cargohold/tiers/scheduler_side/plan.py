"""What is worth fetching from lower tiers: presence of chunks over all tiers, and plans. Nothing here has effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, MutableSequence, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from cargohold.blocks import ABSENT, NOT_YET, READY, GroupUnits, PrefixHit, longest_hit
from cargohold.cache.manager import ChunkKeys, ChunkStates, OffloadKey, OffloadManager
from cargohold.cache.tails import longest_tail
from cargohold.pace import StepPace
from cargohold.tiers.scheduler_side.fetches import Chain
from cargohold.tiers.scheduler_side.lower_tiers import LowerTiers
from cargohold.tiers.scheduler_side.tier_state import UNKNOWN

_UNREAD: Final = 255
_AT_ONCE: Final = 512
"""Chunks looked up before it is known whether those after them matter: a prompt has thousands."""
_ABSENT = bytes([ABSENT])
_UNKNOWN_IS_NOT_YET = bytes.maketrans(bytes([UNKNOWN]), bytes([NOT_YET]))


class Wanted(NamedTuple):
    """A prefix that a caller wants in host memory: a request, or another caller that knows its keys.

    Attributes:
        keys: the prompt's chunks, per group.
        num_tokens: number of tokens of the prompt.
        num_computed_tokens: number of leading tokens that are on the device and need no load.
        limit_tokens: maximum number of leading tokens that are wanted, computed tokens included.
        tenant: whose chunks they will be in host memory, for quotas.
        tails: tails that tiers are to be asked for if they are asked for chunks; see ``cargohold.cache.tails``.
        may_end_inside: whether it may end with a tail, which is still to be looked for.
    """

    keys: Sequence[ChunkKeys]
    num_tokens: int
    num_computed_tokens: int
    limit_tokens: int
    tenant: str | None = None
    tails: Sequence[OffloadKey] = ()
    may_end_inside: bool = False

    def needed(self, keys: ChunkKeys, num_hit_tokens: int) -> range:
        """Return the numbers of the chunks of one group that a hit of so many tokens needs: of windows, the last ones."""
        next_query = min(num_hit_tokens, self.num_tokens - 1)
        first_token = max(self.num_computed_tokens, keys.group.num_skipped_tokens(next_query))
        end = num_hit_tokens // keys.chunk_tokens
        return range(min(first_token // keys.chunk_tokens, end), end)

    def needed_keys(self, num_hit_tokens: int) -> list[OffloadKey]:
        """Return the chunks of all groups that a load of the tokens between the computed ones and the hit's end reads."""
        return [keys.keys[at] for keys in self.keys for at in self.needed(keys, num_hit_tokens)]


class FetchPlan(NamedTuple):
    """What to fetch.

    Attributes:
        num_tokens: number of leading tokens that host memory then has, computed tokens included.
        chains: the chunks to fetch.
        first_tokens: for each tier that chunks are fetched from, the first token that one of them stands for.
        load_s: estimated seconds that takes; 0 if that is not known.
    """

    num_tokens: int
    chains: Sequence[Chain]
    first_tokens: Mapping[int, int]
    load_s: float


# --- presence of chunks in one group; these implement ``cargohold.blocks.UnitStates`` ---------------------------------


class DeepStates:
    """Presence in host memory or any tier below.

    Args:
        host: the manager of host memory.
        lower: the tiers below.
        keys: the chunks.
        unknown: mutated: chunks are added that a lower tier must be asked for first. They count as "not yet".
        skipped: indices of tiers that are not to be asked.
    """

    def __init__(
        self,
        host: OffloadManager,
        lower: LowerTiers,
        keys: ChunkKeys,
        unknown: list[OffloadKey],
        skipped: Container[int] = (),
    ) -> None:
        self._host = host
        self._lower = lower
        self._skipped = skipped
        self._keys = keys.keys
        self._unknown = unknown

    def run(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``, up to the first absent one."""
        states = b""
        while (at := first + len(states)) < end:
            part_end = min(at + _AT_ONCE, end)
            found = self._states(at, part_end).partition(_ABSENT)[0]
            states += found
            if len(found) < part_end - at:
                break
        return self._named(first, states)

    def window(self, first: int, end: int) -> bytes:
        return self._named(first, self._states(first, end))

    def _states(self, first: int, end: int) -> bytes:
        keys = self._keys[first:end]
        states = self._host.lookup(keys)
        num_absent = states.count(ABSENT)
        if num_absent == len(keys):
            return self._lower.lookup(keys, skipped=self._skipped)
        if not num_absent:
            return states
        absent = [key for key, state in zip(keys, states, strict=True) if state == ABSENT]
        below = iter(self._lower.lookup(absent, skipped=self._skipped))
        return bytes([next(below) if state == ABSENT else state for state in states])

    def _named(self, first: int, states: bytes) -> bytes:
        """Name the chunks that tiers must be asked for, and say "not yet" of them."""
        if UNKNOWN in states:
            self._unknown += [key for key, state in zip(self._keys[first:], states, strict=False) if state == UNKNOWN]
        return states.translate(_UNKNOWN_IS_NOT_YET)


# --- plans ------------------------------------------------------------------------------------------------------------


class FetchPlanner:
    """Plans what is worth fetching. It only reads.

    Args:
        host: the manager of host memory.
        lower: the tiers below it.
        pace: predicts how long computing takes; ``None`` to fetch whatever there is, even if computing may be faster.

    Attributes:
        pace: as given.
    """

    def __init__(self, host: OffloadManager, lower: LowerTiers, pace: StepPace | None) -> None:
        self._host = host
        self._lower = lower
        self.pace = pace

    def host_hit(self, wanted: Wanted, limit_tokens: int) -> int:
        """Return how many leading tokens host memory can give back without a lower tier, computed tokens included."""
        groups = [GroupUnits(keys.group, keys.chunk_tokens, ChunkStates(self._host, keys)) for keys in wanted.keys]
        return longest_hit(groups, wanted.num_tokens, wanted.num_computed_tokens, limit_tokens).num_tokens

    def deep_hit(
        self, wanted: Wanted, limit_tokens: int, unknown: list[OffloadKey], skipped: Container[int]
    ) -> PrefixHit:
        """Return the longest prefix that all tiers together have. Adds chunks that tiers must be asked for to ``unknown``."""
        groups = [
            GroupUnits(keys.group, keys.chunk_tokens, DeepStates(self._host, self._lower, keys, unknown, skipped))
            for keys in wanted.keys
        ]
        hit = longest_hit(groups, wanted.num_tokens, wanted.num_computed_tokens, limit_tokens)
        if hit.undecided and wanted.tails:
            states = self._lower.lookup(wanted.tails, skipped=skipped)
            unknown += [key for key, state in zip(wanted.tails, states, strict=True) if state == UNKNOWN]
        return hit

    def with_tail(self, wanted: Wanted) -> Wanted:
        """Return what is wanted as if it ended with a tail that there is; until that is known, with the tails to ask for."""
        keys, size, unit = wanted.keys, wanted.keys[0].chunk_tokens, wanted.keys[0].hash_tokens
        hit = self.deep_hit(wanted, wanted.limit_tokens, [], ())
        if hit.undecided:
            limit = min(hit.num_tokens + size, wanted.limit_tokens + 1, keys[0].num_hashed_tokens + 1)
            # Without an index, tiers would have to look for each place where a tail may end.
            tells_all = all(tier.options.has_index for tier in self._lower.tiers)
            ends = range(hit.num_tokens + unit, limit, unit) if tells_all else ()
            return wanted._replace(tails=[of.tail(end) for of in keys for end in ends])
        end = longest_tail(keys, hit.num_tokens, wanted.limit_tokens, self._look_up)
        if not end:
            return wanted
        whole = -(-end // size) * size
        # A hit of all tokens would need one less, because the last one is computed.
        cut, num_tokens = [of.cut(end) for of in keys], max(wanted.num_tokens, whole + 1)
        return wanted._replace(keys=cut, num_tokens=num_tokens, limit_tokens=whole, may_end_inside=False, tails=())

    def _look_up(self, keys: Sequence[OffloadKey]) -> bytes:
        """Tell what host memory or a tier has, or is coming into host memory."""
        states = zip(self._host.lookup(keys), self._lower.lookup(keys), strict=True)
        return bytes([READY if here == READY or below in (READY, NOT_YET) else ABSENT for here, below in states])

    def worth_while(
        self, wanted: Wanted, num_hit_tokens: int, limit_s: float, skipped: Container[int], notes: MutableSequence[str]
    ) -> FetchPlan:
        """Return what is worth fetching for a hit: all of it, a part, or nothing.

        Args:
            wanted: what a caller wants.
            num_hit_tokens: number of leading tokens that all tiers together have.
            limit_s: seconds that are left for loading.
            skipped: indices of tiers that are not to be asked.
            notes: mutated: a line is added if something is left out because computing is expected to be faster.
        """
        plan = self._soonest(wanted, self._plan(wanted, num_hit_tokens), skipped, notes)
        num_in_time = num_tokens_in_time(plan.num_tokens - wanted.num_computed_tokens, plan.load_s, limit_s)
        limit_tokens = wanted.num_computed_tokens + num_in_time
        if limit_tokens == plan.num_tokens:
            return plan
        notes.append(
            f"lower tiers were expected to bring {limit_tokens} of {plan.num_tokens} tokens in {max(0.0, limit_s):.3g} s"
        )
        return self._soonest(wanted, self._cut(wanted, limit_tokens, skipped), skipped, notes)

    def _soonest(
        self, wanted: Wanted, plan: FetchPlan, skipped: Container[int], notes: MutableSequence[str]
    ) -> FetchPlan:
        """Return ``plan``, the part of it before the chunks of a tier, or nothing: whatever is expected to take least time."""
        if self.pace is None or not plan.load_s:
            return plan
        num_here = self.host_hit(wanted, plan.num_tokens)
        plans = [plan, FetchPlan(wanted.num_computed_tokens, (), {}, 0.0)]
        if len(plan.first_tokens) > 1:
            firsts = sorted(first for first in plan.first_tokens.values() if first > wanted.num_computed_tokens)
            plans += [self._cut(wanted, first, skipped) for first in firsts]
        # What is not fetched is computed.
        rests = [self.pace.predict(plan.num_tokens - max(num_here, part.num_tokens)) for part in plans[1:]]
        ways = [(plan.load_s, 0.0), *zip((part.load_s for part in plans[1:]), rests, strict=True)]
        best = plans[soonest(ways)]
        if left_out := sorted(plan.first_tokens.keys() - best.first_tokens.keys()):
            names = " and ".join(self._lower.tiers[at].name for at in left_out)
            best_s = min(load_s + rest_s for load_s, rest_s in ways if rest_s is not None)
            notes.append(
                f"computing was expected to be faster than loading from {names}: {best_s:.3f} s against {plan.load_s:.3f} s"
            )
        return best

    def _cut(self, wanted: Wanted, limit_tokens: int, skipped: Container[int]) -> FetchPlan:
        """Return the plan for a hit of at most ``limit_tokens`` tokens."""
        return self._plan(wanted, self.deep_hit(wanted, limit_tokens, [], skipped).num_tokens)

    def _plan(self, wanted: Wanted, num_tokens: int) -> FetchPlan:
        chains = list(chains_to_fetch(wanted, self._host, self._lower, num_tokens))
        counts: Counter[int] = Counter()
        first_tokens: dict[int, int] = {}
        for chain in chains:
            counts[chain.tier] += len(chain.keys)
            first_tokens[chain.tier] = min(chain.first_token, first_tokens.get(chain.tier, chain.first_token))
        return FetchPlan(num_tokens, chains, first_tokens, self._lower.estimate_s(counts))


def chains_to_fetch(wanted: Wanted, host: OffloadManager, lower: LowerTiers, num_hit_tokens: int) -> Iterator[Chain]:
    """Yield the needed chunks that host memory lacks and a lower tier has, in chains of one tier each."""
    for keys in wanted.keys:
        needed = wanted.needed(keys, num_hit_tokens)
        own = keys.keys[needed.start : needed.stop]
        tiers = [-1] * len(own)  # of what host memory has, and of what no tier has
        absent = [at for at, state in enumerate(host.lookup(own)) if state == ABSENT]
        for at, tier in zip(absent, lower.tiers_of([own[at] for at in absent]), strict=True):
            tiers[at] = tier
        first = needed.start
        for tier, run in groupby(tiers):
            end = first + len(list(run))
            if tier >= 0:
                parent = keys.keys[first - 1] if first else None
                yield Chain(tier, keys.keys[first:end], parent, first * keys.chunk_tokens)
            first = end


def num_tokens_in_time(num_tokens: int, load_s: float, limit_s: float) -> int:
    """Return how many of ``num_tokens`` tokens are likely to be loaded in time, if loading all of them takes ``load_s``.

    All of them if nothing is known of the speed, for which ``load_s`` is 0; none if there is no time left.

    Args:
        num_tokens: number of tokens, from 0.
        load_s: estimated seconds to load all of them, from 0.
        limit_s: seconds that are left; 0 or less once the deadline has passed.
    """
    if limit_s <= 0:
        return 0
    return num_tokens if load_s <= limit_s else int(limit_s / load_s * num_tokens)


def soonest(ways: Sequence[tuple[float, float | None]]) -> int:
    """Return the index of the way that is expected to take least time; of several, the first.

    Args:
        ways: seconds of loading and seconds of computing the rest, per way; ``None`` where that is not known. The first way
            is taken then, whose rest is known to be nothing.
    """
    times = [float("inf") if rest_s is None else load_s + rest_s for load_s, rest_s in ways]
    return times.index(min(times))


def sources_per_token(wanted: Wanted, sources: Mapping[OffloadKey, int], num_hit_tokens: int) -> bytes:
    """Return one byte per token between the computed ones and the hit's end, for the tier that it came from.

    0 is host memory, ``n + 1`` lower tier ``n``. If the groups' chunks of a token came from different tiers, the slowest
    counts. Leading tokens that no group reads any more, because windows have moved on, count like the first that is read.

    Args:
        wanted: what was wanted.
        sources: index of the lower tier, from 0, of each chunk that was fetched.
        num_hit_tokens: number of leading tokens that will be on the device after the load.
    """
    if not sources:
        return bytes(num_hit_tokens - wanted.num_computed_tokens)
    marks = bytearray([_UNREAD]) * (num_hit_tokens - wanted.num_computed_tokens)
    spans = sorted(
        (sources.get(keys.keys[at], -1), at * keys.chunk_tokens - wanted.num_computed_tokens, keys.chunk_tokens)
        for keys in wanted.keys
        for at in wanted.needed(keys, num_hit_tokens)
    )
    for tier, start, length in spans:
        first = max(0, start)
        marks[first : start + length] = bytes([tier + 1]) * (start + length - first)
    num_unread = len(marks) - len(marks.lstrip(bytes([_UNREAD])))
    marks[:num_unread] = bytes(marks[num_unread : num_unread + 1] or b"\0") * num_unread
    return bytes(marks)
