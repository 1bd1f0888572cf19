"""Offering again what the device has and host memory lacks: what it brings back, and what it costs in writes and time."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.admission import Request, fill
from benchmarks.policies import MADE, real_traces
from cargohold.cache import make_manager
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.stores import EagerStores, MakeStores
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler
from cargohold.engine.core.block_pool import BlockPool
from cargohold.engine.core.request import Request as EngineRequest
from cargohold.engine.core.request import RequestTimes, SamplingParams, SchedulerStep, StepOutput
from cargohold.engine.core.request_queues import SchedulerConfig
from cargohold.engine.core.scheduler import Scheduler
from cargohold.lab.replay.traces import read_trace
from cargohold.lab.replay.workload import load_workload
from cargohold.lab.simulation.run import quiet_logging
from cargohold.protocol import (
    AttentionKind,
    KVCacheGroup,
    KVCacheLayout,
    KVConnectorOutput,
    SchedulerEnvironment,
    TransferOutcome,
)

Requests: TypeAlias = Sequence[Sequence[int]]
"""Prompts as the numbers of their chunks, in the order of arrival."""

POLICIES = ("reuse-index", "lru")
DEVICE_PART = 0.05
TIER_SIZES = (0.5, 1, 2, 4)
GIVEN_UP_PART = 0.1
MAX_CHUNKS = 100_000
NUM_HOT, HOT_CHUNKS = 20, 50
STEP_CHUNKS = 16


class OfferedOnce(EagerStores):
    """Offers what was computed for a request, and never what the device had already."""

    def begin_request(
        self, state: RequestState, num_ready: Sequence[int], num_computed_tokens: int, num_hit_tokens: int
    ) -> None:
        state.offer_from([num_hit_tokens // keys.chunk_tokens for keys in state.keys])


@dataclass(frozen=True)
class Setting:
    """What is measured with: sizes in chunks, and the part of stores that are given up."""

    policy: str
    device: int
    tier: int
    given_up: float


def run(*, quick: bool) -> dict[str, Any]:
    traces = {"made": MADE, **({} if quick else real_traces())}
    policies, sizes = (POLICIES[1:], (2,)) if quick else (POLICIES, TIER_SIZES)
    rows: list[dict[str, Any]] = []
    with quiet_logging():  # stores are given up on purpose
        for name, requests in {
            "hot": _hot(10 if quick else 200),
            **{n: _read(at)[: 200 if quick else None] for n, at in traces.items()},
        }.items():
            device = NUM_HOT * (HOT_CHUNKS + 4) if name == "hot" else _device_size(requests)
            for policy, size, given_up in product(policies, sizes, (0.0, GIVEN_UP_PART)):
                row = {"trace": name, "policy": policy, "tier": size, "given_up": given_up}
                rows.append({**row, **_compare(requests, Setting(policy, device, int(size * device), given_up))})
                print(rows[-1], flush=True)
    return {
        "workload": {
            "hot": f"{NUM_HOT} prompts of {HOT_CHUNKS} chunks in turns, all of which the device holds, each with a new chunk",
            "device": f"{DEVICE_PART:.0%} of the trace's different chunks, but no less than its longest prompt",
            "tier": "host memory, in sizes of the device pool",
            "given_up": "part of the stores whose copy does not happen",
            "restored": "chunks loaded per 100 of prompts; once: if only computed chunks are offered",
            "written": "chunks copied to host memory per 100 of prompts",
            "requests": f"one after the other, at most {MAX_CHUNKS:,} chunks of a trace",
        },
        "rows": rows,
        "restored_more_with_stores_given_up_percent": _range(rows, GIVEN_UP_PART, "restored"),
        "restored_more_without_failures_percent": _range(rows, 0.0, "restored"),
        "written_more_without_failures_percent": _range(rows, 0.0, "written"),
        "admission": _measure_admission(*((512, 3) if quick else (8_192, 51))),
    }


def _hot(num_rounds: int) -> Requests:
    """Prompts that stay on the device, asked for in turns."""
    prompts = [list(range(at * HOT_CHUNKS, (at + 1) * HOT_CHUNKS)) for at in range(NUM_HOT)]
    return [[*prompt, NUM_HOT * HOT_CHUNKS + at] for at in range(num_rounds) for prompt in prompts]


def _read(file: Path) -> Requests:
    """Return the prompts of a trace, as many as have ``MAX_CHUNKS`` chunks."""
    workload = load_workload(read_trace([file]))
    chunks = workload.chunks.tolist()
    prompts = [chunks[start:end] for start, end, _ in workload.spans() if start < end]
    lengths = accumulate(map(len, prompts))
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= MAX_CHUNKS]


def _device_size(requests: Requests) -> int:
    num_unique = len({chunk for prompt in requests for chunk in prompt})
    return max(int(num_unique * DEVICE_PART), max(map(len, requests)) + 2)


def _compare(requests: Requests, setting: Setting) -> dict[str, float]:
    again, once = (_serve(requests, setting, make) for make in (EagerStores, OfferedOnce))
    return {
        "device_hits": again["device_hit"],
        **{f"{what}_once": once[what] for what in ("restored", "written")},
        **{f"{what}_again": again[what] for what in ("restored", "written")},
    }


def _serve(requests: Requests, setting: Setting, make_stores: MakeStores) -> dict[str, float]:
    """Serve requests one after the other. Blocks are one token long, and a chunk's number is its token."""
    group = KVCacheGroup(0, AttentionKind.FULL, 1, ("layer",), None)
    layout = KVCacheLayout((group,), setting.device + 1, 1, 1)
    side = OffloadingScheduler(
        OffloadConfig(host_bytes="1GiB", policy=setting.policy),
        SchedulerEnvironment(layout, time.monotonic, max_step_tokens=STEP_CHUNKS),
        make_manager(setting.policy, setting.tier),
        make_stores=make_stores,
    )
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=STEP_CHUNKS, max_model_len=10**9)
    scheduler = Scheduler(config, layout, side, time.monotonic)
    luck = random.Random(0)
    total: Counter[str] = Counter()
    for number, prompt in enumerate(requests):
        request = _engine_request(f"r{number}", list(prompt))
        scheduler.add_request(request)
        while scheduler.has_work():
            scheduler.update_from_output(_carry_out(scheduler.schedule(), setting.given_up, luck, total))
        total["chunks"] += len(prompt)
        total["device_hit"] += request.num_first_device_tokens
        total["restored"] += request.num_reused_tokens - request.num_device_tokens
    return {what: round(100 * total[what] / total["chunks"], 2) for what in ("device_hit", "restored", "written")}


