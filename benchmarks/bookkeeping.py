"""What managers cost the scheduler's thread: time per key, longest call, bytes per chunk; beside vLLM's where that is.

Contenders take turns at every operation. Median processor time of the calling thread over the rounds; the garbage collector is
on, as in a server. Bytes per chunk are those beside its key.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from statistics import median
from typing import Any

from benchmarks.admission import measure_admission
from benchmarks.contenders import Contender, MakeContender, contenders

Batch = list[bytes]
STORE_ONE = "store of one chunk with eviction"
STORE_EACH = "store of a chunk of each of 16 prefixes with eviction"
NUM_KEYS = {STORE_ONE: 1, STORE_EACH: 16}
"""Keys per batch of operations whose batches have a size of their own."""
OPERATIONS = ("look-up hit", "look-up miss", "touch", "load", "store", "store with eviction", STORE_ONE, STORE_EACH)
SIZES = (10_000, 100_000, 1_000_000)
BATCHES = (64, 1_000)


def run(*, quick: bool) -> dict[str, Any]:
    sizes, batches, rounds = ((2_000,), (64,), 4) if quick else (SIZES, BATCHES, 300)
    makers = contenders()
    rows = [row for size in sizes for batch in batches for row in _measure(makers, size, batch, rounds)]
    memory = [_bytes_per_chunk(makers, size) for size in sizes]
    admissions = [measure_admission(*((512, 0, 2) if quick else (131_072, others, 9))) for others in (0, 500_000)]
    return {
        "workload": {
            "key_bytes": 36,
            "rounds": rounds,
            "clock": "processor time of the calling thread",
            "garbage collection": "on, as in a server: a full pass counts for the manager that has its turn",
            "keys": "batches are prefixes, asked for with other objects than they were stored with",
        },
        "rows": rows,
        "bytes_per_chunk_beside_its_key": memory,
        "admission": admissions[: 1 if quick else None],
        "summary": _summary(rows, memory),
    }


def _measure(makers: dict[str, MakeContender], size: int, batch: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure every operation of every contender; contenders take turns."""
    names = list(makers)
    tiers = {name: makers[name](size) for name in names}
    times: dict[str, dict[str, list[float]]] = {name: {operation: [] for operation in OPERATIONS} for name in names}
    prefixes = [_new_prefix(number, batch) for number in range(size // batch)]
    for prefix in prefixes:
        for name in names:
            times[name]["store"].append(_time(tiers[name].store, _copy(prefix)))
    # Prefixes that may still be there, per contender: each policy keeps others.
    present = {name: list(prefixes) for name in names}
    generator = random.Random(size)
    gc.collect()
    for number in range(rounds):
        incoming = _new_prefix(1_000_000 + number, batch)
        absent = _new_prefix(2_000_000 + number, batch)
        for name in names:
            tier, mine = tiers[name], times[name]
            # Managers may remember the last answer, so no prefix is asked for right after the look-up that chose it.
            found, used, loaded = (_choose(tier, present[name], generator) for _ in range(3))
            mine["look-up hit"].append(_time(tier.lookup, _copy(found)))
            mine["touch"].append(_time(tier.touch, _copy(used)))
            mine["load"].append(_time(tier.load, _copy(loaded)))
            mine["look-up miss"].append(_time(tier.lookup, _copy(absent)))
            mine["store with eviction"].append(_time(tier.store, _copy(incoming)))
            mine[STORE_ONE].append(_time(tier.store, _new_prefix(3_000_000 + number, 1)))
            mine[STORE_EACH].append(_time(tier.store_each, _new_prefix(4_000_000 + number, NUM_KEYS[STORE_EACH])))
            present[name].append(incoming)
    for name in names:
        for operation, seconds in times[name].items():
            yield {
                "manager": name,
                "chunks": size,
                "batch": batch,
                "operation": operation,
                "ns_per_key": round(median(seconds) / NUM_KEYS.get(operation, batch) * 1e9, 1),
                "longest_call_ms": round(max(seconds) * 1e3, 3),
            }


def _choose(tier: Contender, present: list[Batch], generator: random.Random) -> Batch:
    """A random prefix that is still there as a whole. Prefixes met that are not are removed from ``present``."""
    while True:
        at = generator.randrange(len(present))
        present[at], present[-1] = present[-1], present[at]
        if tier.lookup(present[-1]) == len(present[-1]):
            return present[-1]
        present.pop()


def _time(call: Callable[[Sequence[bytes]], object], keys: Batch) -> float:
    start = time.thread_time()
    call(keys)
    return time.thread_time() - start


def _new_prefix(number: int, length: int) -> Batch:
    return [sha256(f"{number} {place}".encode()).digest() + bytes(4) for place in range(length)]


def _copy(keys: Batch) -> Batch:
    """New objects with the same bytes, whose hashes Python has not computed yet."""
    return [bytes(bytearray(key)) for key in keys]


def _bytes_per_chunk(makers: dict[str, MakeContender], size: int) -> dict[str, Any]:
    """Bytes per chunk of each contender, in a full tier of which a quarter was replaced. Keys are not counted."""
    batch = 500
    prefixes = [_new_prefix(number, batch) for number in range(size // batch * 5 // 4)]
    row: dict[str, Any] = {"chunks": size}
    for name, make in makers.items():
        gc.collect()
        tracemalloc.start()
        tier = make(size)
        for prefix in prefixes:
            tier.store(prefix)
        gc.collect()
        row[name] = round(tracemalloc.get_traced_memory()[0] / size, 1)
        tracemalloc.stop()
    return row


def _summary(rows: list[dict[str, Any]], memory: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures for which there are aims."""
    ns = {(row["manager"], row["chunks"], row["batch"], row["operation"]): row["ns_per_key"] for row in rows}
    sizes = sorted({row["chunks"] for row in rows})
    ours = [name for name in {row["manager"]: None for row in rows} if name.startswith("cargohold")]
    summary: dict[str, Any] = {
        "longest_call_ms": {
            name: max(row["longest_call_ms"] for row in rows if row["manager"] == name) for name in ours
        },
        "growth_of_ns_per_key_from_smallest_to_largest": {
            name: {
                operation: round(
                    median(
                        ns[name, sizes[-1], batch, operation] / ns[name, sizes[0], batch, operation]
                        for batch in {row["batch"] for row in rows}
                    ),
                    2,
                )
                for operation in OPERATIONS
            }
            for name in ours
        },
    }
    for theirs in ("lru", "arc"):
        if f"vllm {theirs}" in memory[0]:
            summary[f"times_faster_than_vllm_{theirs}"] = {
                name: {
                    operation: [
                        round(ns[f"vllm {theirs}", size, batch, operation] / ns[name, size, batch, operation], 1)
                        for size in sizes
                        for batch in sorted({row["batch"] for row in rows})
                    ]
                    for operation in OPERATIONS
                }
                for name in ours
            }
    return summary
