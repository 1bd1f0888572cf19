"""How many prefix hits each replacement policy gets, beside the best that is possible, on real traces and a made one."""

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
