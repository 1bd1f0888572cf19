"""How many prefix hits each replacement policy gets, beside the best that is possible, on real traces and a made one.

Parts of traces, by themselves, are measured by ``benchmarks.parts``.

**Rejected where the ends of turns multiply the rate of reuse**, on every fourth coding session (25 and 22 % of the gap
closed): rates of their own for each end and class (21 and 18 %), 65,536 records in place of 16,384 (22 and 19 %), other
limits of the groups (20 to 24 %). On LMCache's agent runs, where the default closes 28, 36 and 45 % at 0.5, 1 and 2 %:
the number of the turn (28, 33, 42), the last two pauses (25, 27, 25 and 23, 33, 33), the length of the answer (29, 38,
20), all of these (25, 36, 37). These traces have 1,100 to 5,800 requests: too few to tell a gain of three points from
chance.

**Rejected at admission**: to refuse a chunk only if its victim is worth 1.25 or 1.5 times as much. On the parts on
which 1.5 was chosen, 25 % of the gap was closed in place of 23; on the others (57 cells) 21.3 in place of 21.0, and the
worst cell was at -0.6 points in place of -0.7. For that, hints closed 41, 44 and 41 % on LMCache's runs in place of 48,
56 and 52, and at 1.25 the chat trace at 1 % was written three times as often. On the parts for choosing, too:
confidence that counts requests and not chunks (21 %), three times as much weight of what classes have in common (22 %),
and to add to 1.5 a preference for recent victims, of a tenth for each doubling of the age (22 %). Without any refusal,
coding agents have the hits of LRU.

**Rejected: a shadow of LRU** that holds up to 1,024 sampled tags, and takes over for a while where it found so many more
of them than the tier (set duelling: M. Qureshi et al., "Adaptive Insertion Policies", ISCA 2007). At 0.5 to 5 %, with
the lead of 2 % that was best on parts for choosing (26.5 % of the gap closed in place of 26.9, worst cell -0.4 points in
place of -0.6), held-out parts closed 27.9 % in place of 30.1, and their worst cell stayed at -0.5; what it gained, it
gained on every 16th coding session (-0.3 in place of -0.7). With a lead of 0.5 %, 20.5 %; with 5 %, a cell lost 0.9.

**Ages from the end of a use, and a mean request as the least time that a slot is taken**: on eight parts (38 cells), two
of them of other sources, those of known sources closed 24 % of the gap in place of 15, the others 36 in place of 33, and
the worst cell lost 0.4 points in place of 1.3. With other times in place of a mean request: none 24 and 21 %, a tenth of it
24 and 28, a third 24 and 32, a tenth of the tier 26 and 31, but on six other parts 13 in place of 15. To take the index in
the middle of an age bucket changed nothing; to compare with victims as old as they are when the request has ended loses all
that refusing wins (2 % on LMCache's agents, 0 on coding agents).

**Rejected: coarse classes first.** Before, eight learners with fewer classes, or with fine ones blended into coarse ones as
far as enough requests are known, were tried on parts and on two foreign sources. None was better on both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cargohold.cache.policies import DEFAULT_POLICY, POLICIES
from cargohold.lab.replay.replaying import INFINITE, OPTIMUM, plan_tasks, run_tasks
from cargohold.lab.replay.traces import read_trace
from cargohold.lab.replay.workload import Workload, load_workload

ROOT = Path(__file__).parents[1]
TRACES_ENV = "CARGOHOLD_TRACES"
TRACE_SUFFIX = ".jsonl.zst"
MADE = ROOT / "tests" / "data" / "made_trace.jsonl"
PERCENTS = (0.5, 1, 2, 5, 10, 20)
FLOOR = "lru"
COLUMNS = (*sorted(POLICIES), OPTIMUM)


def run(*, quick: bool) -> dict[str, Any]:
    traces = {"made": MADE, **({} if quick else real_traces())}
    rows: list[dict[str, Any]] = []
    for name, file in traces.items():
        workload = load_workload(read_trace([file]))
        for row in _replay(workload, (10,) if quick else PERCENTS):
            rows.append({"trace": name, **row})
            print(_line(rows[-1]), flush=True)
    return {
        "what": "prefix hits per chunk looked up, in per cent; written chunks per 100 looked up",
        "sizes": "slots, in per cent of the trace's different chunks",
        "rows": rows,
        "default_policy": DEFAULT_POLICY,
        "worst_against_lru_in_points": round(min(_gain(row) for row in rows), 2),
        "best_against_lru_in_points": round(max(_gain(row) for row in rows), 2),
    }


def real_traces() -> Mapping[str, Path]:
    """Traces in the directory that ``TRACES_ENV`` names, by default one beside the repository; smallest first."""
    directory = Path(os.environ.get(TRACES_ENV, ROOT.parent / "shared" / "traces"))
    files = sorted(directory.glob(f"*{TRACE_SUFFIX}"), key=lambda file: file.stat().st_size)
    if not files:
        print(f"no traces in {directory}: set {TRACES_ENV} for real ones")
    return {file.name.removesuffix(TRACE_SUFFIX): file for file in files}


def _replay(workload: Workload, percents: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    sizes = {percent: max(1, round(workload.num_unique * percent / 100)) for percent in percents}
    tasks = plan_tasks([*COLUMNS, INFINITE], [(size,) for size in sizes.values()])
    results = [result for found in run_tasks(workload, tasks) for result in found]
    hits = {(result.policy, result.capacities[0]): round(result.prefix_hit_ratio * 100, 2) for result in results}
    written = {
        (result.policy, result.capacities[0]): round(result.tiers[0].stored / result.num_lookups * 100, 2)
        for result in results
        if result.tiers
    }
    (without_eviction,) = (ratio for (policy, _), ratio in hits.items() if policy == INFINITE)
    for percent, size in sizes.items():
        yield {
            "size_percent": percent,
            "slots": size,
            "hits": {policy: hits[policy, size] for policy in COLUMNS},
            "without_eviction": without_eviction,
            "written": {policy: written[policy, size] for policy in sorted(POLICIES)},
        }


def _gain(row: Mapping[str, Any]) -> float:
    """Points by which the default policy beats leaf-first LRU."""
    gain: float = row["hits"][DEFAULT_POLICY] - row["hits"][FLOOR]
    return gain


def _line(row: Mapping[str, Any]) -> str:
    """A row of a Markdown table."""
    cells = [row["trace"], f"{row['size_percent']:g}", f"{row['slots']:,}"]
    cells += [f"{row['hits'][policy]:.1f}" for policy in COLUMNS]
    return f"| {' | '.join(cells)} |"
