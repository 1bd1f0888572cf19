"""KV in the tensors that vLLM makes, on a CPU and on a CUDA device: what is copied down and back is the same, byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from cargohold.integrations.vllm.regions import regions_of
from cargohold.protocol import TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, Direction, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker
from tests.devices import DEVICES

NUM_BLOCKS, NUM_ROWS = 24, 16
STORED, ROWS, LOADED = (3, 4, 17, 9, 0), (8, 9, 0, 15, 3), (20, 5, 6, 2, 23)
PATIENCE_S = 60.0

Caches: TypeAlias = dict[str, torch.Tensor]


def one_allocation(device: str) -> Caches:
    """All layers in one allocation, blocks outermost; keys and values in bfloat16."""
    whole = torch.zeros((NUM_BLOCKS, 4, 2, 16, 2, 64), dtype=torch.bfloat16, device=device)
    return {f"layer{at}": whole[:, at] for at in range(4)}


def one_allocation_per_layer(device: str) -> Caches:
    """An allocation per layer, keys and values in halves of it."""
    shape = (2, NUM_BLOCKS, 16, 2, 64)
    return {f"layer{at}": torch.zeros(shape, dtype=torch.float16, device=device) for at in range(4)}


def heads_before_tokens(device: str) -> Caches:
    """Shown as (block, token, head, dim), kept as (block, head, token, dim)."""
    return {f"layer{at}": torch.zeros((NUM_BLOCKS, 2, 16, 128), device=device).transpose(1, 2) for at in range(3)}


def fp8(device: str) -> Caches:
    """One byte per number."""
    shape = (NUM_BLOCKS, 2, 16, 2, 64)
    return {f"layer{at}": torch.zeros(shape, device=device).to(torch.float8_e4m3fn) for at in range(4)}


def latent(device: str) -> Caches:
    """Latent attention: one vector of 576 numbers per token."""
    shape = (NUM_BLOCKS, 64, 576)
    return {f"layer{at}": torch.zeros(shape, dtype=torch.bfloat16, device=device) for at in range(3)}


def state(device: str) -> Caches:
    """Full attention and a padded recurrent state over the same bytes."""
    whole = torch.zeros((NUM_BLOCKS, 4096), dtype=torch.int8, device=device)
    return {"full": whole, "state": whole[:, :2500]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [one_allocation, one_allocation_per_layer, heads_before_tokens, fp8, latent, state])
def test_blocks_come_back_in_other_blocks_and_nothing_else_changes(make: Callable[[str], Caches], device: str) -> None:
    caches = make(device)
    regions = regions_of(caches, NUM_BLOCKS)
    for region in regions:
        region.copy_(torch.randint(256, region.shape, dtype=torch.uint8))
    before = {name: by_block(cache) for name, cache in caches.items()}
    memory = HostMemory(NUM_ROWS, sum(region.shape[1] for region in regions))
    worker = make_transfer_worker(regions, memory, time.monotonic)
    carry_out(worker, CopyJob(1, Direction.STORE, STORED, ROWS, PATIENCE_S))
    carry_out(worker, CopyJob(2, Direction.LOAD, LOADED, ROWS, PATIENCE_S))
    worker.shutdown()
    for name, cache in caches.items():
        expected = before[name].clone()
        expected[list(LOADED)] = before[name][list(STORED)]
        assert torch.equal(by_block(cache), expected), name


def by_block(cache: torch.Tensor) -> torch.Tensor:
    """A layer's bytes on the CPU, blocks first."""
    blocks_first = cache.movedim(1, 0) if cache.shape[0] == 2 else cache
    return blocks_first.contiguous().cpu().view(torch.uint8).reshape(NUM_BLOCKS, -1)


def carry_out(worker: TransferWorker, job: CopyJob) -> None:
    worker.submit(job)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        results = worker.poll()
        if results:
            assert results[0].outcome is TransferOutcome.DONE
            return
    pytest.fail("the copy did not end")
