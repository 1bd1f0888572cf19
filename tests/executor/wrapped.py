"""Offloading connectors whose transfers are wrapped on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.protocol import SchedulerEnvironment, TransferOutcome, WorkerEnvironment
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, ForwardingTransfers, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker
from cargohold.transfer.port import SharedStores


@dataclass(frozen=True)
class WrapsTransfersOnRank:
    """An offloading connector whose transfers are wrapped on one rank."""

    inner: OffloadingFactory
    rank: int
    wrap: Callable[[TransferWorker], TransferWorker]

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        return self.inner.make_scheduler_side(environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        if environment.rank != self.rank:
            return self.inner.make_worker_side(environment)
        layout = environment.layout
        num_slots = self.inner.num_slots(layout) + self.inner.num_spare(layout)
        num_rows = num_slots * self.inner.config.blocks_per_chunk
        memory = HostMemory(num_rows, layout.block_bytes, environment.exchange)
        return OffloadingWorker(
            lambda kv_caches: self.wrap(make_transfer_worker(kv_caches[0], memory, environment.clock))
        )


def stores_nothing(inner: TransferWorker) -> TransferWorker:
    """Say of every store that it was carried out, and carry out none."""
    return SharedStores(inner, lambda _row: False)


class FailingLoads(ForwardingTransfers):
    """Carries out stores, and lets every load fail."""

    def __init__(self, inner: TransferWorker) -> None:
        super().__init__(inner)
        self.failed: list[CopyResult] = []

    def submit(self, job: CopyJob) -> None:
        if job.direction is Direction.LOAD:
            self.failed.append(CopyResult(job, TransferOutcome.FAILED, frozenset(job.block_ids), 0.0))
        else:
            super().submit(job)

    def poll(self) -> list[CopyResult]:
        failed, self.failed = self.failed, []
        return failed + super().poll()

    def finish_loads(self) -> bool:
        return not self.failed and super().finish_loads()
