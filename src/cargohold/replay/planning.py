"""How large a cache should be: hits against size, where the curve bends, and what the tiers are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cargohold.errors import ConfigError
from cargohold.replay.costs import CostModel
from cargohold.replay.replaying import Capacities
from cargohold.replay.results import OPTIMUM, ReplayResult
from cargohold.replay.tiers import DISK, HOST
from cargohold.replay.workload import Workload

_CURVE_PERCENT: Final = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 100)
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that could be bought.

    Attributes:
        host_bytes, disk_bytes: size of each tier; ``None`` for no such tier, or if its size is open.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.disk_bytes is not None and self.host_bytes is None:
            raise ConfigError("disk_bytes", self.disk_bytes, "a disk needs host memory above it: give host_bytes too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One size of host memory on the curve, and what it brings beyond the size before.

    Attributes:
        num_chunks, num_bytes: the size.
        result: result of the policy at this size.
        optimum: result that no policy can beat at this size; ``None`` where ids form no trie.
        added_bytes: memory beyond the size before.
        added_hit_tokens: tokens found beyond those at the size before.
        saved_s: seconds of prefill saved in total; ``None`` if the prefill rate is not known.
        added_saved_s: seconds of prefill saved beyond those at the size before.
    """

    num_chunks: int
    num_bytes: int
    result: ReplayResult
    optimum: ReplayResult | None
    added_bytes: int
    added_hit_tokens: int
    saved_s: float | None
    added_saved_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planner's answer.

    Attributes:
        policy: the policy that was replayed.
        steps: the curve, in ascending order of size.
        knee: the size at which the curve is highest above the straight line from nothing to its largest size; ``None`` if
            nothing comes back, so that the curve is flat.
        host: result with host memory as large as the budget; ``None`` without a budget.
        both: result with that host memory and the disk below it; ``None`` without a disk.
    """

    policy: str
    steps: tuple[Step, ...]
    knee: Step | None
    host: ReplayResult | None
    both: ReplayResult | None


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

    def __init__(self, workload: Workload, costs: CostModel, policy: str, budget: Budget) -> None:
        chunk_bytes = costs.chunk_bytes(workload.chunk_tokens)
        if costs.bytes_per_token is None:
            raise ConfigError("model", None, "a plan needs --model or --bytes-per-token")
        if chunk_bytes is None:
            raise ConfigError(
                "block_tokens", None, "the trace does not tell how many tokens a block has; give --block-tokens"
            )
        self.chunk_bytes = chunk_bytes
        self._workload = workload
        self._costs = costs
        self._policy = policy
        self._host = _slots("host_bytes", budget.host_bytes, chunk_bytes)
        self._disk = _slots("disk_bytes", budget.disk_bytes, chunk_bytes)

    def curve(self) -> list[Capacities]:
        """Sizes of host memory to replay, with the policy and with the optimum."""
        sizes = {max(1, round(percent * self._workload.num_unique / 100)) for percent in _CURVE_PERCENT}
        return [(size,) for size in sorted(sizes | ({self._host} if self._host else set()))]

    def tiers(self) -> list[Capacities]:
        """Sizes of host memory and disk to replay together; none if the budget has no disk."""
        return [(self._host, self._disk)] if self._host and self._disk else []

    def plan(self, results: Sequence[ReplayResult]) -> Plan:
        """The plan, given the results of all sizes asked for."""
        found = {(result.policy, result.capacities): result for result in results}
        steps: list[Step] = []
        for size in self.curve():
            steps.append(self._step(found[self._policy, size], found.get((OPTIMUM, size)), steps[-1:]))
        return Plan(
            policy=self._policy,
            steps=tuple(steps),
            # Sizes beyond what there is to keep would only add a flat end to the curve.
            knee=_knee([step for step in steps if step.num_chunks <= self._workload.num_unique]),
            host=found[self._policy, (self._host,)] if self._host else None,
            both=found[self._policy, (self._host, self._disk)] if self._host and self._disk else None,
        )

    def per_hour(self, amount: float) -> float | None:
        """Convert an amount of the whole trace to an amount per hour; ``None`` if the trace's duration is not known."""
        return amount * _HOUR_S / self._workload.duration_s if self._workload.duration_s else None

    def saved_s(self, result: ReplayResult) -> float | None:
        """Seconds of prefill saved; ``None`` if the prefill rate is not known."""
        return self._costs.saved_s(result, self._workload.chunk_tokens)

    def _step(self, result: ReplayResult, optimum: ReplayResult | None, before: Sequence[Step]) -> Step:
        num_bytes = result.capacities[0] * self.chunk_bytes
        saved_s = self.saved_s(result)
        known_s = before[0].saved_s or 0.0 if before else 0.0
        return Step(
            num_chunks=result.capacities[0],
            num_bytes=num_bytes,
            result=result,
            optimum=optimum,
            added_bytes=num_bytes - (before[0].num_bytes if before else 0),
            added_hit_tokens=_tokens(result) - (_tokens(before[0].result) if before else 0),
            saved_s=saved_s,
            added_saved_s=None if saved_s is None else saved_s - known_s,
        )


def tier_pays(costs: CostModel, tier: str) -> bool | None:
    """Whether loading from a tier is faster than computing; ``None`` if the prefill rate is not known."""
    break_even = costs.break_even_tokens_per_s(tier)
    if costs.prefill_tokens_per_s is None or break_even is None:
        return None
    return costs.prefill_tokens_per_s < break_even


def loads_per_tier(result: ReplayResult) -> dict[str, int]:
    """Chunks loaded from each tier."""
    return {HOST: 0, DISK: 0} | {tier.name: tier.loaded for tier in result.tiers}


def _slots(key: str, num_bytes: int | None, chunk_bytes: int) -> int | None:
    if num_bytes is None:
        return None
    if num_bytes < chunk_bytes:
        raise ConfigError(key, num_bytes, f"it must hold at least one chunk, which is {chunk_bytes} bytes")
    return num_bytes // chunk_bytes


def _tokens(result: ReplayResult) -> int:
    assert result.num_hit_tokens is not None, "it is known how many tokens a chunk has"
    return result.num_hit_tokens


def _knee(steps: Sequence[Step]) -> Step | None:
    """The step at which hits are highest above the straight line from nothing to the largest size, if there are hits.

    Up to there a byte brings more than the average byte of the whole curve, beyond it less.
    """
    largest, most = steps[-1].num_bytes, _tokens(steps[-1].result)
    if not most:
        return None
    return max(steps, key=lambda step: _tokens(step.result) / most - step.num_bytes / largest)
