"""Replays of LRU: look-ups per second, alone and on all cores, and memory per block.

Look-ups are blocks of prompts. Speed depends on how many blocks a request has, because managers work on whole requests at a
time. Memory is what a replay holds beyond the trace itself, divided by the number of different blocks, with a tier for all of
them; the check at its end takes more for a moment.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cargohold.cache import TierManager
from cargohold.lab.replay.replaying import plan_tasks, replay, run_tasks
from cargohold.lab.replay.tiers import run_tiers
from cargohold.lab.replay.traces import read_trace
from cargohold.lab.replay.workload import Workload, load_workload

TRACES_ENV = "CARGOHOLD_TRACES"
_ROOT = Path(__file__).parents[1]
_MADE = _ROOT / "tests" / "data" / "made_trace.jsonl"
_PERCENT = (1, 5, 10, 50)


def run(*, quick: bool) -> dict[str, Any]:
    directory = Path(os.environ.get(TRACES_ENV, _ROOT.parent / "shared" / "traces"))
    files = [_MADE, *([] if quick else sorted(directory.glob("*.jsonl.zst")))]
    return {file.name.removesuffix(".zst").removesuffix(".jsonl"): _measure(file) for file in files}


def _measure(file: Path) -> dict[str, Any]:
    started = time.perf_counter()
    workload = load_workload(read_trace([file]))
    loaded_s = time.perf_counter() - started
    sizes = [(max(1, percent * workload.num_unique // 100),) for percent in _PERCENT]
    started_cpu = time.process_time()
    for _ in replay(workload, "lru", sizes):
        pass
    cpu_s = time.process_time() - started_cpu
    started = time.perf_counter()
    for _ in run_tasks(workload, plan_tasks(["lru"], sizes), os.cpu_count() or 1):
        pass
    together_s = time.perf_counter() - started
    num_lookups = len(sizes) * workload.num_lookups
    return {
        "lookups": workload.num_lookups,
        "lookups_per_request": round(workload.num_lookups / workload.num_requests, 1),
        "unique_blocks": workload.num_unique,
        "read_lookups_per_s": round(workload.num_lookups / loaded_s),
        "lru_lookups_per_cpu_s": round(num_lookups / cpu_s),
        "lru_lookups_per_s_on_all_cores": round(num_lookups / together_s),
        "bytes_per_block": round(_held_bytes(workload) / workload.num_unique),
    }


def _held_bytes(workload: Workload) -> int:
    """Bytes allocated when the last request has been replayed."""
    held: list[int] = []
    check = TierManager.check

    def note_and_check(manager: TierManager) -> None:
        held.append(tracemalloc.get_traced_memory()[0])
        check(manager)

    tracemalloc.start()
    try:
        with patch.object(TierManager, "check", note_and_check):
            run_tiers(workload, "lru", (workload.num_unique,))
    finally:
        tracemalloc.stop()
    return held[0]
