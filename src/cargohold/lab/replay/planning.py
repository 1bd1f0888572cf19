"""How large a cache should be: the size up to which the next GiB is worth its price, and whether a disk below it pays.

A hit ratio over a whole trace rises with the trace's length: it counts the first use of everything as a miss, which no cache
can help. What does not depend on the length is a *rate*, counted in a cache that is full: it then has what it would have if it
had run for ever. (Of LRU this is exact: the cache has what was used within the last so many seconds, and those lie within the
trace.) So each size is counted from the request on at which it begins to evict, and two sizes are compared from the same
request on. A size that is not full before half of the trace has passed is not judged: what it would find comes back after the
trace's end.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias

from cargohold.errors import ConfigError
from cargohold.lab.replay.costs import CostModel
from cargohold.lab.replay.replaying import INFINITE, OPTIMUM, Capacities, ReplayResult, count
from cargohold.lab.replay.tiers import DISK
from cargohold.lab.replay.workload import Workload
from cargohold.option_values import is_positive_number, too_small

Gain: TypeAlias = tuple[int, int, float]
"""What each GiB between two sizes, in bytes, brings per hour: seconds of prefill, or tokens."""

GIB: Final = 1024**3
BASELINE: Final = "lru"
"""The policy that the planned one is compared with."""

_SMALLEST_SHARE: Final = 400
_HOUR_S: Final = 3600.0
_DAY_S: Final = 86400.0
_REQUESTS_WITHOUT_TIMES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingBudget:
    """The memory that could be bought, what it costs, and what it endures. Raises ``ConfigError`` for impossible values.

    Attributes:
        host_bytes, disk_bytes: size of each tier; ``None`` for no such tier, or if its size is open.
        host_price_s, disk_price_s: price of a GiB of the tier for an hour, in seconds of an accelerator.
        disk_write_bytes_per_s: what the disk can write, for as long as it has to.
        disk_writes_per_day: how often the disk may be written from end to end every day.
        disk_part: which part of its bytes the disk keeps of a chunk, because it packs them; 1 if it does not.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    host_price_s: float = 2.0
    disk_price_s: float = 0.1
    disk_write_bytes_per_s: float = 2e9
    disk_writes_per_day: float = 1.0
    disk_part: float = 1.0

    @property
    def max_daily_bytes(self) -> int | None:
        """What the disk may be written in a day so that it lasts; ``None`` without a disk."""
        return None if self.disk_bytes is None else int(self.disk_bytes * self.disk_writes_per_day)

    def __post_init__(self) -> None:
        if self.disk_bytes is not None and self.host_bytes is None:
            raise ConfigError("disk_bytes", self.disk_bytes, "a disk needs host memory above it: give host_bytes too")
        for key in ("host_price_s", "disk_price_s", "disk_write_bytes_per_s", "disk_writes_per_day"):
            if not is_positive_number(getattr(self, key)):
                raise ConfigError(key, getattr(self, key), "it must be a number above 0")
        if not 0 < self.disk_part <= 1:
            raise ConfigError("disk_part", self.disk_part, "it must be a number above 0 and at most 1, such as 0.7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One size of host memory on the curve. Everything is counted from the request on at which the size begins to evict.

    Attributes:
        num_bytes: the size.
        full_after_s: seconds until it begins to evict, about as long as an unused chunk stays; ``None`` without times.
        is_judged: whether the trace is long enough for this size.
        result: result of the planned policy.
        baseline: result of ``BASELINE``.
        optimum: result that no policy can beat; ``None`` where ids form no trie.
        with_disk: results without and with the budget's disk below, both counted from the request on at which the disk
            begins to evict; ``None`` without a disk.
        next_gib: what each GiB from this size to the next one brings per hour, in the planner's unit; ``None`` if not known.
    """

    num_bytes: int
    full_after_s: float | None
    is_judged: bool
    result: ReplayResult
    baseline: ReplayResult | None
    optimum: ReplayResult | None
    with_disk: tuple[ReplayResult, ReplayResult] | None = None
    next_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Host memory to buy.

    Attributes:
        num_bytes: the size up to which a GiB is worth its price; 0 if none is.
        is_least: whether the trace is too short to say where that ends: it is at least this size.
    """

    num_bytes: int
    is_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """What a disk below host memory would do, per second and hour, and what is wrong with it.

    Attributes:
        result: result of host memory and disk together.
        gib_gain: what a GiB of it brings per hour beyond host memory alone, in the planner's unit.
        is_judged: whether the trace is long enough to fill it. If not, it brings at least ``gib_gain``.
        written_bytes_per_s, read_bytes_per_s: what goes to the disk and comes from it on average; ``None`` without times.
        busy: share of its time that it needs for that: above 1 it cannot keep up; ``None`` without times.
        writes_per_day: how often it is written from end to end; ``None`` without times.
    """

    result: ReplayResult
    gib_gain: float
    is_judged: bool
    written_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    busy: float | None = None
    writes_per_day: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planner's answer.

    Attributes:
        policy: the policy that was replayed.
        steps: the curve, in ascending order of size, with the size of the budget.
        longest_judged_bytes: the largest size that the trace is long enough for.
        recommendation: ``None`` if times or the prefill rate are not known.
        recommended: result at that size; ``None`` if there is no recommendation, or none but 0.
        host: the step of the budget's host memory; ``None`` without one.
        disk: ``None`` without a disk in the budget.
        everything: result of a cache that never evicts, over the whole trace.
    """

    policy: str
    steps: tuple[Step, ...]
    longest_judged_bytes: int
    recommendation: Recommendation | None
    recommended: Step | None
    host: Step | None
    disk: DiskUse | None
    everything: ReplayResult


class Planner:
    """Finds out which sizes to replay for a budget, and makes a plan of the results.

    Args:
        workload: the traffic.
        costs: the cost model, which must know the bytes per token.
        policy: the policy to replay.
        budget: the memory that could be bought.

    Raises:
        ConfigError: the size of a chunk is not known, or a tier does not hold one.
    """

    def __init__(self, workload: Workload, costs: CostModel, policy: str, budget: SizingBudget) -> None:
        chunk_bytes = costs.chunk_bytes(workload.chunk_tokens)
        if costs.bytes_per_token is None:
            raise ConfigError("model", None, "a plan needs --model or --bytes-per-token")
        if chunk_bytes is None:
            raise ConfigError(
                "block_tokens", None, "the trace does not say how many tokens a block has; give --block-tokens"
            )
        self.chunk_bytes = chunk_bytes
        self.workload = workload
        self.costs = costs
        self.budget = budget
        self._policy = policy
        self._host = _slots("host_bytes", budget.host_bytes, chunk_bytes)
        self._disk_chunk_bytes = int(chunk_bytes * budget.disk_part)
        self._disk = _slots("disk_bytes", budget.disk_bytes, self._disk_chunk_bytes)
        self._first_uses = workload.first_use_requests()
        self._middle = _middle(workload)

    @property
    def has_rates(self) -> bool:
        """Whether requests have times, so that amounts can be given per hour; otherwise they are per 1,000 requests."""
        return self.workload.is_timed and self.workload.duration_s > 0

    @property
    def has_seconds(self) -> bool:
        """Whether the prefill rate is known, so that gains are seconds of prefill; otherwise they are tokens."""
        return self.costs.prefill_tokens_per_s is not None

    def curve(self) -> list[Capacities]:
        """Sizes of host memory to replay: with the policy, with ``BASELINE`` and with the optimum."""
        sizes = [size for size in self._steps() if self._is_judged(size)] or [1]
        return [(size,) for size in sorted({*sizes, *([self._host] if self._host else [])})]

    def further(self, results: Sequence[ReplayResult]) -> list[Capacities]:
        """What to replay with the policy once the curve is known: the recommended size, and all sizes with the disk below."""
        size = self._recommended_size(self._recommend(self._curve_of(results)))
        # What the disk adds changes slowly with host memory: every second size shows it.
        hosts = {*(size for (size,) in self.curve()[::-2]), self._host or 0} if self._disk else set()
        below = [(host, self._disk) for host in sorted(hosts)] if self._disk else []
        return [*([(size,)] if size else []), *below]

    def plan(self, results: Sequence[ReplayResult]) -> Plan:
        """The plan, given the results of all sizes asked for, and of the infinite cache."""
        steps = self._curve_of(results)
        recommendation = self._recommend(steps)
        found = {(result.policy, result.capacities): result for result in results}
        size = self._recommended_size(recommendation)
        host = next((step for step in steps if self._host and step.result.capacities == (self._host,)), None)
        return Plan(
            policy=self._policy,
            steps=tuple(steps),
            longest_judged_bytes=max((step.num_bytes for step in steps if step.is_judged), default=0),
            recommendation=recommendation,
            recommended=self._step(found, size) if size else None,
            host=host,
            disk=None if host is None or host.with_disk is None else self._disk_use(*host.with_disk),
            everything=next(result for result in results if result.policy == INFINITE),
        )

    def demand(self) -> float | None:
        """Accelerators that prefill keeps busy without a cache; ``None`` if the prefill rate or times are not known."""
        if not (self.has_rates and self.costs.prefill_tokens_per_s):
            return None
        tokens = self.workload.prompt_tokens_from(0)
        return tokens / self.costs.prefill_tokens_per_s / self.workload.duration_s

    def demand_left(self, result: ReplayResult) -> float | None:
        """Accelerators that prefill and loads keep busy with a cache; ``None`` like ``demand``."""
        demand = self.demand()
        return None if demand is None else demand * (1 - self.saved_share(result))

    def saved_share(self, result: ReplayResult) -> float:
        """Share of prefill that a cache saves: of time, less that of loads; without a prefill rate, of tokens."""
        asked = self.workload.prompt_tokens_from(len(self.workload.ends) - result.num_requests)
        return self._gain(result) * (self.costs.prefill_tokens_per_s or 1.0) / max(1, asked)

    def written_per_token(self, result: ReplayResult) -> float | None:
        """Bytes written to the disk per token that was restored from it; ``None`` if none was."""
        disk = result.tiers[1]
        assert self.workload.chunk_tokens is not None, "it is known how many tokens a chunk has"
        return (
            disk.stored * self._disk_chunk_bytes / (disk.loaded * self.workload.chunk_tokens) if disk.loaded else None
        )

    def written_per_day(self, result: ReplayResult) -> float | None:
        """Bytes written to the disk per day; ``None`` without times."""
        seconds = self.workload.seconds_from(len(self.workload.ends) - result.num_requests)
        return (
            result.tiers[1].stored * self._disk_chunk_bytes / seconds * _DAY_S if self.has_rates and seconds else None
        )

    def tier_pays(self, tier: str) -> bool | None:
        """Whether loading from a tier is faster than computing; ``None`` if the prefill rate is not known."""
        break_even = self.costs.break_even_tokens_per_s(tier)
        if self.costs.prefill_tokens_per_s is None or break_even is None:
            return None
        return self.costs.prefill_tokens_per_s < break_even

    def _steps(self) -> Iterator[int]:
        """Sizes in chunks: 1, 1.5, 2, 3, 4, 6, ... bytes, whatever the trace's length, as far as there is KV; and all of it."""
        everything = self.workload.num_unique
        size = 2.0 ** math.floor(math.log2(everything * self.chunk_bytes / _SMALLEST_SHARE))
        while size <= everything * self.chunk_bytes:
            for factor in (1, 1.5):
                yield max(1, min(everything, int(size * factor / self.chunk_bytes)))
            size *= 2
        yield everything

    def _evicts_at(self, num_chunks: int) -> int:
        """The first request that finds a tier of this size full; if it is never full, the one after the last new chunk."""
        num_chunks += self.workload.device_chunks
        if num_chunks >= len(self._first_uses):
            return int(self._first_uses[-1]) + 1
        return int(self._first_uses[num_chunks])

    def _is_judged(self, num_chunks: int) -> bool:
        return self._evicts_at(num_chunks) <= self._middle

    def _first(self, num_chunks: int) -> int:
        """The request from which on a size is counted. What is not judged is counted in the second half."""
        return min(self._evicts_at(num_chunks), self._middle)

    def _from(self, result: ReplayResult, first: int) -> ReplayResult:
        return count(self.workload, result.policy, result.capacities, result.run, first, result.seconds)

    def _hours(self, first: int) -> float:
        """Hours from a request to the end; without times, thousands of requests."""
        if self.has_rates:
            return self.workload.seconds_from(first) / _HOUR_S
        return (len(self.workload.ends) - first) / _REQUESTS_WITHOUT_TIMES

    def _gain(self, result: ReplayResult) -> float:
        """Seconds of prefill saved, or else tokens."""
        saved_s = self.costs.saved_s(result, self.workload.chunk_tokens)
        if saved_s is not None:
            return saved_s
        assert result.num_hit_tokens is not None, "it is known how many tokens a chunk has"
        return result.num_hit_tokens

    def _added(self, less: ReplayResult | None, more: ReplayResult, first: int, num_bytes: int) -> float | None:
        """What each of the GiB by which ``more`` is larger brings per hour, from a request on."""
        hours = self._hours(first)
        before = 0.0 if less is None else self._gain(self._from(less, first))
        return (self._gain(self._from(more, first)) - before) / hours / (num_bytes / GIB) if hours > 0 else None

    def _curve_of(self, results: Sequence[ReplayResult]) -> list[Step]:
        found = {(result.policy, result.capacities): result for result in results}
        steps = [self._step(found, size) for (size,) in self.curve()]
        for at, (step, larger) in enumerate(pairwise(steps)):
            if larger.is_judged:
                first = self._first(larger.result.capacities[0])
                gain = self._added(step.result, larger.result, first, larger.num_bytes - step.num_bytes)
                steps[at] = replace(step, next_gib=gain)
        return steps

    def _step(self, found: dict[tuple[str, Capacities], ReplayResult], size: int) -> Step:
        first, full_at = self._first(size), self._evicts_at(size)
        arrivals_s = self.workload.arrivals_s

        def counted(policy: str, *capacities: int) -> ReplayResult | None:
            result = found.get((policy, capacities))
            return None if result is None else self._from(result, first)

        result = counted(self._policy, size)
        assert result is not None, "the size was asked for"
        return Step(
            num_bytes=size * self.chunk_bytes,
            full_after_s=float(arrivals_s[full_at] - arrivals_s[0])
            if self.has_rates and full_at < len(arrivals_s)
            else None,
            is_judged=self._is_judged(size),
            result=result,
            baseline=counted(BASELINE, size),
            optimum=counted(OPTIMUM, size),
            with_disk=self._with_disk(found, size),
        )

    def _with_disk(
        self, found: dict[tuple[str, Capacities], ReplayResult], size: int
    ) -> tuple[ReplayResult, ReplayResult] | None:
        both = None if self._disk is None else found.get((self._policy, (size, self._disk)))
        if both is None or self._disk is None:
            return None
        # All is written through, so what fills last is the larger of both.
        first = self._first(max(size, self._disk))
        return self._from(found[self._policy, (size,)], first), self._from(both, first)

    def gains(self, steps: Sequence[Step]) -> list[Gain]:
        """What a GiB between neighbouring judged sizes brings per hour, from nothing on: both sizes in bytes, and the gain."""
        judged = [step for step in steps if step.is_judged]
        if not judged:
            return []
        size = judged[0].num_bytes
        first = self._added(None, judged[0].result, self._first(judged[0].result.capacities[0]), size)
        found = [(0, size, first)] + [
            (step.num_bytes, larger.num_bytes, step.next_gib) for step, larger in pairwise(judged)
        ]
        return [(lower, upper, gain) for lower, upper, gain in found if gain is not None]

    def _recommend(self, steps: Sequence[Step]) -> Recommendation | None:
        gains = _falling(self.gains(steps))
        price = self.budget.host_price_s
        if not (self.has_rates and self.has_seconds and gains):
            return None
        paying = sum(gain >= price for _, _, gain in gains)
        if not paying:
            return Recommendation(num_bytes=0)
        if paying == len(gains):
            is_everything = gains[-1][1] >= self.workload.num_unique * self.chunk_bytes
            return Recommendation(num_bytes=gains[-1][1], is_least=not is_everything)
        return Recommendation(num_bytes=_crossing(gains[paying - 1], gains[paying], price))

    def _recommended_size(self, recommendation: Recommendation | None) -> int:
        """The recommendation in chunks; 0 if there is none."""
        if recommendation is None or not recommendation.num_bytes:
            return 0
        return max(1, recommendation.num_bytes // self.chunk_bytes)

    def _disk_use(self, alone: ReplayResult, both: ReplayResult) -> DiskUse:
        """What the disk does besides what host memory does alone, both counted from the same request on."""
        assert self._disk is not None
        first = len(self.workload.ends) - both.num_requests
        seconds = self.workload.seconds_from(first) if self.has_rates else 0.0
        hours = self._hours(first)
        size = self._disk * self._disk_chunk_bytes
        added = (self._gain(both) - self._gain(alone)) / hours / (size / GIB) if hours > 0 else 0.0
        use = DiskUse(result=both, gib_gain=added, is_judged=self._is_judged(self._disk))
        if not seconds:
            return use
        disk = both.tiers[1]
        written, read = (chunks * self._disk_chunk_bytes / seconds for chunks in (disk.stored, disk.loaded))
        return replace(
            use,
            written_bytes_per_s=written,
            read_bytes_per_s=read,
            busy=written / self.budget.disk_write_bytes_per_s + read / self.costs.bytes_per_s[DISK],
            writes_per_day=written * _DAY_S / size,
        )


def _slots(key: str, num_bytes: int | None, chunk_bytes: int) -> int | None:
    if num_bytes is None:
        return None
    if num_bytes < chunk_bytes:
        raise too_small(key, num_bytes, f"it must hold at least one chunk, which is {chunk_bytes} bytes")
    return num_bytes // chunk_bytes


def _middle(workload: Workload) -> int:
    """The first request in the second half of the trace's time; without times, of its requests."""
    times = workload.arrivals_s
    if workload.is_timed and times[-1] > times[0]:
        return bisect_left(times.tolist(), float(times[0] + times[-1]) / 2)
    return len(times) // 2


def _falling(gains: Sequence[Gain]) -> list[Gain]:
    """The gains, where a larger one after a smaller one is evened out: the one can't be bought without the other.

    That leaves the slopes of the upper convex hull of what is saved against size ("pool adjacent violators").
    """
    pools: list[tuple[float, float, int]] = []  # gain of all its sizes, GiB, number of sizes
    for lower, upper, gain in gains:
        pool = (gain * (upper - lower), float(upper - lower), 1)
        while pools and pools[-1][0] / pools[-1][1] <= pool[0] / pool[1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    evened = [total / width for total, width, sizes in pools for _ in range(sizes)]
    return [(lower, upper, gain) for (lower, upper, _), gain in zip(gains, evened, strict=True)]


def _crossing(paying: Gain, too_dear: Gain, price: float) -> int:
    """The size at which the gain falls to the price: each gain is taken to be that of the middle between its sizes.

    Gain against size is close to straight if both are logarithms. The size is rounded to two digits: more are not known.
    """
    here = math.sqrt(max(paying[0], paying[1] / 2) * paying[1])
    there = math.sqrt(too_dear[0] * too_dear[1])
    if too_dear[2] <= 0:
        return paying[1]
    share = math.log(paying[2] / price) / math.log(paying[2] / too_dear[2])
    size = here * (there / here) ** share
    unit = 1024.0 ** math.floor(math.log(size, 1024))
    return round(float(f"{size / unit:.2g}") * unit)
