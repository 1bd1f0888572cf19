"""Our transfer worker and the example pass the suite, and those that lose or misplace bytes do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from cargohold.lab.conformance.transfer import TransferConformance
from cargohold.protocol import Clock
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, ForwardingTransfers, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker
from examples.own_transfers import counting


class TestCpu(TransferConformance):
    def transfers(self, regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> TransferWorker:
        return make_transfer_worker(regions, memory, clock)


class TestCounting(TransferConformance):
    def transfers(self, regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> TransferWorker:
        return counting.make(regions, memory, clock)


class LosesTheLastBlock(ForwardingTransfers):
    def submit(self, job: CopyJob) -> None:
        super().submit(replace(job, block_ids=job.block_ids[:-1], rows=job.rows[:-1]))


class SwapsRows(ForwardingTransfers):
    def submit(self, job: CopyJob) -> None:
        super().submit(replace(job, rows=job.rows[::-1]))


class ReportsTwice(ForwardingTransfers):
    def poll(self) -> list[CopyResult]:
        return 2 * super().poll()


class LoadsLater(ForwardingTransfers):
    """Says that loads are there which it has not begun."""

    def __init__(self, inner: TransferWorker) -> None:
        super().__init__(inner)
        self._kept: list[CopyJob] = []

    def submit(self, job: CopyJob) -> None:
        if job.direction is Direction.LOAD:
            self._kept.append(job)
        else:
            super().submit(job)

    def finish_loads(self) -> bool:
        return True

    def poll(self) -> list[CopyResult]:
        for job in self._kept:
            super().submit(job)
        self._kept.clear()
        return super().poll()


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (LosesTheLastBlock, "test_every_byte_goes_to_its_place_and_no_other"),
        (SwapsRows, "test_every_byte_goes_to_its_place_and_no_other"),
        (ReportsTwice, "test_every_job_ends_once_also_when_it_is_shut_down"),
        (LoadsLater, "test_computations_read_what_the_loads_before_them_bring"),
    ],
)
def test_one_that_breaks_a_promise_is_found(wrong: Callable[[TransferWorker], TransferWorker], test: str) -> None:
    class Suite(TransferConformance):
        __test__ = False

        def transfers(self, regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> TransferWorker:
            return wrong(make_transfer_worker(regions, memory, clock))

    with pytest.raises((AssertionError, ValueError)):
        getattr(Suite(), test)()
