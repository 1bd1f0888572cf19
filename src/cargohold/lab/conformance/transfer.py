"""The conformance suite for transfer workers: every job ends once, and every byte goes to its place and no other."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

import torch

from cargohold.protocol import Clock, TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker

_NUM_BLOCKS = 12
_NUM_ROWS = 20
_SPANS = (64, 32, 160)
_TIMEOUT_S = 60.0


class TransferConformance(ABC):
    """Tests a transfer worker on real memory.

    Attributes:
        device: where the paged KV is.
        num_seeds: runs of random jobs.
    """

    device: ClassVar[str] = "cpu"
    num_seeds: ClassVar[int] = 5

    @abstractmethod
    def transfers(self, regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> TransferWorker:
        """A new transfer worker between paged KV and host memory, with the arguments of ``make_transfer_worker``."""

    def _start(self, seed: int) -> tuple[list[torch.Tensor], HostMemory, TransferWorker]:
        torch.manual_seed(seed)
        regions = [torch.randint(256, (_NUM_BLOCKS, span), dtype=torch.uint8, device=self.device) for span in _SPANS]
        memory = HostMemory(_NUM_ROWS, sum(_SPANS))
        memory.rows[:] = torch.randint(256, memory.rows.shape, dtype=torch.uint8).numpy()
        return regions, memory, self.transfers(regions, memory, time.monotonic)

    def test_every_byte_goes_to_its_place_and_no_other(self) -> None:
        """Stores and loads of any blocks and rows, several at a time."""
        for seed in range(self.num_seeds):
            regions, memory, transfers = self._start(seed)
            try:
                _Jobs(regions, memory, transfers, Random(seed)).run(8)  # noqa: S311  # traffic
            finally:
                transfers.shutdown()

    def test_computations_read_what_the_loads_before_them_bring(self) -> None:
        """After ``finish_loads`` has said so, the blocks hold what the rows held."""
        regions, memory, transfers = self._start(1)
        try:
            job = CopyJob(1, Direction.LOAD, (1, 2, 5), (7, 8, 3), _TIMEOUT_S)
            transfers.submit(job)
            if transfers.finish_loads():
                assert _blocks(regions, job) == _rows(memory, job)
            assert _wait(transfers, 1) == {1: TransferOutcome.DONE}
        finally:
            transfers.shutdown()

    def test_blocks_may_be_overwritten_once_their_stores_are_finished(self) -> None:
        """After ``finish_stores``, computations may write the blocks: the rows hold what was there before."""
        regions, memory, transfers = self._start(2)
        try:
            job = CopyJob(1, Direction.STORE, (0, 3, 4), (2, 11, 6), _TIMEOUT_S)
            before = _blocks(regions, job)
            transfers.submit(job)
            transfers.finish_stores()
            for region in regions:
                region[[0, 3, 4]] = 0
            assert _wait(transfers, 1) == {1: TransferOutcome.DONE}
            assert _rows(memory, job) == before
        finally:
            transfers.shutdown()

    def test_when_settled_nothing_is_copied_and_every_job_ends(self) -> None:
        """After ``settle``, blocks stay as they are, and ``poll`` returns all jobs, done or given up. It goes on after that."""
        regions, memory, transfers = self._start(5)
        try:
            jobs = [
                CopyJob(at, (Direction.LOAD, Direction.STORE)[at % 2], (at,), (at,), _TIMEOUT_S) for at in range(10)
            ]
            for job in jobs:
                transfers.submit(job)
            assert transfers.settle(_TIMEOUT_S)
            device, host = _snapshot(regions), memory.rows.copy()
            outcomes = _wait(transfers, 10)
            assert outcomes.keys() == set(range(10))
            assert set(outcomes.values()) <= {TransferOutcome.DONE, TransferOutcome.ABANDONED}
            assert torch.equal(_snapshot(regions), device) and (memory.rows == host).all()
            again = CopyJob(10, Direction.LOAD, (3,), (7,), _TIMEOUT_S)
            transfers.submit(again)
            assert _wait(transfers, 1) == {10: TransferOutcome.DONE} and _blocks(regions, again) == _rows(memory, again)
        finally:
            transfers.shutdown()

    def test_every_job_ends_once_also_when_it_is_shut_down(self) -> None:
        """After ``shutdown``, ``poll`` returns those that had not ended, as done or as given up."""
        _, _, transfers = self._start(3)
        for number in range(10):
            direction = (Direction.STORE, Direction.LOAD)[number % 2]
            transfers.submit(CopyJob(number, direction, (number,), (number,), _TIMEOUT_S))
        results = list(transfers.poll())
        transfers.shutdown()
        results += transfers.poll()
        assert sorted(result.job.job_id for result in results) == list(range(10))
        assert {result.outcome for result in results} <= {TransferOutcome.DONE, TransferOutcome.ABANDONED}
        assert transfers.poll() == []

    def test_what_it_reports_is_the_job_that_was_submitted_and_how_long_it_took(self) -> None:
        """The job itself, with no negative duration."""
        _, _, transfers = self._start(4)
        try:
            job = CopyJob(9, Direction.STORE, (1,), (1,), _TIMEOUT_S)
            transfers.submit(job)
            (result,) = _results(transfers, 1)
            assert result.job == job and result.duration_s >= 0 and not result.failed_block_ids
        finally:
            transfers.shutdown()


class _Jobs:
    """Random jobs of which no two in flight touch the same block or row, and what memory must hold after each batch."""

    def __init__(
        self, regions: Sequence[torch.Tensor], memory: HostMemory, transfers: TransferWorker, dice: Random
    ) -> None:
        self._regions = regions
        self._memory = memory
        self._transfers = transfers
        self._dice = dice
        self._next_id = 0

    def run(self, num_batches: int) -> None:
        for _ in range(num_batches):
            device, host = _snapshot(self._regions), self._memory.rows.copy()
            jobs = self._batch()
            for job in jobs:
                for block_id, row in zip(job.block_ids, job.rows, strict=True):
                    if job.direction is Direction.LOAD:
                        device[block_id] = torch.from_numpy(host[row].copy())
                for block_id, row in zip(job.block_ids, job.rows, strict=True):
                    if job.direction is Direction.STORE:
                        host[row] = device[block_id].numpy()
                self._transfers.submit(job)
            ended = _wait(self._transfers, len(jobs))
            assert ended == {job.job_id: TransferOutcome.DONE for job in jobs}
            assert torch.equal(_snapshot(self._regions), device), "a block holds other bytes"
            assert (self._memory.rows == host).all(), "a row holds other bytes"

    def _batch(self) -> list[CopyJob]:
        """Jobs whose blocks and rows no other job in the batch uses."""
        blocks = self._dice.sample(range(_NUM_BLOCKS), _NUM_BLOCKS)
        rows = self._dice.sample(range(_NUM_ROWS), _NUM_ROWS)
        jobs: list[CopyJob] = []
        while blocks and len(jobs) < 4:
            count = self._dice.randint(1, min(4, len(blocks)))
            self._next_id += 1
            places = tuple(blocks[:count]), tuple(rows[:count])
            jobs.append(CopyJob(self._next_id, self._dice.choice(list(Direction)), *places, _TIMEOUT_S))
            del blocks[:count], rows[:count]
        return jobs


def _snapshot(regions: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([region.cpu() for region in regions], dim=1)


def _blocks(regions: Sequence[torch.Tensor], job: CopyJob) -> list[Any]:
    return [_snapshot(regions)[block_id].tolist() for block_id in job.block_ids]


def _rows(memory: HostMemory, job: CopyJob) -> list[Any]:
    return [memory.rows[row].tolist() for row in job.rows]


def _results(transfers: TransferWorker, count: int) -> list[CopyResult]:
    """Poll until so many jobs have ended."""
    ended: list[CopyResult] = []
    end = time.monotonic() + _TIMEOUT_S
    while len(ended) < count:
        assert time.monotonic() < end, f"only {len(ended)} of {count} jobs have ended"
        ended += transfers.poll()
        time.sleep(0)
    return ended


def _wait(transfers: TransferWorker, count: int) -> dict[int, TransferOutcome]:
    return {result.job.job_id: result.outcome for result in _results(transfers, count)}
