"""Worker side of the offloading connector: hands jobs to a transfer worker and reports how they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from cargohold.connector.offloading.messages import NOTHING_TO_DO, OffloadingMetadata, TierReport
from cargohold.connector.offloading.tier_worker import TierWorker
from cargohold.offload.transfer.base import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.protocol import (
    NOTHING_ENDED,
    ConnectorMetadata,
    FinishedTransfers,
    KVConnectorWorker,
    Stats,
    TransferOutcome,
)


class OffloadingWorker(KVConnectorWorker):
    """Moves blocks between one worker's paged KV and its shard of the tier.

    Args:
        make_transfers: makes the transfer worker; called with the regions, once the paged KV is known.
        tiers: this worker's part of the tiers below host memory, if there are any.
    """

    name = "offloading"
    metadata_type = OffloadingMetadata

    def __init__(
        self, make_transfers: Callable[[Sequence[Any]], TransferWorker], tiers: TierWorker | None = None
    ) -> None:
        self._make_transfers = make_transfers
        self._tiers = tiers
        self._transfers: TransferWorker | None = None
        self._metadata = NOTHING_TO_DO
        # Requests whose loads have not ended, by job.
        self._waiting: dict[int, str] = {}
        # Requests whose loads were given up in this step.
        self._given_up: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._stats: dict[str, float] = {}

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        """Take the paged KV. All groups must share the same regions, so that a block id alone says where a block is."""
        regions = kv_caches[0]
        assert all(_same(other, regions) for other in kv_caches), "groups with memory of their own are not served"
        self._transfers = self._make_transfers(regions)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Take this step's jobs."""
        assert isinstance(metadata, OffloadingMetadata)
        self._metadata = metadata

    def handle_preemptions(self) -> None:
        """Keep this step from overwriting blocks that stores in flight read, if the scheduler side asks for that."""
        if self._metadata.finish_stores:
            self._running.finish_stores()

    def start_load_kv(self) -> None:
        """Start the loads and the jobs of lower tiers; give up loads and cancel jobs of lower tiers that nobody waits for."""
        for job_id in self._metadata.given_up_loads:
            if (request_id := self._waiting.pop(job_id, None)) is not None:
                self._given_up.add(request_id)
        for load in self._metadata.loads:
            self._waiting[load.job_id] = load.request_id
            self._running.submit(CopyJob(load.job_id, Direction.LOAD, load.block_ids, load.rows, load.timeout_s))
        if self._tiers is not None:
            for command in self._metadata.tier_commands:
                self._tiers.start(command)
            for job_id in self._metadata.cancelled_tier_jobs:
                self._tiers.cancel(job_id)

    def wait_for_save(self) -> None:
        """Start the stores, now that the forward pass has written the blocks that they read."""
        for store in self._metadata.stores:
            self._running.submit(CopyJob(store.job_id, Direction.STORE, store.block_ids, store.rows, store.timeout_s))

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """Return the jobs that ended since the last call, and the requests whose loads they were."""
        results = self._running.poll()
        if not results and self._tiers is None and not self._metadata.release and not self._given_up:
            return NOTHING_ENDED  # most steps
        received, failed, self._given_up = set(self._given_up), self._given_up, set()
        jobs: dict[int, TransferOutcome] = {}
        for result in results:
            jobs[result.job.job_id] = result.outcome
            self._count(result)
            request_id = self._waiting.pop(result.job.job_id, None)
            if request_id is not None:
                received.add(request_id)
                if result.failed_block_ids:
                    self._invalid_block_ids |= result.failed_block_ids
                elif result.outcome is not TransferOutcome.DONE:
                    failed.add(request_id)
        if self._tiers is not None:
            jobs |= self._tiers.poll()
        return FinishedTransfers(
            finished_sending=frozenset(self._metadata.release),
            finished_recving=frozenset(received),
            failed_recving=frozenset(failed),
            jobs=jobs,
        )

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Return the ids of blocks whose load failed since the last call."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def get_stats(self) -> Stats:
        """Return blocks copied and seconds taken, per direction, and the counters of lower tiers, since the last call."""
        stats, self._stats = self._stats, {}
        return stats if self._tiers is None else {**stats, **self._tiers.take_stats()}

    def build_connector_worker_meta(self) -> TierReport | None:
        """Return whether each chunk of the lower tiers' ended jobs succeeded, and how the tiers' health has changed."""
        return None if self._tiers is None else self._tiers.take_report()

    def clear_connector_metadata(self) -> None:
        """Forget this step's jobs."""
        self._metadata = NOTHING_TO_DO

    def shutdown(self) -> None:
        """Let running jobs end, and release the queues of lower tiers and the transfer worker."""
        if self._tiers is not None:
            self._tiers.shutdown()
        if self._transfers is not None:
            self._transfers.shutdown()

    @property
    def _running(self) -> TransferWorker:
        assert self._transfers is not None, "register_kv_caches comes first"
        return self._transfers

    def _count(self, result: CopyResult) -> None:
        if result.outcome is not TransferOutcome.DONE:
            return  # how much a failed job has copied is not known; a job that came too late has copied nothing
        direction = result.job.direction.value
        for name, amount in ((f"{direction}_blocks", len(result.job.block_ids)), (f"{direction}_s", result.duration_s)):
            self._stats[name] = self._stats.get(name, 0) + amount


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
