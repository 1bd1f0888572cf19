"""The offloading connector's worker side: the kernel's, with the messages of lower tiers, and with comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cargohold.connector.kernel.jobs import OffloadingMetadata
from cargohold.connector.kernel.worker import KernelWorker, WorkerPart
from cargohold.protocol import KVConnectorWorkerMetadata, TransferOutcome
from cargohold.tiers.messages import Gap, TierCommand, TierReport
from cargohold.transfer import CopyJob, CopyResult, TransferWorker


@dataclass(frozen=True, slots=True)
class TieredMetadata(OffloadingMetadata):
    """One step's jobs, and what the worker's part of lower tiers is to do: processes decode this type."""

    worker_message: tuple[TierCommand, ...] = ()


class OffloadingWorker(KernelWorker):
    """Moves blocks between one worker's paged KV and its shard of host memory, and chunks between that and lower tiers.

    Args:
        make_transfers, part: see ``KernelWorker``.
        compare: returns how the blocks of a comparison differ that has ended; needed if the scheduler side verifies.
    """

    metadata_type = TieredMetadata

    def __init__(
        self,
        make_transfers: Callable[[Sequence[Sequence[Any]]], TransferWorker],
        part: WorkerPart | None = None,
        compare: Callable[[CopyJob], tuple[Gap, ...]] = lambda _: (),
    ) -> None:
        super().__init__(make_transfers, part)
        self._compare = compare
        self._gaps: dict[int, tuple[Gap, ...]] = {}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what a guest's part has to report, and how blocks differ that were compared."""
        report = None if self._part is None else self._part.take_report()
        if not self._gaps:
            return report
        assert report is None or isinstance(report, TierReport)
        gaps, self._gaps = self._gaps, {}
        return replace(report or TierReport(), gaps=gaps)

    def _count(self, result: CopyResult) -> None:
        super()._count(result)
        if result.job.compared and result.outcome is TransferOutcome.DONE and (gaps := self._compare(result.job)):
            self._gaps[result.job.job_id] = gaps
