"""Packed chunks: what is left of real KV by type, what packing takes beside a copy, and what loads gain or lose by medium.

The KV is SmolLM2's, of this repository's own pages, computed in float32 and rounded to each type; ``--quick`` takes random
numbers. A medium slower than ``break_even_mb_per_s`` loads packed chunks sooner, for each core that is free to unpack.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.handoff import store_of
from benchmarks.stores import LIMIT_S, THREADS
from benchmarks.tiers import MIB, NAMESPACE
from cargohold import LLM, OffloadConfig, SamplingParams, SharedTierConfig
from cargohold.tiers import DiskTierConfig, JobKind, JobStatus, Opening, QueueConfig, TierConfig, TierJob, TierQueue
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec, unpack_header
from cargohold.tiers.memory import copy_bytes
from cargohold.tiers.packing import NUMBER_TYPES, pack, unpack
from tests.servers import BUCKET, s3_server

MEDIA = ("disk", "directory", "valkey", "s3")
TYPES = [name for name in NUMBER_TYPES if name != "uint8"]
HEAD_SIZE = 64
PAGES = ("README.md", "docs/tiers.md", "src/cargohold/tiers/port.py", "benchmarks/ratchets.json")


def run(*, quick: bool) -> dict[str, Any]:
    chunks = [np.random.default_rng(at).normal(size=2**14).astype(np.float32) for at in range(4)] if quick else _real()
    num_chunks, repeats = (2, 1) if quick else (64, 3)
    return {
        "load_average_before": round(os.getloadavg()[0], 1),
        "workload": {"chunks": len(chunks), "threads": THREADS, "repeats": repeats},
        "types": [_by_type(name, chunks) for name in TYPES],
        "loads_mb_per_s": _loads([_as("bfloat16", chunk) for chunk in chunks][:num_chunks], repeats),
    }


def _real() -> list[np.ndarray[Any, Any]]:
    """Return chunks of SmolLM2's KV in float32, as the embedded engine stores them."""
    texts = [Path(page).read_text(encoding="utf-8")[:3000] for page in PAGES]
    with tempfile.TemporaryDirectory() as place:
        store = SharedTierConfig(url=f"file://{place}", pack="none")
        offload = OffloadConfig(host_bytes="256MiB", tiers=[store])
        with LLM("smollm2", dtype="float32", offload=offload, shutdown_timeout_s=20.0) as llm:
            llm.generate(texts, SamplingParams(max_tokens=1))
        values = [file.read_bytes() for file in sorted(Path(place).rglob("*")) if file.is_file()]
    headers = [(unpack_header(value[:HEADER_BYTES]), value) for value in values]
    return [
        np.frombuffer(value, np.float32, header.num_bytes // 4, HEADER_BYTES)
        for header, value in headers
        if header is not None
    ]


def _as(name: str, chunk: np.ndarray[Any, Any]) -> bytes:
    numbers = torch.from_numpy(chunk.copy())
    if name == "int8":  # with a scale for each token and head, as engines have it
        heads = numbers.reshape(-1, HEAD_SIZE)
        numbers = (heads / heads.abs().amax(1, keepdim=True) * 127).round().flatten()
    return numbers.to(getattr(torch, name)).view(torch.uint8).numpy().tobytes()


def _by_type(name: str, chunks: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Measure one core, and what is left of all chunks."""
    width, plain = NUMBER_TYPES[name].width, [_as(name, chunk) for chunk in chunks]
    left = [bytes(pack(memoryview(data), width) or data) for data in plain]
    total, part = sum(map(len, plain)), sum(map(len, left)) / sum(map(len, plain))
    into = memoryview(bytearray(max(map(len, plain))))

    def rate(work: Callable[[int], object]) -> float:
        begun = time.perf_counter()
        for at in range(len(plain)):
            work(at)
        return total / 1e6 / (time.perf_counter() - begun)

    copied = rate(lambda at: copy_bytes(into[: len(plain[at])], memoryview(plain[at])))
    packed = rate(lambda at: pack(memoryview(plain[at]), width))
    unpacked = rate(
        lambda at: len(left[at]) < len(plain[at]) and unpack(memoryview(left[at]), width, into[: len(plain[at])])
    )
    return {
        "type": name,
        "part": round(part, 4),
        "copy_mb_per_s": round(copied),
        "pack_mb_per_s": round(packed),
        "unpack_mb_per_s": round(unpacked),
        "break_even_mb_per_s": round((1 - part) * unpacked),
    }


def _loads(chunks: Sequence[bytes], repeats: int) -> dict[str, dict[str, int]]:
    """Measure loads from each medium, plain and packed in turns; MB/s of plain bytes."""
    rates: dict[str, dict[str, list[float]]] = {medium: defaultdict(list) for medium in MEDIA}
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(len(chunks))]
    with ExitStack() as running:
        port = running.enter_context(s3_server()).port
        given = {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
        given["ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        os.environ.update({f"AWS_{name}": value for name, value in given.items()})
        for medium in MEDIA:
            queues = {
                how: _queue(_config(medium, how, running), len(chunks[0]), how, running) for how in ("plain", "packed")
            }
            for queue in queues.values():
                _pass(queue, JobKind.STORE, keys, [memoryview(bytearray(chunk)) for chunk in chunks])
            for _ in range(repeats):
                for how, queue in queues.items():
                    into = [memoryview(bytearray(len(chunk))) for chunk in chunks]
                    rates[medium][how].append(sum(map(len, chunks)) / 1e6 / _pass(queue, JobKind.LOAD, keys, into))
                    assert list(map(bytes, into)) == chunks
    return {medium: {how: round(median(of)) for how, of in kinds.items()} for medium, kinds in rates.items()}


def _config(medium: str, how: str, running: ExitStack) -> TierConfig:
    place = running.enter_context(tempfile.TemporaryDirectory())
    if medium == "disk":
        return DiskTierConfig(directory=place, max_bytes=512 * MIB, reserve_bytes=0)
    return SharedTierConfig(
        url=f"s3://{BUCKET}/{how}" if medium == "s3" else running.enter_context(store_of(medium, place))
    )


def _queue(config: TierConfig, chunk_bytes: int, how: str, running: ExitStack) -> TierQueue:
    types = ["bfloat16"] if how == "packed" else []
    codec = ChunkCodec(NAMESPACE, None, time.time_ns, types)
    queue = TierQueue(
        config.open(Opening(codec=codec, chunk_sizes=[chunk_bytes], number_types=types)),
        time.monotonic,
        QueueConfig(num_threads=THREADS, max_store_chunks=2**20),
    )
    running.callback(queue.shutdown)
    return queue


def _pass(queue: TierQueue, kind: JobKind, keys: list[bytes], buffers: list[memoryview]) -> float:
    """Return the seconds that a job with all keys takes."""
    begun = time.perf_counter()
    job = TierJob(time.perf_counter_ns(), kind, keys, time.monotonic() + LIMIT_S, buffers)
    assert queue.perform(job)
    assert job.status is JobStatus.DONE and all(job.succeeded), job.reason
    return time.perf_counter() - begun
