"""Both sides of the offloading connector with verification; see ``cargohold.connector.guests.verification``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cargohold.connector.config import OffloadConfig
from cargohold.connector.guests.verification import Verifier
from cargohold.connector.kernel.jobs import OffloadingMetadata
from cargohold.connector.kernel.pooled_stores import PooledStores
from cargohold.connector.kernel.requests import Offer
from cargohold.connector.kernel.stores import EagerStores
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.tails import TailedScheduler
from cargohold.connector.offloading.worker import OffloadingWorker, TieredMetadata
from cargohold.protocol import (
    BlockIds,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
    RequestView,
    StepView,
)
from cargohold.tiers.messages import TierReport
from cargohold.transfer import CopyJob
from cargohold.transfer.compare import ComparingTransfers, Gap, KeptRows


@dataclass(frozen=True, slots=True)
class VerifyingMetadata(TieredMetadata):
    """One step's jobs, and with what some of its stores are compared."""

    compared: tuple[KeptRows, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyingReport(TierReport):
    """A report from workers, also on how blocks differ, by job."""

    gaps: dict[int, tuple[Gap, ...]] = field(default_factory=dict)

    def aggregate(self, other: TierReport) -> VerifyingReport:
        """Return both reports, merged."""
        gaps = dict(self.gaps)
        for job_id, theirs in other.gaps.items() if isinstance(other, VerifyingReport) else ():
            gaps[job_id] = gaps.get(job_id, ()) + theirs
        return _with_gaps(TierReport.aggregate(self, other), gaps)


def _with_gaps(report: TierReport, gaps: dict[int, tuple[Gap, ...]]) -> VerifyingReport:
    return VerifyingReport(**{of.name: getattr(report, of.name) for of in fields(TierReport)}, gaps=gaps)


# --- the scheduler side -----------------------------------------------------------------------------------------------


class NotingStores(EagerStores):
    """Stores that keep what the step has completed.

    Attributes:
        completed: the chunks, until the step is planned.
    """

    completed: Sequence[Offer] = ()

    def _store(self, offers: Sequence[Offer]) -> list[CopyJob]:
        self.completed = offers
        return super()._store(offers)


class NotingPooledStores(NotingStores, PooledStores):
    """The same of one cache."""


class VerifyingScheduler(OffloadingScheduler):
    """The scheduler side, which also has what is kept compared with what is computed again.

    Args:
        config: options.
        num_spare: number of spare slots in host memory.
        secret: see ``Verifier``.
        arguments, more: see ``OffloadingScheduler``; its stores are ``NotingStores``.
    """

    worker_metadata_type = VerifyingReport

    def __init__(self, config: OffloadConfig, *arguments: Any, num_spare: int, secret: bytes, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self._verifier = Verifier(
            self.shared,
            share=config.verified_share or 0.0,
            bytes_per_s=config.num_verify_bytes_per_s,
            num_spare=num_spare,
            secret=secret,
            lower=self.lower,
        )

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return what can be restored; nothing for a request that is chosen to compute it."""
        answer, state = (
            super().get_num_new_matched_tokens(request, num_computed_tokens),
            self.requests[request.request_id],
        )
        if not answer[0] or not self._verifier.is_chosen(state):
            return answer
        self._verifier.note_chosen(state, num_computed_tokens, num_computed_tokens + answer[0])
        return 0, False

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Return this step's jobs, and what is compared."""
        meta = super().build_connector_meta(step)
        assert isinstance(meta, OffloadingMetadata) and isinstance(self.stores, NotingStores)
        completed, self.stores.completed = self.stores.completed, ()
        planned = None if self.stores.has_pending_work else self._verifier.plan(completed)
        if planned is None:
            return meta
        job, kept = planned
        jobs = {of.name: getattr(meta, of.name) for of in fields(OffloadingMetadata)}
        return VerifyingMetadata(**{**jobs, "stores": (*meta.stores, job)}, compared=(kept,))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """End comparisons first: chunks that are dropped are not found by anything else.

        Raises ``ContractError`` if nothing that is kept can be trusted any more.
        """
        report = connector_output.kv_connector_worker_meta
        self._verifier.on_report(connector_output, report.gaps if isinstance(report, VerifyingReport) else {})
        super().update_connector_output(connector_output)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Forget where its tokens came from."""
        self._verifier.forget(request.request_id)
        return super().request_finished(request, block_ids)


class VerifyingTailedScheduler(VerifyingScheduler, TailedScheduler):
    """The same where prefixes may end inside a block. Tails are not verified."""


# --- the worker side --------------------------------------------------------------------------------------------------


class VerifyingWorker(OffloadingWorker):
    """The worker side, which also reports how blocks differ that it has compared."""

    metadata_type = VerifyingMetadata

    _comparing: ComparingTransfers

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        """Take the paged KV."""
        super().register_kv_caches(kv_caches)
        assert isinstance(self._transfers, ComparingTransfers)
        self._comparing = self._transfers

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take this step's jobs, and with what they are compared."""
        super().bind_connector_metadata(connector_metadata)
        for kept in connector_metadata.compared if isinstance(connector_metadata, VerifyingMetadata) else ():
            self._comparing.expect(kept)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what a guest's part has to report, and how blocks differ.

        Never another type of report: what is merged with it would lose how blocks differ.
        """
        report, gaps = super().build_connector_worker_meta(), self._comparing.take_gaps()
        assert report is None or isinstance(report, TierReport)
        return _with_gaps(report or TierReport(), gaps) if report or gaps else None
