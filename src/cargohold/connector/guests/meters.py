"""Measurements: how long loads, stores and waits take, how fast prompts are computed, and for how long
chunks are kept and wanted, and which prefixes requests have left in the tier. It changes no decision.

Ages of chunks are sampled, because their number may be in the millions, and all that they cost is a few dictionary entries per
request: as in spatial sampling (SHARDS, Waldspurger et al., FAST 2015), a chunk is in the sample or not by its key, which is a
digest, so that all its uses are seen or none; and when the sample is full, half of it goes and half as many are taken from then
on. So both are bounded, and neither prefers old chunks or young ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import eq
from types import MappingProxyType
from typing import Final, Self

from cargohold.blocks import READY
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.connector.kernel.guest import AdmissionReport, Guest
from cargohold.connector.kernel.jobs import Load, Store
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.protocol import (
    AttentionKind,
    BlockIds,
    Clock,
    Episode,
    KeptPrefix,
    KVCacheLayout,
    SchedulerEnvironment,
    Series,
    Stats,
    Tally,
    TransferOutcome,
    level_changes,
    metrics,
)
from cargohold.tiers.scheduler_side import LowerTiers

MAX_KEPT: Final = 256
"""Maximum number of chunks whose stay in host memory is followed."""
MAX_USED: Final = 4096
"""Maximum number of chunks whose last use is remembered."""
LOOK_S: Final = 1.0
"""Seconds after which it is looked again which of the followed chunks are still there."""
_NO_FACTS: Final[Mapping[str, int | str]] = MappingProxyType({})
_MOST_APART: Final = 1 << 16


class Meters(Guest):
    """Measures one connector's scheduler side.

    Args:
        shared: has the manager, and tells what is in flight.
        environment: facts about the engine, such as its observers.
        lower: the tiers below host memory, if there are any.

    Attributes:
        chunk_bytes: size of a chunk of the largest group, over all shards.
        prefixes: what the last requests have left in host memory.
    """

    name = "meters"

    def __init__(self, shared: Shared, environment: SchedulerEnvironment, lower: LowerTiers | None) -> None:
        self._shared = shared
        self._clock = clock = environment.clock
        self._observe = environment.observe
        self._lower = lower
        self._stats = Tally()
        self._ages = ChunkAges(shared.manager, shared.tier, clock, self._stats)
        self.prefixes = Prefixes(shared.manager, shared.layout, clock)
        self._levels: Stats = {}
        layout = shared.layout
        plan = shared.config.plan_rows(layout)
        self.chunk_bytes = plan.row_bytes * plan.most * layout.num_shards * shared.config.blocks_per_chunk
        # What the manager counts in: chunks, or rows where chunks differ in size.
        self._unit_bytes = self.chunk_bytes * shared.manager.capacity // shared.manager.fill[1]
        self._limits: dict[Series, float] = {}
        quotas = getattr(shared.config, "quotas", ())
        self._labels = {quota.tenant: quota.label or f"tenant {at}" for at, quota in enumerate(quotas, 1)}
        for tenant, limits in shared.manager.quotas.items():
            for limit, num_chunks in (("reserved", limits.reserved), ("soft", limits.soft), ("hard", limits.hard)):
                if num_chunks is not None:
                    quota = metrics.QUOTA.of(shared.tier, self._label(tenant), limit)
                    self._limits[quota] = num_chunks * self.chunk_bytes

    # --- facts --------------------------------------------------------------------------------------------------------

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        """Note its wait, and which chunks it uses, and report to observers what its look-up has found."""
        if state.deferred_at is not None:
            self._note_wait(state, state.deferred_at)
        if self._observe is not None:
            self._tell_found(state, admission)
        if admission.is_first:
            self._ages.note_used(state.keys[0].keys)

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Note its wait, if it has not been admitted, and what it leaves."""
        if state.deferred_at is not None:
            self._note_wait(state, state.deferred_at)
        self.prefixes.note_ended(state)

    def load_ended(self, load: Load, since: float | None, outcome: TransferOutcome) -> None:
        """Note how long it took. What failed or was not awaited says nothing of the speed."""
        if since is None:
            return
        num_tokens = len(load.origins)
        facts: dict[str, int | str] = {"tokens": num_tokens, "outcome": outcome.name.lower()}
        self._tell("load", (load.request_id,), since, self._clock(), facts)
        if outcome is TransferOutcome.DONE:
            metrics.LOAD.of(self._shared.tier).note(self._clock() - since, self._stats)
            self._stats[metrics.LOAD_TOKENS.of()] += num_tokens

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """Note how long it took, and follow some of its chunks."""
        if since is None:
            return
        if self._observe is not None:
            facts: dict[str, int | str] = {"chunks": len(store.keys), "outcome": outcome.name.lower()}
            self._tell("store", store.request_ids, since, self._clock(), facts)
        if outcome is TransferOutcome.DONE:
            metrics.STORE.of(self._shared.tier).note(self._clock() - since, self._stats)
            if not store.is_spoiled:
                self._ages.note_stored(store.handle.keys)

    def reset(self) -> None:
        """Forget the chunks that are followed: they were not evicted."""
        self._ages.forget()
        self.prefixes.forget()

    # --- what it tells ------------------------------------------------------------------------------------------------

    def take_stats(self) -> Stats:
        """Return counters since the last call, and how levels have changed since then: summed up, these are the levels."""
        self._ages.look()
        stats = dict(self._stats)
        self._stats.clear()
        return {**stats, **self._take_levels()}

    def _note_wait(self, state: RequestState, began_at: float) -> None:
        """Note for how long a request was deferred."""
        ended_at = self._clock() if state.answered_at is None else state.answered_at
        metrics.WAIT.of().note(ended_at - began_at, self._stats)
        self._tell("wait", (state.request.request_id,), began_at, ended_at)

    def _tell_found(self, state: RequestState, admission: AdmissionReport) -> None:
        """Report to observers what the look-up of a request has found."""
        if state.asked_at is None or state.answered_at is None:
            return
        found = {f"found_tokens.{tier}": count for tier, count in admission.sources.items()}
        self._tell(
            "look_up",
            (state.request.request_id,),
            state.asked_at,
            state.answered_at,
            {"found_tokens.device": admission.num_computed_tokens, **found},
        )

    def _tell(
        self,
        what: str,
        request_ids: Collection[str],
        began_at: float,
        ended_at: float,
        facts: Mapping[str, int | str] = _NO_FACTS,
    ) -> None:
        if self._observe is not None:
            self._observe(Episode(what, request_ids, began_at, ended_at, facts))

    def _label(self, tenant: str) -> str:
        """What metrics call a tenant: never the salt, with which one could find out what is cached under it."""
        return self._labels.get(tenant, tenant)

    def num_bytes(self, num_chunks: int) -> int:
        """Return the bytes of so many chunks of host memory; about, where they differ in size, as if they were like all."""
        num_ready, (ready, _) = self._shared.manager.num_ready, self._shared.manager.fill
        return num_chunks * ready * self._unit_bytes // num_ready if num_ready else num_chunks * self.chunk_bytes

    def _take_levels(self) -> Stats:
        manager, tier = self._shared.manager, self._shared.tier
        num_ready, (ready, capacity) = manager.num_ready, manager.fill
        removed = Counter(manager.num_removed)
        removed["evicted"] -= 0 if self._lower is None else self._lower.fetches.num_never_there
        levels: dict[Series, float] = {
            **{metrics.REMOVED.of(tier, reason): count for reason, count in removed.items()},
            metrics.READY_CHUNKS: num_ready,
            metrics.STUCK_COPIES: self._shared.jobs.num_stuck,
            metrics.TIER_READY.of(tier): ready * self._unit_bytes,
            metrics.TIER_IN_USE.of(tier): self.num_bytes(manager.num_pins),
            metrics.TIER_CAPACITY.of(tier): capacity * self._unit_bytes,
            **self._limits,
        }
        for tenant, num_chunks in manager.usage().items():
            levels[metrics.OF_TENANT.of(tier, self._label(tenant))] = self.num_bytes(num_chunks)
        before, self._levels = self._levels, levels
        return level_changes(before, levels) if levels != before else {}


