"""The disk tier beside fio on the same file system, turn about; and how long a start with many stored chunks takes.

``CARGOHOLD_BENCH_DIR`` names a directory on the file system to measure; by default it is the current one. Without fio, dd with
direct I/O is the yardstick, for sequential patterns.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from cargohold.tiers import (
    DiskTierConfig,
    JobKind,
    LoadOutcome,
    Namespace,
    Opening,
    QueueConfig,
    StoreOutcome,
    TierJob,
    TierQueue,
)
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.memory import Staging

NAMESPACE = Namespace(label="bench", weights="w", config="c", dtype="bfloat16", layout="l", split="rank 0 of 1")
THREADS = 8
MIB = 2**20
PATTERNS = ("write", "read", "randwrite", "randread")


def run(*, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("CARGOHOLD_BENCH_DIR", "."), prefix=".bench-") as directory:
        root = Path(directory)
        sizes, total, repeats = ([64 * 1024], 4 * MIB, 1) if quick else ([1 * MIB, 4 * MIB, 16 * MIB], 512 * MIB, 5)
        chunks, starts = (200, 1) if quick else (100_000, 3)
        return {
            "load_average_before": round(os.getloadavg()[0], 1),
            "real_time_priority": os.sched_getparam(0).sched_priority,  # above others' work, as with chrt -r
            "workload": {
                "threads": THREADS,
                "bytes_per_pass": total,
                "repeats": repeats,
                "yardstick": _yardstick_name(),
            },
            "bandwidth": [_bandwidth(root / str(size), size, total, repeats) for size in sizes],
            "start": [_start(root / f"start-{run_length}", chunks, run_length, starts) for run_length in (32, 1)],
        }


# --- bandwidth ---------------------------------------------------------------------------------------------------------


def _bandwidth(root: Path, chunk_bytes: int, total: int, repeats: int) -> dict[str, Any]:
    """Measure MB/s of our tier and of the yardstick for each pattern, in turns of one pass over all chunks."""
    root.mkdir()
    count = total // chunk_bytes
    ours, yardstick = _Ours(root / "ours", chunk_bytes, count), _yardstick(root / "theirs", chunk_bytes, total)
    ours.run("write")  # so that everything measured overwrites what was written before
    yardstick("write")
    rates: dict[str, dict[str, list[float]]] = {
        pattern: {"tier": [], "queue": [], "yardstick": []} for pattern in PATTERNS
    }
    for _, pattern in itertools.product(range(repeats), PATTERNS):
        rates[pattern]["tier"].append(total / ours.run(pattern))
        rates[pattern]["yardstick"].append(yardstick(pattern))
        rates[pattern]["queue"].append(total / ours.run(pattern, through_queue=True))
    ours.close()
    return {"chunk_bytes": chunk_bytes, **{pattern: _summary(of) for pattern, of in rates.items()}}


def _summary(rates: dict[str, list[float]]) -> dict[str, float]:
    fractions = {
        f"{name}_over_yardstick": median(a / b for a, b in zip(rates[name], rates["yardstick"], strict=True))
        for name in ("tier", "queue")
    }
    return {
        **{f"{name}_mb_per_s": round(median(of) / 1e6) for name, of in rates.items()},
        **{name: round(value, 2) for name, value in fractions.items()},
    }


def _opening(chunk_bytes: int) -> Opening:
    return Opening(codec=ChunkCodec(NAMESPACE, None, time.time_ns), chunk_sizes=[chunk_bytes])


class _Ours:
    """A disk tier for ``count`` chunks, which are written again and again."""

    def __init__(self, root: Path, chunk_bytes: int, count: int) -> None:
        config = DiskTierConfig(directory=str(root), max_bytes=(chunk_bytes + 8192) * count * 2, reserve_bytes=0)
        self.tier = config.open(_opening(chunk_bytes))
        self.queue = TierQueue(self.tier, time.monotonic, QueueConfig(THREADS, max_store_chunks=2 * count))
        self.buffers = [Staging(chunk_bytes).view for _ in range(THREADS)]
        generator = random.Random(chunk_bytes)
        for buffer in self.buffers:
            buffer[:] = generator.randbytes(len(buffer))
        self.count = count
        self.keys = [number.to_bytes(36, "big") for number in range(count)]
        self.job_ids = itertools.count()

    def run(self, pattern: str, *, through_queue: bool = False) -> float:
        """Seconds for one pass over all chunks."""
        keys = list(self.keys)
        if pattern.startswith("rand"):
            random.Random(pattern).shuffle(keys)
        if pattern.endswith("write"):
            self.tier.remove(self.keys)
        started = time.perf_counter()
        if through_queue:
            self._queue_pass(JobKind.STORE if pattern.endswith("write") else JobKind.LOAD, keys)
        else:
            self._tier_pass(self._store if pattern.endswith("write") else self._load, keys)
        return time.perf_counter() - started

    def close(self) -> None:
        self.queue.shutdown()

    def _tier_pass(self, work: Callable[[int, Sequence[bytes]], None], keys: Sequence[bytes]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(work, at, keys[at::THREADS]) for at in range(THREADS)]:
                done.result()

    def _store(self, at: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert self.tier.store(key, self.buffers[at]) is StoreOutcome.STORED

    def _load(self, at: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert self.tier.load(key, self.buffers[at]) is LoadOutcome.LOADED

    def _queue_pass(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        buffers = [self.buffers[at % THREADS] for at in range(len(keys))]
        if kind is JobKind.LOAD:  # real loads have a buffer per chunk, but here the contents do not matter
            buffers = [buffers[0]] * len(keys)
        job = TierJob(next(self.job_ids), kind, keys, time.monotonic() + 600, buffers)
        assert self.queue.submit(job) and self.queue.drain(600)
        (result,) = self.queue.poll()
        assert all(result.succeeded), result.status


# --- the yardstick -----------------------------------------------------------------------------------------------------


def _yardstick_name() -> str:
    return f"fio, psync, {THREADS} jobs, direct" if shutil.which("fio") else "dd, direct"


def _yardstick(path: Path, block_bytes: int, total: int) -> Callable[[str], float]:
    """A function that measures the bytes per second of a pattern."""
    if shutil.which("fio"):
        return lambda pattern: _fio(path, block_bytes, total, pattern)
    return lambda pattern: _dd(path, block_bytes, total, pattern)


def _fio(path: Path, block_bytes: int, total: int, pattern: str) -> float:
    share = total // THREADS // block_bytes * block_bytes
    command = [
        "fio", "--name=x", f"--filename={path}", f"--rw={pattern}", f"--bs={block_bytes}", f"--size={share}",
        f"--offset_increment={share}", f"--numjobs={THREADS}", "--ioengine=psync", "--direct=1", "--thread",
        "--group_reporting", "--fallocate=posix", "--invalidate=1", "--output-format=json", "--randrepeat=1",
    ]  # fmt: skip
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  # ours, word by word
    job = json.loads(report[report.index("{") :])["jobs"][0]
    return float(job["write" if pattern.endswith("write") else "read"]["bw_bytes"])


def _dd(path: Path, block_bytes: int, total: int, pattern: str) -> float:
    count = total // block_bytes
    ends = [f"of={path}", "if=/dev/zero", "oflag=direct", "conv=notrunc"]
    if pattern.endswith("read"):
        ends = [f"if={path}", "of=/dev/null", "iflag=direct"]
    started = time.perf_counter()
    subprocess.run(  # noqa: S603  # ours, word by word
        [shutil.which("dd") or "dd", *ends, f"bs={block_bytes}", f"count={count}"], capture_output=True, check=True
    )
    return total / (time.perf_counter() - started)


# --- a start with many chunks -------------------------------------------------------------------------------------------


def _start(root: Path, num_chunks: int, run_length: int, repeats: int) -> dict[str, Any]:
    """Measure seconds to open a tier with ``num_chunks`` small chunks in prefixes of ``run_length``, headers not in memory."""
    config = DiskTierConfig(directory=str(root), max_bytes=num_chunks * 8192, reserve_bytes=0)
    tier = config.open(_opening(512))
    payload = memoryview(bytes(512))
    parent: bytes | None = None
    for number in range(num_chunks):
        key = number.to_bytes(36, "big")
        assert tier.store(key, payload, parent if number % run_length else None) is StoreOutcome.STORED
        parent = key
    tier.close()
    times = []
    for _ in range(repeats):
        _forget_pages(root)
        started = time.perf_counter()
        tier = config.open(_opening(512))
        times.append(time.perf_counter() - started)
        assert tier.usage().num_chunks == num_chunks
        tier.close()
    return {"chunks": num_chunks, "chunks_per_prefix": run_length, "open_s": round(median(times), 3)}


def _forget_pages(root: Path) -> None:
    for path in root.rglob("*.headers"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
