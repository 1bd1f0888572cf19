"""Worker side of the offloading connector: hands jobs to a transfer worker and reports how they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, Protocol

from cargohold.connector.kernel.jobs import NOTHING_TO_DO, LoadJob, OffloadingMetadata
from cargohold.deadlines import SLEEP
from cargohold.protocol import (
    NOTHING_ENDED,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorker,
    KVConnectorWorkerMetadata,
    Stats,
    Tally,
    TransferOutcome,
    metrics,
)
from cargohold.transfer import CopyResult, TransferWorker, UnmappedTransfers


class WorkerPart(Protocol):
    """A guest's part on a worker: it carries out what its guest tells it with a step. No method but the last waits."""

    def carry_out(self, message: Sequence[Any]) -> None:
        """Do what ``Below.worker_message`` says, at once."""

    def poll(self) -> Mapping[int, TransferOutcome]:
        """Return the jobs that ended since the last call, and how."""

    def take_report(self) -> KVConnectorWorkerMetadata | None:
        """Return what the guest is to learn besides; ``None`` if nothing."""

    def take_stats(self) -> Stats:
        """Return counters since the last call."""

    def shutdown(self) -> None:
        """Stop."""


class KernelWorker(KVConnectorWorker):
    """Moves blocks between one worker's paged KV and its shard of the tier.

    Args:
        make_transfers: makes the transfer worker; called with the regions of each group, once the paged KV is known.
        part: a guest's part on this worker, if one has any.
    """

    name = "offloading"
    metadata_type: type = OffloadingMetadata

    def __init__(
        self, make_transfers: Callable[[Sequence[Sequence[Any]]], TransferWorker], part: WorkerPart | None = None
    ) -> None:
        self._make_transfers = make_transfers
        self._part = part
        self._transfers: TransferWorker | None = None
        self._metadata = NOTHING_TO_DO
        # Requests whose loads have not ended, by job.
        self._waiting: dict[int, str] = {}
        # Requests whose loads were given up in this step.
        self._given_up: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._lost: list[CopyResult] = []
        self._stats = Tally()

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        """Take the paged KV."""
        self._transfers = self._make_transfers(kv_caches)

    def unregister_kv_caches(self) -> None:
        """End all copies. Raises ``TimeoutError`` if one goes on for too long."""
        if not isinstance(self._running, UnmappedTransfers):
            if not self._running.settle(SLEEP.seconds()):
                raise TimeoutError("a copy is stuck, so the device's memory cannot be released")
            self._transfers = UnmappedTransfers(self._running)

    def restore_kv_caches(self) -> None:
        """Copy again."""
        if isinstance(self._transfers, UnmappedTransfers):
            self._transfers = self._transfers.inner

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take this step's jobs."""
        assert isinstance(connector_metadata, OffloadingMetadata)
        self._metadata = connector_metadata

    def handle_preemptions(self) -> None:
        """Keep this step from overwriting blocks that stores read: what was evicted for it, and what nothing else protects."""
        for save in self._metadata.saves:
            self._running.submit(save)
        if self._metadata.finish_stores or self._metadata.saves:
            self._running.finish_stores()

    def start_load_kv(self) -> None:
        """Start the loads and what a guest asks for; give up loads that no request waits for."""
        for job_id in self._metadata.given_up_loads:
            if (request_id := self._waiting.pop(job_id, None)) is not None:
                self._given_up.add(request_id)
        self._load_in_step([load for load in self._metadata.loads if load.is_in_step])
        for load in self._metadata.loads:
            if not load.is_in_step:
                self._waiting[load.job_id] = load.request_id
                self._start(load)
        if self._part is not None and self._metadata.worker_message:
            self._part.carry_out(self._metadata.worker_message)

    def wait_for_save(self) -> None:
        """Start the stores, now that the forward pass has written the blocks that they read."""
        for store in self._metadata.stores:
            self._running.submit(store)

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        """Return the jobs that ended since the last call, and the requests whose loads they were."""
        results, self._lost = [*self._running.poll(), *self._lost], []
        if not results and self._part is None and not self._metadata.release and not self._given_up:
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
        if self._part is not None:
            jobs.update(self._part.poll())
        return KVConnectorTransferResults(
            finished_sending=frozenset(self._metadata.release),
            finished_recving=frozenset(received),
            failed_recving=frozenset(failed),
            jobs=jobs,
        )

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Return the ids of blocks whose load failed since the last call."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def get_kv_connector_stats(self) -> Stats:
        """Return blocks copied and seconds taken, per direction, and a guest's counters, since the last call."""
        stats, self._stats = self._stats, Tally()
        return stats if self._part is None else {**stats, **self._part.take_stats()}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what a guest's part has to report."""
        return None if self._part is None else self._part.take_report()

    def clear_connector_metadata(self) -> None:
        """Forget this step's jobs."""
        self._metadata = NOTHING_TO_DO

    def shutdown(self) -> None:
        """Let running jobs end, and release a guest's part and the transfer worker."""
        if self._part is not None:
            self._part.shutdown()
        if self._transfers is not None:
            self._transfers.shutdown()

    @property
    def _running(self) -> TransferWorker:
        assert self._transfers is not None, "register_kv_caches comes first"
        return self._transfers

    def _load_in_step(self, loads: Sequence[LoadJob]) -> None:
        """Start loads whose requests this step computes, and make it wait for them."""
        for load in loads:
            self._start(load)
        if loads and (not self._running.finish_loads() or any(load.is_lost for load in loads)):
            self._invalid_block_ids.update(chain.from_iterable(load.block_ids for load in loads))

    def _start(self, load: LoadJob) -> None:
        if load.is_lost:
            self._lost.append(CopyResult(load, TransferOutcome.FAILED, frozenset(), 0.0))
        else:
            self._running.submit(load)

    def _count(self, result: CopyResult) -> None:
        if result.outcome is not TransferOutcome.DONE:
            return  # how much a failed job has copied is not known; a job that came too late has copied nothing
        direction = result.job.direction.value
        self._stats[metrics.COPIED_BLOCKS.of(direction)] += len(result.job.block_ids)
        self._stats[metrics.COPY_SECONDS.of(direction)] += result.duration_s
