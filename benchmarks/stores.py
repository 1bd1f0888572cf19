"""Shared stores in one run, in turns: MB/s that a worker's threads store and load over a directory, Valkey and Mooncake.

Everything is on this machine: it shows what the way to each store costs, not what networks do. ``make test-mooncake`` makes an
environment that has all of them: ``.venv-mooncake/bin/python -m benchmarks stores``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np

from benchmarks.handoff import PACKAGES, store_of
from benchmarks.tiers import MIB, NAMESPACE
from cargohold.tiers import JobKind, JobStatus, Opening, QueueConfig, SharedTierConfig, TierJob, TierQueue
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.memory import Staging

THREADS = 4
LIMIT_S = 600.0


def run(*, quick: bool) -> dict[str, Any]:
    sizes, total, repeats = ([MIB // 16], MIB, 1) if quick else ([MIB // 4, 2 * MIB, 16 * MIB], 256 * MIB, 5)
    names = ["directory", *(name for name, package in PACKAGES.items() if find_spec(package) is not None)]
    return {
        "load_average_before": round(os.getloadavg()[0], 1),
        "workload": {"threads": THREADS, "bytes_per_pass": total, "repeats": repeats},
        "mb_per_s": [_rates(names, size, total, repeats) for size in sizes],
    }


def _rates(names: list[str], chunk_bytes: int, total: int, repeats: int) -> dict[str, Any]:
    """Measure each store in its turn, once per repeat, with new chunks."""
    rates: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    with ExitStack() as running:
        queues = {name: _queue(name, chunk_bytes, running) for name in names}
        for at in range(repeats):
            keys = [(at * total + number).to_bytes(32, "big") for number in range(total // chunk_bytes)]
            for name, queue in queues.items():
                for kind in (JobKind.STORE, JobKind.LOAD):
                    rates[name][kind.value].append(total / 1e6 / _pass_s(queue, kind, keys, chunk_bytes))
                queue.tier.remove(keys)
    medians = {name: {kind: round(median(of)) for kind, of in kinds.items()} for name, kinds in rates.items()}
    return {"chunk_bytes": chunk_bytes, **medians}


def _queue(name: str, chunk_bytes: int, running: ExitStack) -> TierQueue:
    url = running.enter_context(store_of(name, running.enter_context(tempfile.TemporaryDirectory())))
    opening = Opening(codec=ChunkCodec(NAMESPACE, None, time.time_ns), chunk_sizes=[chunk_bytes])
    tier = SharedTierConfig(url=url, num_threads=THREADS).open(opening)
    queue = TierQueue(tier, time.monotonic, QueueConfig(num_threads=THREADS, max_store_chunks=2**20))
    running.callback(queue.shutdown)
    return queue


def _pass_s(queue: TierQueue, kind: JobKind, keys: list[bytes], chunk_bytes: int) -> float:
    """Return the seconds that a job with all keys takes."""
    memory = Staging(chunk_bytes * len(keys)).view
    np.frombuffer(memory, np.uint8).fill(7)  # so that its pages are there before the clock starts
    buffers = [memory[at : at + chunk_bytes] for at in range(0, len(memory), chunk_bytes)]
    begun = time.perf_counter()
    job = TierJob(time.perf_counter_ns(), kind, keys, time.monotonic() + LIMIT_S, buffers)
    assert queue.perform(job)
    assert job.status is JobStatus.DONE and all(job.succeeded), job.reason
    return time.perf_counter() - begun
