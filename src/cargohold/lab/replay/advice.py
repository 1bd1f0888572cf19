"""A plan in words, for readers who decide how much memory to buy; and as plain values that are ready for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from cargohold.lab.replay.planning import BASELINE, DiskUse, Plan, Planner, Step
from cargohold.lab.replay.replaying import OPTIMUM
from cargohold.lab.replay.report import format_seconds
from cargohold.lab.replay.tiers import DISK, HOST
from cargohold.option_values import format_bytes, format_count


def recommend(planner: Planner, plan: Plan) -> Iterator[str]:
    """Yield what to buy, and why."""
    yield _on_host(planner, plan)
    yield _on_demand(planner, plan)
    if plan.disk is not None:
        yield _on_disk(planner, plan.disk)


def advise(planner: Planner, plan: Plan) -> Iterator[str]:
    """Yield further sentences about the results of the replays."""
    yield _on_traffic(planner, plan)
    too_short = _on_length(planner, plan)
    if too_short is not None:
        yield too_short
    budget = planner.budget
    for tier in (HOST, *([DISK] if budget.disk_bytes is not None else [])):
        yield _on_tier(planner, tier)
    if plan.host is not None:
        yield f"With {format_bytes(budget.host_bytes or 0)} of host memory, {_what_it_does(planner, plan.host)}"
    workload = planner.workload
    longest = int((workload.prompt_ends - workload.starts).max()) * planner.chunk_bytes
    if budget.host_bytes is not None and budget.host_bytes < longest:
        yield (
            f"The longest prompt has {format_bytes(longest)} of KV: {format_bytes(budget.host_bytes)} of host memory can "
            f"never bring it back as a whole, with or without a disk below."
        )


def fits(planner: Planner, plan: Plan, memory_bytes: int) -> str:
    """Whether it fits into the memory that this machine, and the control groups around this process, allow."""
    machine_allows = f"This machine, with the limits of its control groups, allows {format_bytes(memory_bytes)} in all"
    what, wanted = "the host memory asked for", planner.budget.host_bytes
    if wanted is None and plan.recommendation is not None:
        what, wanted = "what is recommended", plan.recommendation.num_bytes
    if not wanted:
        return f"{machine_allows}."
    if wanted > memory_bytes:
        return f"{machine_allows}: {what} does not fit."
    return f"{machine_allows}: {what} takes {wanted / memory_bytes:.0%} of it."


def disk_problems(planner: Planner, use: DiskUse) -> list[str]:
    """Why a disk is not recommended, as clauses; none if it is."""
    budget, costs = planner.budget, planner.costs
    problems = []
    if use.busy is not None and use.busy > 1:
        problems.append(
            f"it cannot keep up: {_per_s(use.written_bytes_per_s)} would be written to it, which can take "
            f"{_per_s(budget.disk_write_bytes_per_s)}, and {_per_s(use.read_bytes_per_s)} read from it, which can give "
            f"{_per_s(costs.bytes_per_s[DISK])}. It would be busy for {use.busy:.0%} of the time"
        )
    if use.writes_per_day is not None and use.writes_per_day > budget.disk_writes_per_day:
        problems.append(
            f"it wears out: it would be written from end to end {use.writes_per_day:.3g} times a day and endures "
            f"{budget.disk_writes_per_day:g}"
        )
    if planner.tier_pays(DISK) is False:
        problems.append("loading from it takes longer than computing")
    elif planner.has_rates and planner.has_seconds and use.is_judged and use.gib_gain < budget.disk_price_s:
        problems.append(
            f"a GiB of it saves {_amount(use.gib_gain)} s of prefill per hour, less than its price, {budget.disk_price_s:g} s"
        )
    return problems


def as_facts(planner: Planner, plan: Plan) -> dict[str, Any]:
    """The plan as values for JSON, without the results that it is based on."""
    budget, chosen = planner.budget, plan.recommendation
    return {
        "policy": plan.policy,
        "recommended_host_bytes": None if chosen is None else chosen.num_bytes,
        "recommended_is_least": None if chosen is None else chosen.is_least,
        "longest_judged_bytes": plan.longest_judged_bytes,
        "host_price_s": budget.host_price_s,
        "demand_accelerators": planner.demand(),
        "demand_left_accelerators": None if plan.recommended is None else planner.demand_left(plan.recommended.result),
        "disk": None
        if plan.disk is None
        else {
            **{field.name: getattr(plan.disk, field.name) for field in fields(plan.disk) if field.name != "result"},
            "demand_left_accelerators": planner.demand_left(plan.disk.result),
            "price_s": budget.disk_price_s,
            "written_bytes_per_restored_token": planner.written_per_token(plan.disk.result),
            "max_daily_bytes": budget.max_daily_bytes,
            "write_bandwidth": budget.disk_write_bytes_per_s,
            "endured_writes_per_day": budget.disk_writes_per_day,
            "problems": disk_problems(planner, plan.disk),
        },
        "curve": [_step_facts(planner, step) for step in plan.steps],
    }


def plan_table(planner: Planner, plan: Plan) -> tuple[list[str], list[list[str]]]:
    """The curve as a table: heads, and a row per size, the first without a cache."""
    demand = planner.demand()
    heads = ["host", "full after", "hits", BASELINE, OPTIMUM, "prefill saved" if demand is None else "accelerators"]
    gains = planner.gains(plan.steps)
    unused = "0.0%" if demand is None else f"{demand:.3g}"
    rows = [["none", "", "0.0%", "0.0%", "0.0%", unused, _amount(gains[0][2]) if gains else ""]]
    for step in plan.steps:
        left = planner.demand_left(step.result)
        ratios = [step.result, step.baseline, step.optimum]
        rows.append(
            [
                format_bytes(step.num_bytes),
                format_seconds(step.full_after_s) if step.is_judged else "too short",
                *("" if result is None else f"{result.prefix_hit_ratio:.1%}" for result in ratios),
                f"{planner.saved_share(step.result):.1%}" if left is None else f"{left:.3g}",
                "" if step.next_gib is None else _amount(step.next_gib),
            ]
        )
    return [*heads, "next GiB"], rows


def disk_table(planner: Planner, plan: Plan) -> tuple[list[str], list[list[str]]]:
    """What goes to the disk below each size of host memory, as a table; without rows if there is no disk."""
    rows = []
    for step in plan.steps:
        if step.with_disk is not None:
            both = step.with_disk[1]
            amounts = planner.written_per_token(both), planner.written_per_day(both), planner.budget.max_daily_bytes
            shown = ["" if amount is None else format_bytes(int(amount)) for amount in amounts]
            rows.append([format_bytes(step.num_bytes), f"{both.prefix_hit_ratio:.1%}", *shown])
    return ["host", "hits", "written per token restored", "written per day", "max_daily_bytes"], rows


def unit_of_gain(planner: Planner) -> str:
    return f"{'s of prefill' if planner.has_seconds else 'tokens'} {_per(planner)}"


def _step_facts(planner: Planner, step: Step) -> dict[str, Any]:
    baseline, optimum = step.baseline, step.optimum
    return {
        "host_bytes": step.num_bytes,
        "full_after_s": step.full_after_s,
        "is_judged": step.is_judged,
        "prefix_hit_ratio": step.result.prefix_hit_ratio,
        "lru_prefix_hit_ratio": None if baseline is None else baseline.prefix_hit_ratio,
        "optimum_prefix_hit_ratio": None if optimum is None else optimum.prefix_hit_ratio,
        "saved_share_of_prefill": planner.saved_share(step.result),
        "demand_left_accelerators": planner.demand_left(step.result),
        "next_gib_gain": step.next_gib,
    }


def _on_host(planner: Planner, plan: Plan) -> str:
    chosen, price = plan.recommendation, f"{planner.budget.host_price_s:g} s"
    if chosen is None:
        return f"No size is recommended: {_why_none(planner)}."
    if not plan.everything.num_prefix_hits:
        return "Recommended: no cache. Nothing comes back: a cache of any size would find nothing."
    if not chosen.num_bytes:
        return f"Recommended: no host memory. No GiB of it saves as much prefill per hour as it costs, {price}."
    pays = f"Recommended: {'at least ' if chosen.is_least else ''}{format_bytes(chosen.num_bytes)} of host memory."
    if chosen.num_bytes >= planner.workload.num_unique * planner.chunk_bytes:
        return f"{pays} It holds everything, and all of it saves more prefill per hour than it costs, {price} per GiB."
    rest = "The trace is too short to tell how much more would pay." if chosen.is_least else "Beyond, it saves less."
    return f"{pays} Up to there, more of it saves more prefill per hour than it costs, {price} per GiB. {rest}"


def _why_none(planner: Planner) -> str:
    if not planner.has_seconds:
        return (
            "what a hit is worth depends on how fast prefill is; give --prefill-tokens-per-s, the prompt tokens that an "
            "accelerator computes per second"
        )
    if not planner.has_rates:
        return "the requests have no times, so what a GiB brings per hour is not known"
    return "the trace is too short"


def _on_demand(planner: Planner, plan: Plan) -> str:
    demand = planner.demand()
    asked = planner.workload.prompt_tokens_from(0)
    if demand is None:
        return f"The prompts have {format_count(asked, 'token')}; without a cache, all are computed."
    rate = planner.costs.prefill_tokens_per_s
    text = (
        f"Prompts ask for {asked / planner.workload.duration_s:,.0f} tokens per second; an accelerator computes {rate:,.0f}. "
        f"Without a cache, prefill keeps {_accelerators(demand)} busy."
    )
    if plan.recommended is None:
        return text
    return f"{text} With what is recommended, {_what_it_does(planner, plan.recommended)}"


def _on_disk(planner: Planner, use: DiskUse) -> str:
    what = f"{format_bytes(planner.budget.disk_bytes or 0)} of disk"
    problems = disk_problems(planner, use)
    most = format_bytes(planner.budget.max_daily_bytes or 0)
    limit = f" So that it lasts, limit what is written to it: max_daily_bytes={most}."
    if problems:
        wears_out = use.writes_per_day is not None and use.writes_per_day > planner.budget.disk_writes_per_day
        why = " ".join(f"{problem[0].upper()}{problem[1:]}." for problem in problems)
        return f"Not recommended: {what}. {why}{limit * wears_out}"
    does = _disk_does(planner, use)
    if not (planner.has_rates and planner.has_seconds):
        return f"Whether {what} can keep up and pays is unknown without times and a prefill rate: {does}."
    if not use.is_judged and use.gib_gain < planner.budget.disk_price_s:
        return f"Whether {what} pays is unknown: the trace is too short to fill it. So far, {does}."
    return f"Recommended below {format_bytes(planner.budget.host_bytes or 0)} of host memory: {what}. There, {does}.{limit}"


def _disk_does(planner: Planner, use: DiskUse) -> str:
    least = "" if use.is_judged else "at least "
    text = f"a GiB of it brings {least}{_amount(use.gib_gain)} {unit_of_gain(planner)}"
    left = planner.demand_left(use.result)
    if left is not None:
        text += f". Both together leave {_accelerators(left)} busy"
    if use.writes_per_day is None or use.busy is None:
        return text
    written = f"It is written from end to end {use.writes_per_day:.2g} times a day"
    return f"{text}. {written}. It is busy for {use.busy:.1%} of the time"


def _on_traffic(planner: Planner, plan: Plan) -> str:
    workload = planner.workload
    time = f" in {format_seconds(workload.duration_s)}" if workload.duration_s else ""
    asks = (
        f"{format_count(workload.num_requests, 'request')}{time} {'asks' if workload.num_requests == 1 else 'ask'} for"
    )
    return (
        f"{asks} {format_bytes(workload.num_unique * planner.chunk_bytes)} of different KV; a cache for all of it would find "
        f"{plan.everything.prefix_hit_ratio:.1%}, from the first request on."
    )


def _on_length(planner: Planner, plan: Plan) -> str | None:
    """What the trace is too short to tell; ``None`` if it tells all."""
    judged, everything = plan.longest_judged_bytes, planner.workload.num_unique * planner.chunk_bytes
    if judged >= everything:
        return None
    text = (
        f"The trace is too short for sizes above {format_bytes(judged)}: they are not full after half of it, and most of what "
        f"they would keep longer comes back after its end."
    )
    if not planner.has_rates:
        return text
    longer = planner.workload.arrivals_s[-1] - planner.workload.arrivals_s[0]
    return f"{text} To judge {format_bytes(2 * judged)}, record about {format_seconds(2 * longer)}."


def _on_tier(planner: Planner, tier: str) -> str:
    costs = planner.costs
    limit = costs.break_even_tokens_per_s(tier)
    assert limit is not None, "a plan knows the bytes per token"
    speed = _per_s(costs.bytes_per_s[tier])
    pays = planner.tier_pays(tier)
    if pays is None:
        return (
            f"Loading from {tier} at {speed} pays as long as prefill computes less than {limit:,.0f} tokens per second."
        )
    rate = costs.prefill_tokens_per_s or 0.0
    if pays:
        return f"Loading from {tier} at {speed} is {limit / rate:.1f} times as fast as prefill at {rate:,.0f} tokens/s."
    return (
        f"Loading from {tier} at {speed} does not pay: it brings {limit:,.0f} tokens per second, and prefill computes "
        f"{rate:,.0f}."
    )


def _what_it_does(planner: Planner, step: Step) -> str:
    left = planner.demand_left(step.result)
    text = (
        f"{planner.saved_share(step.result):.1%} of prefill is saved"
        if left is None
        else f"prefill keeps {_accelerators(left)} busy"
    )
    first = len(planner.workload.ends) - step.result.num_requests + 1
    found = f"{step.result.prefix_hit_ratio:.1%} of the blocks asked for are found"
    text += f". From request {first:,} on, when it is full, {found}."
    return text if step.is_judged else f"{text} The trace is too short to fill it."


def _accelerators(number: float) -> str:
    text = f"{number:.2g}"
    return f"{text} accelerator{'' if text == '1' else 's'}"


def _per(planner: Planner) -> str:
    return "per hour" if planner.has_rates else "per 1,000 requests"


def _per_s(num_bytes: float | None) -> str:
    """A bandwidth for people, in units of 1000."""
    rate = num_bytes or 0.0
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _amount(number: float) -> str:
    return f"{number:.2g}" if abs(number) < 100 else f"{number:,.0f}"