class ChunkAges:
    """Samples how long chunks stay in host memory, and after what time requests come back to them.

    Args:
        manager: the manager of host memory.
        tier: its name in counters.
        clock: monotonic time in seconds.
        stats: the counters; mutated.
    """

    def __init__(self, manager: OffloadManager, tier: str, clock: Clock, stats: Tally) -> None:
        self._manager = manager
        self._clock = clock
        self._stats = stats
        self._lifetimes = metrics.LIFETIME.of(tier)
        self._gaps = metrics.REUSE_GAP.of()
        # When each followed chunk was stored, and when each remembered one was used last; the oldest first.
        self._kept: dict[OffloadKey, float] = {}
        self._used: dict[OffloadKey, float] = {}
        # One of so many chunks is followed, the next one after so many, and one of so many is remembered.
        self._apart = 1
        self._skip = 0
        self._used_apart = 1
        self._look_at = clock() + LOOK_S

    def note_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks have come from the device."""
        now = self._clock()
        while self._skip < len(keys):
            self._kept[keys[self._skip]] = now
            self._skip += self._apart
        self._skip -= len(keys)
        while len(self._kept) > MAX_KEPT:
            self._kept = dict(islice(self._kept.items(), None, None, 2))
            self._apart *= 2

    def note_used(self, keys: Sequence[OffloadKey]) -> None:
        """Note that a request uses these chunks, in prefix order. Looks at the first, second, fourth, eighth and so on."""
        now = self._clock()
        for key in _spread(keys):
            if _number(key) % self._used_apart:
                continue
            before = self._used.pop(key, None)
            if before is not None:
                self._gaps.note(now - before, self._stats)
            self._used[key] = now
        if len(self._used) > MAX_USED:
            self._used_apart = min(2 * self._used_apart, _MOST_APART)
            kept = {key: at for key, at in self._used.items() if _number(key) % self._used_apart == 0}
            self._used = dict(islice(kept.items(), max(0, len(kept) - MAX_USED), None))

    def look(self) -> None:
        """Look now and then which of the followed chunks have gone."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        followed = list(self._kept)
        for key, is_there in zip(followed, self._manager.lookup(followed), strict=True):
            if not is_there:
                self._lifetimes.note(now - self._kept.pop(key), self._stats)
        if self._apart > 1 and len(self._kept) < MAX_KEPT // 4:
            self._apart //= 2

    def forget(self) -> None:
        """Forget the chunks that are followed, because all are dropped: they were not evicted."""
        self._kept.clear()