def _engine_request(name: str, tokens: list[int]) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        all_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        times=RequestTimes(arrived=0.0),
        hash_block_tokens=1,
    )


def _carry_out(step: SchedulerStep, given_up: float, luck: random.Random, total: Counter[str]) -> StepOutput:
    """End a step as its workers would, all of its copies included; some stores are given up."""
    metadata: Any = step.connector_metadata
    jobs: dict[int, TransferOutcome] = {}
    for store in getattr(metadata, "stores", ()):
        is_lost = luck.random() < given_up
        jobs[store.job_id] = TransferOutcome.ABANDONED if is_lost else TransferOutcome.DONE
        total["written"] += len(store.block_ids)
    loads = getattr(metadata, "loads", ())
    jobs.update((load.job_id, TransferOutcome.DONE) for load in loads)
    report = KVConnectorOutput(finished_recving=frozenset(load.request_id for load in loads), jobs=jobs)
    sampled = {share.request_id: 0 for share in step.scheduled if share.sample is not None}
    return StepOutput(sampled=sampled, connector=report)


def _range(rows: Sequence[Mapping[str, Any]], given_up: float, what: str) -> dict[str, list[float]]:
    """By size of the tier, the least and the most by which offering again changes a figure, in per cent."""
    changes: dict[str, list[float]] = {}
    for row in rows:
        if row["given_up"] == given_up and row[f"{what}_once"] >= 1:
            change = round(100 * (row[f"{what}_again"] / row[f"{what}_once"] - 1), 1)
            changes.setdefault(str(row["tier"]), []).append(change)
    return {size: [min(of_size), max(of_size)] for size, of_size in changes.items()}


def _measure_admission(num_chunks: int, repeats: int) -> dict[str, Any]:
    """Measure the admission of a request of which the device and the tier have every chunk."""
    times = {
        name: _admissions(num_chunks, repeats, make)
        for name, make in (("offered_again", EagerStores), ("offered_once", OfferedOnce))
    }
    return {
        "chunks": num_chunks,
        **{f"{name}_ns_per_chunk": round(seconds / num_chunks * 1e9, 2) for name, seconds in times.items()},
    }


def _admissions(num_chunks: int, repeats: int, make_stores: MakeStores) -> float:
    group = KVCacheGroup(0, AttentionKind.FULL, 1, ("layer",), None)
    layout = KVCacheLayout((group,), num_chunks + 2, 1, 1)
    manager = make_manager(POLICIES[0], 2 * num_chunks)
    environment = SchedulerEnvironment(layout, time.monotonic, max_step_tokens=num_chunks)
    side = OffloadingScheduler(OffloadConfig(host_bytes="1GiB"), environment, manager, make_stores=make_stores)
    pool: Any = BlockPool(num_chunks + 2)
    side.bind_scheduler_context(pool)
    blocks = (tuple(block.block_id for block in pool.allocate(num_chunks + 1)),)
    hashes = fill(manager, "prompt", num_chunks, num_chunks)
    times = []
    for at in range(repeats):
        request = Request(f"r{at}", hashes, range(num_chunks + 1))
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, num_chunks) == (0, False)
        start = time.thread_time()
        side.update_state_after_alloc(request, blocks, 0)
        times.append(time.thread_time() - start)
    return median(times)
