"""What hints of an orchestrator are worth on agent traces: prefix hits, and the time that sessions wait, with and without.

Hits in per cent, and the part of the distance from LRU to the optimum that is closed; LMCache's trace does not say how turns
ended.

================  =====  ====  =======  ==========  =======  =========  ===========
trace             size   lru   default  with hints  optimum  default's  with hints'
================  =====  ====  =======  ==========  =======  =========  ===========
LMCache's agents  0.5 %  22.0  23.7     24.6        28.6     26 %       40 %
LMCache's agents  1 %    38.7  39.7     40.7        45.6     14 %       29 %
LMCache's agents  2 %    53.0  54.5     54.5        61.1     20 %       19 %
LMCache's agents  5 %    74.3  76.3     76.6        79.6     38 %       44 %
coding agents     0.5 %  48.7  57.8     58.3        70.3     42 %       44 %
coding agents     1 %    77.5  80.1     80.8        86.8     27 %       35 %
coding agents     2 %    91.7  91.9     92.4        94.3     9 %        26 %
coding agents     5 %    95.3  95.2     95.5        95.8     -26 %      49 %
================  =====  ====  =======  ==========  =======  =========  ===========

**Rejected**, with an earlier state of the policy, on LMCache's agents, in place of 37, 48, 47 and 38 %: that all goes first
that the session has used, in earlier branches, too (39, 52, 36, 47: one point more on average, for a memory of all
sessions); or what no other session has used (36, 47, 47, 38); that the last request's chunks are dropped at once (37, 44,
44, 26). That those of sessions go first which have been silent for 5, 15 or 60 minutes changes nothing there (29 or 30 %, as
without hints).

With an earlier state of the policy, what the front does for clients that never say that a session is over,
to keep for 300 s what waits for a tool, in half of
the tier at most, changes the default's hits by +0.3, -0.1, +1.0 and +0.8 points on LMCache's agents, if every turn calls a
tool, and by -0.2, +0.4 and -0.4 on every fourth coding session at 0.5, 1 and 2 %. If last requests say so, by +1.2, +0.9,
+1.8 and +0.5, and by +0.3, +0.9 and -0.2. Where LMCache's sessions begin at six other times, keeping alone changes hits by
+0.2, -0.1, -0.2 and -0.3 on average, from -1.7 to +0.8. A smaller part of the tier is no better.

**Rejected** before, too: to say as well which sessions that wait go first, by how long pauses behind turns that ended alike
have lasted, and what the next prompt will not use. It took four times the code, and closed 45, 51, 57 and 40 % on LMCache's
agents in place of 44, 55, 46 and 35, and 47 in place of 44 on coding agents at 0.5 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.policies import FLOOR, real_traces
from cargohold.cache.policies import DEFAULT_POLICY
from cargohold.lab.replay.costs import CostModel
from cargohold.lab.replay.replaying import HINTED, OPTIMUM, plan_tasks, run_tasks
from cargohold.lab.replay.traces import TraceRequest, read_trace
from cargohold.lab.replay.workload import UNKNOWN, Workload, load_workload

COSTS = CostModel(bytes_per_token=128 << 10, prefill_tokens_per_s=8000.0)
"""About a model of 8 billion parameters on one accelerator; loads at the model's default, 20 GB/s."""
COLUMNS = (FLOOR, DEFAULT_POLICY, DEFAULT_POLICY + HINTED, OPTIMUM)
PERCENTS = (0.5, 1, 2, 5)
MANY_SESSIONS = 400
"""Of a trace with more sessions than this, every fourth is replayed: minutes in place of an hour."""


def run(*, quick: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    traces = {"made": load_workload(_made())} if quick else _real()
    for name, workload in traces.items():
        if (workload.sessions == UNKNOWN).all():
            skipped.append(name)
            continue
        for row in _replay(workload, (10,) if quick else PERCENTS):
            rows.append({"trace": name, **row})
            print(_line(rows[-1]), flush=True)
    return {
        "what": "prefix hits per chunk looked up, in per cent; hours that all prompts take to be loaded and computed",
        "costs": {
            "bytes_per_token": COSTS.bytes_per_token,
            "prefill_tokens_per_s": COSTS.prefill_tokens_per_s,
            "load_bytes_per_s": COSTS.bytes_per_s["host"],
        },
        "sessions": f"every fourth, of a trace with more than {MANY_SESSIONS}",
        "without_sessions": skipped,
        "rows": rows,
        "worst_against_default_in_points": round(min(_gain(row) for row in rows), 2),
    }


def _real() -> Mapping[str, Workload]:
    return {name: load_workload(_thinned(read_trace([file]))) for name, file in real_traces().items()}


def _thinned(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    found = list(requests)
    sessions = {session: number for number, session in enumerate(dict.fromkeys(one.session_id for one in found))}
    every = 4 if len(sessions) > MANY_SESSIONS else 1
    return (one for one in found if sessions[one.session_id] % every == 0)


def _made() -> Iterator[TraceRequest]:
    """Six agents whose tools are quick or slow, and who wait for a person for minutes, in turn."""
    events = []
    for session in range(6):
        now = session * 3.0
        for turn in range(12):
            events.append((now, session, turn))
            now += (5.0, 20.0, 200.0)[(session + turn) % 3]
    for at, session, turn in sorted(events):
        ids = [1000 * session + number for number in range(8 + turn)]
        stop = "answer" if (session + turn) % 3 == 2 else "tool_call"
        yield TraceRequest(
            hash_ids=ids, timestamp_ms=1000 * at, input_length=16 * len(ids), session_id=session, stop=stop
        )


def _slots(workload: Workload, percent: float) -> int:
    return max(1, round(workload.num_unique * percent / 100))


def _part(hits: float, floor: float, best: float) -> float | None:
    """The part of the gap between LRU and the optimum that is closed."""
    return round((hits - floor) / (best - floor), 2) if best > floor else None


def _replay(workload: Workload, percents: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    sizes = {percent: _slots(workload, percent) for percent in percents}
    tasks = plan_tasks(COLUMNS, [(size,) for size in sizes.values()])
    results = {(r.policy, r.capacities[0]): r for found in run_tasks(workload, tasks) for r in found}
    for percent, size in sizes.items():
        found = {policy: results[policy, size] for policy in COLUMNS}
        hits = {policy: round(result.prefix_hit_ratio * 100, 2) for policy, result in found.items()}
        yield {
            "size_percent": percent,
            "slots": size,
            "hits": hits,
            "part_of_gap": {policy: _part(hits[policy], hits[FLOOR], hits[OPTIMUM]) for policy in COLUMNS[1:3]},
            "waiting_h": {
                policy: round((COSTS.waiting_s(result, workload) or 0.0) / 3600, 4) for policy, result in found.items()
            },
        }


def _gain(row: Mapping[str, Any]) -> float:
    """Points by which hints are better than the default policy without them."""
    hits: Mapping[str, float] = row["hits"]
    return hits[DEFAULT_POLICY + HINTED] - hits[DEFAULT_POLICY]


def _line(row: Mapping[str, Any]) -> str:
    """A row of a Markdown table."""
    cells = [row["trace"], f"{row['size_percent']:g}", *(f"{row['hits'][policy]:.2f}" for policy in COLUMNS)]
    cells += ["" if part is None else f"{part:.0%}" for part in row["part_of_gap"].values()]
    cells += [f"{row['waiting_h'][policy]:.2f}" for policy in COLUMNS]
    return f"| {' | '.join(cells)} |"
