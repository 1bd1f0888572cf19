"""Copies between paged KV and host memory: how fast, and how long they hold up the thread that asks for them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from cargohold.protocol import TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, Direction, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker

BLOCK_BYTES = 2 * 1024**2
"""KV of 16 tokens of an 8B model, with 8 KV heads of 128 numbers in 32 layers, in half precision."""

REGIONS = (1, 32, 64)
"""Numbers of pieces of a block: all layers together, one piece per layer, or keys and values of each layer apart."""


def run(*, quick: bool) -> dict[str, Any]:
    block_bytes, num_blocks, rounds = (64 * 1024, 8, 2) if quick else (BLOCK_BYTES, 128, 9)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        "workload": {"block_bytes": block_bytes, "blocks_per_job": num_blocks // 2, "rounds": rounds},
        "rows": [
            row
            for device in devices
            for num_regions in REGIONS
            for row in _measure(device, num_regions, block_bytes, num_blocks, rounds)
        ],
    }


def _measure(device: str, num_regions: int, block_bytes: int, num_blocks: int, rounds: int) -> Iterator[dict[str, Any]]:
    width = block_bytes // num_regions
    regions = [torch.ones((num_blocks, width), dtype=torch.uint8, device=device) for _ in range(num_regions)]
    memory = HostMemory(num_blocks, block_bytes)
    worker = make_transfer_worker(regions, memory, time.monotonic)
    everything = list(range(num_blocks))
    scattered = random.Random(num_blocks).sample(everything, num_blocks // 2)
    # The first copy touches pages for the first time, and locks them for a device; it is not measured.
    carry_out(worker, Direction.STORE, everything, everything)
    for blocks, name in ((everything[: num_blocks // 2], "neighbours"), (scattered, "scattered")):
        for direction in Direction:
            times = [carry_out(worker, direction, blocks, blocks) for _ in range(rounds)]
            yield {
                "device": device,
                "pieces_of_a_block": num_regions,
                "blocks": name,
                "direction": direction.value,
                "gigabytes_per_s": round(len(blocks) * block_bytes / median(whole for _, whole in times) / 1e9, 4),
                "caller_held_up_ms": round(median(submitting for submitting, _ in times) * 1e3, 3),
                "beside_a_step_caller_held_up_ms": _beside_a_step(worker, device, direction, blocks),
            }
    worker.shutdown()


def carry_out(
    worker: TransferWorker, direction: Direction, blocks: Sequence[int], rows: Sequence[int]
) -> tuple[float, float]:
    """Seconds until the job was accepted, and seconds until it had ended."""
    start = time.perf_counter()
    worker.submit(CopyJob(0, direction, tuple(blocks), tuple(rows), 60.0))
    submitted = time.perf_counter()
    while not (results := worker.poll()):
        time.sleep(0)
    assert results[0].outcome is TransferOutcome.DONE, "a copy failed"
    return submitted - start, time.perf_counter() - start


def _beside_a_step(worker: TransferWorker, device: str, direction: Direction, blocks: Sequence[int]) -> float | None:
    """Milliseconds until a job is accepted while the device computes for some 100 ms; ``None`` on a CPU."""
    if device == "cpu":
        return None
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001  # torch's own tests wait so
    submitting, _ = carry_out(worker, direction, blocks, blocks)
    return round(submitting * 1e3, 3)
