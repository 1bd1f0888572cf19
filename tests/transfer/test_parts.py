"""Blocks of several rows: every byte goes to its place and no other, whatever regions a group has."""

from __future__ import annotations

import time
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch

from cargohold.lab.simulation import VirtualClock
from cargohold.lab.simulation.transfers import HeldTransfers
from cargohold.protocol import TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.transfer.cpu import make_grouped_transfers
from cargohold.transfer.parts import parts_of
from cargohold.transfer.port import GroupedTransfers, share_stores

NUM_BLOCKS, NUM_ROWS, ROW_BYTES = 7, 30, 32
PER_BLOCK = (3, 2, 1)


def regions_for(dice: Random, storage: torch.Tensor, width: int) -> list[torch.Tensor]:
    """So many bytes of each block, in regions with gaps between them."""
    cuts = sorted({0, width, *(dice.randrange(1, width) for _ in range(dice.randint(0, 3)))})
    return [storage[:, start + at : end + at] for at, (start, end) in enumerate(pairwise(cuts))]


@pytest.mark.parametrize("seed", range(30))
def test_blocks_come_back_in_other_blocks_and_nothing_else_changes(seed: int) -> None:
    dice = Random(seed)
    torch.manual_seed(seed)
    storage = torch.randint(256, (NUM_BLOCKS, 110), dtype=torch.uint8)
    widths = [
        dice.randint((count - 1) * ROW_BYTES + 1, count * ROW_BYTES) if count > 1 else ROW_BYTES for count in PER_BLOCK
    ]
    kv_caches = [regions_for(dice, storage, width) for width in widths]
    memory = HostMemory(NUM_ROWS, ROW_BYTES)
    memory.rows[:] = 99
    transfers = make_grouped_transfers(kv_caches, PER_BLOCK, memory, time.monotonic)
    try:
        groups = tuple(dice.choices(range(3), k=3))
        sources, targets = tuple(dice.sample(range(NUM_BLOCKS), 3)), tuple(dice.sample(range(NUM_BLOCKS), 3))
        rows = tuple(dice.sample(range(NUM_ROWS), sum(PER_BLOCK[group] for group in groups)))
        before = [torch.cat(kv_caches[group], dim=1)[block] for group, block in zip(groups, sources, strict=True)]
        carry_out(transfers, CopyJob(1, Direction.STORE, sources, rows, 60.0, groups))
        others = [row for row in range(NUM_ROWS) if row not in rows]
        assert (memory.rows[others] == 99).all(), "a row of somebody else's was written"
        expected = storage.random_(256).clone()
        carry_out(transfers, CopyJob(2, Direction.LOAD, targets, rows, 60.0, groups))
    finally:
        transfers.shutdown()
    for group, block, contents in zip(groups, targets, before, strict=True):
        assert torch.equal(torch.cat(kv_caches[group], dim=1)[block], contents)
        for region in kv_caches[group]:
            start = region.storage_offset() % storage.shape[1]
            expected[block, start : start + region.shape[1]] = region[block]
    assert torch.equal(storage, expected), "other bytes were written"


def carry_out(transfers: TransferWorker, job: CopyJob) -> None:
    transfers.submit(job)
    while not (results := transfers.poll()):
        continue
    assert results == [CopyResult(job, TransferOutcome.DONE, frozenset(), results[0].duration_s)]


def test_a_block_of_which_a_part_has_failed_has_failed() -> None:
    parts = np.zeros((NUM_BLOCKS * 3, ROW_BYTES), np.uint8)
    inner = HeldTransfers(parts, np.zeros((NUM_ROWS, ROW_BYTES), np.uint8), VirtualClock(), auto=False)
    transfers = GroupedTransfers(inner, PER_BLOCK, lambda _group, block_id, at: block_id * 3 + at)
    job = CopyJob(1, Direction.LOAD, (5, 2), (1, 2, 3, 4, 5), 60.0, (0, 1))
    transfers.submit(job)
    (passed_on,) = inner.pending
    assert passed_on.block_ids == (15, 16, 17, 6, 7)
    inner.complete(passed_on, TransferOutcome.FAILED, [16])
    (result,) = transfers.poll()
    assert (result.job, result.failed_block_ids) == (job, frozenset({5}))


def test_workers_with_the_same_bytes_write_each_row_once() -> None:
    memory = np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    parts = np.random.default_rng(1).integers(1, 256, (NUM_BLOCKS * 3, ROW_BYTES), np.uint8)
    written: list[int] = []
    job = CopyJob(1, Direction.STORE, (1, 2, 3, 4), (9, 3, 4, 1, 2, 5, 8, 6, 7, 0), 60.0, (0, 1, 0, 1))
    for at in range(2):
        inner = HeldTransfers(parts, memory, VirtualClock())
        inner.on_copy = lambda job: written.extend(job.rows)
        grouped = GroupedTransfers(inner, PER_BLOCK, lambda _group, block_id, at: block_id * 3 + at)
        transfers = share_stores(grouped, at, 2, 3, PER_BLOCK)
        transfers.submit(job)
        (result,) = transfers.poll()
        assert result.outcome is TransferOutcome.DONE and len(result.job.block_ids) == 2
    assert sorted(written) == sorted(job.rows)
    assert np.array_equal(memory[list(job.rows)], parts[[3, 4, 5, 6, 7, 9, 10, 11, 12, 13]])


@pytest.mark.parametrize("width", [31, 97])
def test_rows_that_do_not_fit_a_groups_blocks_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"a block of {width} bytes does not fit into 3 rows of 32"):
        parts_of([[torch.zeros((NUM_BLOCKS, width), dtype=torch.uint8)]], (3,), ROW_BYTES)
