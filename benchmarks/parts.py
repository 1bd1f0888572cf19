"""Points that the default policy wins beyond LRU on parts of traces, and where sessions begin at other times.

Each part says what it was used for. A change is tried on the parts for trying, and judged on those that are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from statistics import mean
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.policies import FLOOR, MADE, real_traces
from cargohold.cache.policies import DEFAULT_POLICY
from cargohold.lab.replay.replaying import OPTIMUM, plan_tasks, run_tasks
from cargohold.lab.replay.traces import TraceRequest, read_trace
from cargohold.lab.replay.workload import Workload, load_workload

PERCENTS: Final = (0.5, 1, 2, 5, 10, 20)
COUNTED_FROM: Final = 0.5
"""A cell counts in the mean if the optimum is so many points beyond LRU: of less, parts say nothing."""

HELD_OUT: Final = "held out"
"""No constant was chosen on it, although another part of its trace may have been looked at."""
FITTED: Final = "fitted"
"""Constants of the policy, the limits of its groups of ages, were chosen on these sessions."""
TRIED: Final = "tried"
"""Changes are tried on it."""

_Requests = list[TraceRequest]
_CHAT, _TOOLS = "mooncake_conversation_h1", "mooncake_toolagent_head1000"
_AGENTS, _CODING = "lmcache_agent_64", "claude_code_512_odd"


class Part(NamedTuple):
    """Requests of a trace.

    Attributes:
        name: what it is called.
        trace: the trace.
        choose: makes its requests of the trace's.
        use: what it was used for: ``HELD_OUT``, ``FITTED`` or ``TRIED``.
    """

    name: str
    trace: str
    choose: Callable[[_Requests], _Requests]
    use: str


def _cut(first: int, end: int, requests: _Requests) -> _Requests:
    return requests[first:end]


def _sessions(every: int, first: int, seed: int | None, requests: _Requests) -> _Requests:
    """Every so manieth session; with a seed, they begin at other times."""
    numbers = {session: number for number, session in enumerate(dict.fromkeys(one.session_id for one in requests))}
    chosen = [one for one in requests if numbers[one.session_id] % every == first]
    return chosen if seed is None else _begun_anew(chosen, Random(seed))


def _begun_anew(requests: _Requests, random: Random) -> _Requests:
    """Let sessions begin anywhere between the first and the last beginning; pauses within them stay."""
    begun: dict[Any, float] = {}
    for one in requests:
        begun.setdefault(one.session_id, one.timestamp_ms or 0)
    moved = {session: random.uniform(0, max(begun.values())) - begun[session] for session in sorted(begun)}
    later = [
        msgspec.structs.replace(one, timestamp_ms=(one.timestamp_ms or 0) + moved[one.session_id]) for one in requests
    ]
    return sorted(later, key=lambda one: one.timestamp_ms or 0)


def _part(use: str, name: str, trace: str, choose: Callable[..., _Requests], *arguments: int | None) -> Part:
    return Part(name, trace, partial(choose, *arguments), use)


PARTS: Final = (
    _part(HELD_OUT, "chat, the first 501", _CHAT, _cut, 0, 501),
    _part(HELD_OUT, "chat, the first 1,001", _CHAT, _cut, 0, 1_001),
    _part(HELD_OUT, "chat, 1,001 from number 2,000 on", _CHAT, _cut, 2_000, 3_001),
    _part(HELD_OUT, "tool agent, the first 400", _TOOLS, _cut, 0, 400),
    _part(HELD_OUT, "LMCache's agents, other beginnings", _AGENTS, _sessions, 1, 0, 1),
    _part(HELD_OUT, "the same, others again", _AGENTS, _sessions, 1, 0, 2),
    _part(FITTED, "coding agents, every 4th session", _CODING, _sessions, 4, 0, None),
    _part(FITTED, "coding agents, every 16th session", _CODING, _sessions, 16, 0, None),
    _part(HELD_OUT, "others of these, other beginnings", _CODING, _sessions, 16, 7, 1),
    _part(TRIED, "chat, 701 from number 1,200 on", _CHAT, _cut, 1_200, 1_901),
    _part(TRIED, "chat, 2,001 from number 3,200 on", _CHAT, _cut, 3_200, 5_201),
    _part(TRIED, "chat, 1,501 from number 4,000 on", _CHAT, _cut, 4_000, 5_501),
    _part(TRIED, "tool agent, 300 from number 350 on", _TOOLS, _cut, 350, 650),
    _part(TRIED, "tool agent, from number 500 on", _TOOLS, _cut, 500, 1_000),
    _part(TRIED, "LMCache's agents, beginnings 11", _AGENTS, _sessions, 1, 0, 11),
    _part(TRIED, "LMCache's agents, beginnings 12", _AGENTS, _sessions, 1, 0, 12),
    _part(TRIED, "every 2nd of them, beginnings 13", _AGENTS, _sessions, 2, 1, 13),
    _part(TRIED, "coding agents, every 16th from the 4th", _CODING, _sessions, 16, 3, None),
    _part(TRIED, "every 16th from the 6th, beginnings 11", _CODING, _sessions, 16, 5, 11),
    _part(TRIED, "every 16th from the 12th, beginnings 12", _CODING, _sessions, 16, 11, 12),
    _part(TRIED, "every 8th from the 3rd, beginnings 13", _CODING, _sessions, 8, 2, 13),
)
_QUICK: Final = (_part(HELD_OUT, "made, the first 300", "made", _cut, 0, 300),)


def run(*, quick: bool) -> dict[str, Any]:
    files = {"made": MADE, **({} if quick else real_traces())}
    parts = _QUICK if quick else [part for part in PARTS if part.trace in files]
    rows: list[dict[str, Any]] = []
    for part in parts:
        workload = load_workload(iter(part.choose(list(read_trace([files[part.trace]])))))
        row: dict[str, Any] = {"requests": part.name, "use": part.use, "cells": list(_cells(workload))}
        rows.append(row)
        print(part.name, *(f"{cell['beyond_lru']:+.2f}" for cell in row["cells"]), flush=True)
    return {
        "what": "points of prefix hits beyond leaf-first LRU, of the default policy and of the optimum",
        "sizes": "slots, in per cent of the part's different chunks",
        "rows": rows,
        "by_use": {use: _summary([row for row in rows if row["use"] == use]) for use in (HELD_OUT, FITTED, TRIED)},
    }


def _cells(workload: Workload) -> Iterator[dict[str, float]]:
    sizes = {percent: max(1, round(workload.num_unique * percent / 100)) for percent in PERCENTS}
    tasks = plan_tasks([FLOOR, DEFAULT_POLICY, OPTIMUM], [(size,) for size in sizes.values()])
    results = [result for found in run_tasks(workload, tasks) for result in found]
    hits = {(result.policy, result.capacities[0]): 100 * result.prefix_hit_ratio for result in results}
    for percent, size in sizes.items():
        floor = hits[FLOOR, size]
        yield {
            "size_percent": percent,
            "slots": size,
            "lru": round(floor, 2),
            "beyond_lru": round(hits[DEFAULT_POLICY, size] - floor, 2),
            "optimum_beyond_lru": round(hits[OPTIMUM, size] - floor, 2),
        }


def _summary(rows: list[Mapping[str, Any]]) -> dict[str, float] | None:
    cells = [cell for row in rows for cell in row["cells"]]
    counted = [cell for cell in cells if cell["optimum_beyond_lru"] >= COUNTED_FROM]
    if not counted:
        return None
    return {
        "cells": len(counted),
        "mean_part_of_gap": round(mean(cell["beyond_lru"] / cell["optimum_beyond_lru"] for cell in counted), 3),
        "worst_points": min(cell["beyond_lru"] for cell in cells),
    }