def _spread(keys: Sequence[OffloadKey]) -> Iterator[OffloadKey]:
    at = 1
    while at <= len(keys):
        yield keys[at - 1]
        at *= 2


def _number(key: OffloadKey) -> int:
    return key[0] | key[1] << 8


MAX_PREFIXES: Final = 64
"""Maximum number of prefixes that are remembered; beyond it those that were used least recently are forgotten."""
MAX_MARKS: Final = 16
"""Maximum number of chunks of a prefix that are looked for, so that an answer costs a millisecond at a million chunks. Of a
longer prefix, what is there is rounded down to a 16th, unless it is all there."""


@dataclass(slots=True)
class _Left:
    """A prefix that requests have left.

    Attributes:
        num_chunks: number of its chunks.
        apart: one of so many of them is a mark.
        marks: these, in order, and the last one.
        at: when the last of the requests ended.
        num_uses: number of requests that have begun with it.
        is_shared: whether it is what requests have in common that went on differently.
    """

    num_chunks: int
    apart: int
    marks: list[OffloadKey]
    at: float
    num_uses: int = 1
    is_shared: bool = False

    @classmethod
    def of(cls, keys: list[OffloadKey], at: float) -> Self:
        """Make that of a request that has ended."""
        apart = -(-len(keys) // MAX_MARKS)
        marks = keys[apart - 1 :: apart]
        if len(keys) % apart:
            marks.append(keys[-1])
        return cls(len(keys), apart, marks, at)

    def end_of(self, num_marks: int) -> int:
        """Return the number of chunks up to a mark."""
        return min(num_marks * self.apart, self.num_chunks)

    def num_in_common(self, keys: list[OffloadKey]) -> int:
        """Return with how many of its chunks a request begins, rounded down to a mark."""
        if self.num_chunks <= len(keys) and keys[self.num_chunks - 1] == self.marks[-1]:
            return self.num_chunks
        are_alike = list(map(eq, self.marks, keys[self.apart - 1 : self.num_chunks : self.apart]))
        return (are_alike.index(False) if False in are_alike else len(are_alike)) * self.apart


class Prefixes:
    """Remembers the prefixes of the last requests.

    A request that continues an earlier one, as the next turn of a conversation does, takes its place. Requests that have half
    of their chunks or more in common, as questions about one document have, are remembered as what they have in common.

    Args:
        manager: the manager of the tier.
        layout: the engine's paged KV.
        clock: monotonic time in seconds.
    """

    def __init__(self, manager: OffloadManager, layout: KVCacheLayout, clock: Clock) -> None:
        self._manager = manager
        self._clock = clock
        # Only a group of full attention keeps a prefix from its start.
        full = [group.index for group in layout.groups if group.kind is AttentionKind.FULL]
        self._group = full[0] if full else None
        self._chunk_tokens = 0
        # By tenant and first chunk, where most prompts differ already; the least recently used first.
        self._left: dict[tuple[str | None, OffloadKey], list[_Left]] = {}
        self._num_left = 0

    def note_ended(self, state: RequestState) -> None:
        """Note that a request has ended."""
        if self._group is None:
            return
        chunks = state.keys[self._group]
        keys, self._chunk_tokens = chunks.keys, chunks.chunk_tokens
        if not keys:
            return
        start, own = (state.tenant, keys[0]), _Left.of(keys, self._clock())
        alike, others, shared = self._left.pop(start, []), list[_Left](), list[_Left]()
        for left in alike:
            common = left.num_in_common(keys)
            if common == left.num_chunks and not left.is_shared:
                own.num_uses = max(own.num_uses, left.num_uses + 1)
            elif common and (common == left.num_chunks or 2 * common >= max(left.num_chunks, len(keys))):
                part = _Left.of(keys[:common], own.at)
                part.num_uses, part.is_shared = left.num_uses + 1, True
                shared.append(part)
            else:
                others.append(left)
        is_told = any(2 * part.num_chunks >= len(keys) for part in shared)
        now_alike = self._left[start] = [*others, *shared, *([] if is_told else [own])]
        self._num_left += len(now_alike) - len(alike)
        while self._num_left > MAX_PREFIXES:
            oldest = next(iter(self._left))
            del self._left[oldest][0]
            self._num_left -= 1
            if not self._left[oldest]:
                del self._left[oldest]

    def kept(self) -> list[KeptPrefix]:
        """Return those of which something is in the tier, the longest first."""
        now, kept = self._clock(), []
        for (tenant, _), left in ((start, left) for start, alike in self._left.items() for left in alike):
            # A prefix is lost from its end.
            num_chunks = left.end_of(self._manager.lookup_run(left.marks).count(READY))
            if num_chunks:
                kept.append(KeptPrefix(tenant, num_chunks * self._chunk_tokens, left.num_uses, now - left.at))
        return sorted(kept, key=lambda prefix: -prefix.num_tokens)

    def forget(self) -> None:
        """Forget all of them, because all chunks are dropped."""
        self._left.clear()
        self._num_left = 0
