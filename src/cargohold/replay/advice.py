"""A plan in words: sentences for people who have to decide how much memory to buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cargohold.replay.costs import CostModel
from cargohold.replay.figures import format_seconds
from cargohold.replay.planning import Budget, Plan, Planner, loads_per_tier, tier_pays
from cargohold.replay.replaying import ReplayResult
from cargohold.replay.tiers import DISK, HOST
from cargohold.replay.workload import Workload
from cargohold.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a cache has to fit into.

    Attributes:
        memory_bytes: memory that this machine, and the control groups around this process, allow.
        disk_free_bytes: free space where the disk tier would be; ``None`` if that place was not given.
    """

    memory_bytes: int
    disk_free_bytes: int | None = None


def advise(planner: Planner, plan: Plan, workload: Workload, costs: CostModel, budget: Budget) -> Iterator[str]:
    """Yield sentences about the results of the replays."""
    yield _on_traffic(planner, plan, workload)
    yield _on_knee(plan)
    for tier in (HOST, *([DISK] if budget.disk_bytes is not None else [])):
        yield _on_tier(costs, tier)
    if plan.host is not None:
        yield f"{format_bytes(budget.host_bytes or 0)} of host memory: {_hits(plan.host)}, {_gain(planner, plan.host)}."
    if plan.host is not None and plan.both is not None:
        yield _on_disk(planner, plan.host, plan.both, budget)
    longest = int((workload.prompt_ends - workload.starts).max()) * planner.chunk_bytes
    if budget.host_bytes is not None and budget.host_bytes < longest:
        yield (
            f"The longest prompt has {format_bytes(longest)} of KV: {format_bytes(budget.host_bytes)} of host memory can "
            f"never bring it back as a whole, with or without a disk below."
        )


def fits(budget: Budget, plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield sentences about what fits this machine and what does not."""
    machine_allows = (
        f"This machine, with the limits of its control groups, allows {format_bytes(machine.memory_bytes)} in all"
    )
    what, wanted = "the host memory asked for", budget.host_bytes
    if wanted is None and plan.knee is not None:
        what, wanted = "the bend of the curve", plan.knee.num_bytes
    if wanted is None:
        yield f"{machine_allows}."
    elif wanted > machine.memory_bytes:
        yield f"{machine_allows}: {what} does not fit."
    else:
        yield f"{machine_allows}: {what} takes {wanted / machine.memory_bytes:.0%} of it."
    if machine.disk_free_bytes is None:
        return
    free = format_bytes(machine.disk_free_bytes)
    if budget.disk_bytes is None:
        yield f"The disk has {free} free."
    else:
        fit = "fits" if budget.disk_bytes <= machine.disk_free_bytes else "does not fit"
        yield f"The disk has {free} free: {format_bytes(budget.disk_bytes)} {fit}."


def _on_traffic(planner: Planner, plan: Plan, workload: Workload) -> str:
    everything = plan.steps[-1]
    time = f" in {format_seconds(workload.duration_s)}" if workload.duration_s else ""
    asks = (
        f"{format_count(workload.num_requests, 'request')}{time} {'asks' if workload.num_requests == 1 else 'ask'} for"
    )
    return (
        f"{asks} {format_bytes(workload.num_unique * planner.chunk_bytes)} of different KV; a cache for all of it would find "
        f"{everything.result.prefix_hit_ratio:.1%}."
    )


def _on_knee(plan: Plan) -> str:
    knee = plan.knee
    if knee is None:
        return "Nothing comes back: a cache of any size would find nothing."
    behind = [step for step in plan.steps if step.num_bytes > knee.num_bytes]
    text = f"The curve bends at {format_bytes(knee.num_bytes)}: {_hits(knee.result)}."
    if not behind:
        return f"{text} It is the largest size: memory pays to the end."
    more = behind[0].result.prefix_hit_ratio - knee.result.prefix_hit_ratio
    return (
        f"{text} Up to there a byte brings more than the average byte of the whole curve, beyond it less: the next "
        f"{format_bytes(behind[0].added_bytes)} bring {_points(more)}."
    )


def _on_tier(costs: CostModel, tier: str) -> str:
    limit = costs.break_even_tokens_per_s(tier)
    assert limit is not None, "a plan knows the bytes per token"
    speed = f"{costs.bytes_per_s[tier] / 1e9:g} GB/s"
    pays = tier_pays(costs, tier)
    if pays is None:
        return (
            f"Loading from {tier} at {speed} pays as long as prefill computes less than {limit:,.0f} tokens per second."
        )
    rate = costs.prefill_tokens_per_s or 0.0
    if pays:
        return (
            f"Loading from {tier} at {speed} pays: {limit / rate:.1f} times as fast as prefill at {rate:,.0f} tokens/s."
        )
    return (
        f"Loading from {tier} at {speed} does not pay: it brings {limit:,.0f} tokens per second, and prefill computes "
        f"{rate:,.0f}."
    )


def _on_disk(planner: Planner, host: ReplayResult, both: ReplayResult, budget: Budget) -> str:
    share = loads_per_tier(both)[DISK] / max(1, both.num_prefix_hits)
    more = both.prefix_hit_ratio - host.prefix_hit_ratio
    written = next(tier.stored for tier in both.tiers if tier.name == DISK) * planner.chunk_bytes
    hourly = planner.per_hour(written)
    wear = f"{format_bytes(written)} are written" if hourly is None else f"{format_bytes(hourly)} are written per hour"
    return (
        f"With {format_bytes(budget.disk_bytes or 0)} of disk below it: {_hits(both)} ({_points(more)}), {share:.0%} of "
        f"them from disk, {_gain(planner, both)}; {wear}."
    )


def _hits(result: ReplayResult) -> str:
    return f"{result.prefix_hit_ratio:.1%} prefix hits"


def _points(difference: float) -> str:
    """A difference of two ratios in percentage points."""
    return f"{round(100 * difference, 1) + 0.0:+.1f} points"  # adding zero makes -0.0 positive


def _gain(planner: Planner, result: ReplayResult) -> str:
    """What hits save, as text: time if the prefill rate is known, or else tokens."""
    saved_s = planner.saved_s(result)
    if saved_s is None:
        tokens = result.num_hit_tokens or 0
        hourly = planner.per_hour(tokens)
        return f"{tokens:,} tokens not computed" if hourly is None else f"{hourly:,.0f} tokens per hour not computed"
    hourly = planner.per_hour(saved_s)
    if hourly is None:
        return f"{format_seconds(saved_s)} of prefill saved"
    return f"{format_seconds(hourly)} of prefill saved per hour"
