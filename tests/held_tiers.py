"""Tiers below host memory whose jobs end when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cargohold.cache import OffloadKey, OffloadManager
from cargohold.connector.config import limits_in_chunks
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler, OffloadingWorker
from cargohold.connector.offloading.factory import host_manager, scheduler_side
from cargohold.lab.simulation.tiers import SimulatedMedium
from cargohold.lab.simulation.transfers import ByteRows, HeldTransfers, by_rows, empty_rows
from cargohold.protocol import Clock, SchedulerEnvironment, WorkerEnvironment
from cargohold.tiers import Answer, BreakerConfig, JobKind, JobStatus, StoreOutcome, TierHealth, TierJob
from cargohold.tiers.health import MediumHealth
from cargohold.tiers.port import ACCESS_OF, EMPTY, NO_LOSSES, Losses, TierUsage
from cargohold.tiers.scheduler_side import LowerTiers, TierOptions
from cargohold.tiers.worker import JobQueue, TierWorker
from cargohold.transfer import TransferWorker

_NEVER = float("inf")


class HeldMedium(SimulatedMedium):
    """A medium that fails as a test says.

    Attributes:
        is_gone: whether every access fails.
        stalls: whether accesses never end.
        not_now: what the next stores of absent chunks are answered in place of being carried out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_gone = False
        self.stalls = False
        self.not_now: list[StoreOutcome] = []

    def access(self, job: TierJob, at: int, now: float) -> Answer:
        """Do what a job asks for with one of its chunks."""
        if job.kind is JobKind.STORE and self.not_now and job.keys[at] not in self.chunks:
            return self.not_now.pop(0)
        return super().access(job, at, now)


class HeldQueue(JobQueue):
    """Carries out a job at the next poll, or when told to.

    Args:
        medium: the medium that jobs access.
        clock: virtual time.
        auto: whether jobs are carried out at the next poll without being told to.
        has_index: whether the tier answers look-ups without its medium.
        is_listed: whether it tells what it has lost.

    Attributes:
        pending: jobs that have not ended.
        held: kinds of jobs that are carried out only when told to.
        is_off: whether it refuses every job, for good.
        takes_s: virtual seconds that a job takes which is carried out without being told to; at most until the poll.
        on_job: told of every job that is carried out.
    """

    def __init__(
        self,
        medium: HeldMedium,
        clock: Clock,
        *,
        auto: bool = True,
        has_index: bool = True,
        is_listed: bool = False,
    ) -> None:
        self.medium = medium
        medium.open()
        self._is_listed = is_listed
        self.auto = auto
        self.pending: list[TierJob] = []
        self.held: frozenset[JobKind] = frozenset()
        self.is_off = False
        self.takes_s = _NEVER
        self.on_job: Callable[[TierJob], None] = lambda _: None
        self._clock = clock
        self._ended: list[TierJob] = []
        self._health = MediumHealth("simulated", clock, BreakerConfig(), has_index=has_index)

    def submit(self, job: TierJob) -> bool:
        """Remember the job, unless the medium keeps failing."""
        if self.is_off or not self._health.admit(job.kind):
            return False
        job.queued_at = self._clock()
        self.pending.append(job)
        return True

    def complete(self, job: TierJob, status: JobStatus = JobStatus.DONE) -> None:
        """Carry out a pending job now. With a status other than ``DONE``, only its first chunk is done and has an answer."""
        self.on_job(job)
        num_done = len(job.keys) if status is JobStatus.DONE else 1
        for at in range(num_done):
            answer = job.answers[at] = self.medium.access(job, at, self._clock())
            self._health.note_answers(job, [answer])
        self._end(job, status)

    def poll(self) -> list[TierJob]:
        """Results of the jobs that ended or passed their deadline."""
        for job in list(self.pending):
            if job.status:
                continue  # one before it got its access suspended
            if self._clock() > job.deadline:
                self._end(job, JobStatus.EXPIRED)
            elif self.auto and job.kind not in self.held and not self.medium.stalls:
                if self.medium.is_gone:
                    self._end(job, JobStatus.FAILED)
                else:
                    self.complete(job)
                    job.ended_at = min(job.ended_at, job.queued_at + self.takes_s)  # however long the step took
        ended, self._ended = self._ended, []
        return ended

    def take_losses(self) -> Losses:
        """What the medium has lost, if it tells."""
        return self.medium.take_losses() if self._is_listed else NO_LOSSES

    def lacking(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of the chunks that are not there."""
        return self.medium.lacking(keys)

    def usage(self) -> TierUsage:
        """Nothing: fingerprints take no room."""
        return EMPTY

    def health(self) -> TierHealth:
        """The health of the medium, judged as a real queue does."""
        health = self._health.report()
        return replace(health, is_off=True) if self.is_off else health

    def cancel(self, job_id: int) -> None:
        """End a job."""
        for job in [job for job in self.pending if job.job_id == job_id]:
            self._end(job, JobStatus.CANCELLED)

    def shutdown(self) -> None:
        """Cancel all pending jobs."""
        for job in list(self.pending):
            self._end(job, JobStatus.CANCELLED)

    def _end(self, job: TierJob, status: JobStatus) -> None:
        self.pending.remove(job)
        job.status, job.reason, job.ended_at = status, f"simulated: {status.value}", self._clock()
        if (access := self._health.note_end(job)) is not None:
            for other in [other for other in self.pending if ACCESS_OF[other.kind] is access]:
                self.pending.remove(other)
                other.status = JobStatus.FAILED
                self._ended.append(other)
        self._ended.append(job)


class SimulatedTiering:
    """Makes offloading connectors with simulated tiers. Satisfies ``KVConnectorFactory``.

    Every engine made with the same object has a host memory of its own; the media outlive it.

    Args:
        num_slots: chunks that host memory holds.
        tiers: how each tier is used, the fastest first.
        world_size: workers, each with a shard of every medium.
        options: fields of ``OffloadConfig``; ``host_bytes`` means nothing here.

    Attributes:
        namespace: the outline of the namespace that workers of further engines report.
        media: the media, per tier and rank.
        manager, lower: manager and lower tiers of the engine made last.
        transfers, queues: of the engine made last, transfers per rank, and queues per rank and tier.
    """

    def __init__(
        self,
        num_slots: int,
        tiers: Sequence[TierOptions] = (TierOptions(name="disk"),),
        world_size: int = 1,
        **options: Any,
    ) -> None:
        self.num_slots = num_slots
        self.options = tuple(tiers)
        self.namespace: Mapping[str, str] = {}
        self.config = OffloadConfig(host_bytes="1GiB", **{"mode": "eager", **options})
        self.media = [[HeldMedium() for _ in range(world_size)] for _ in self.options]
        self.manager: OffloadManager
        self.lower: LowerTiers
        self.transfers: list[HeldTransfers] = []
        self.queues: list[list[HeldQueue]] = []

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """A scheduler side with an empty host memory."""
        quotas = limits_in_chunks(self.config.quotas, self.num_slots, 1)
        host = host_manager(self.config, environment.layout, self.num_slots, quotas, record_events=True)
        self.transfers, self.queues = [], []
        side = scheduler_side(self.config, environment, host, self.options)
        assert side.lower is not None
        self.manager, self.lower = side.shared.manager, side.lower
        return side

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """A worker side with an empty host memory, and the rank's shards of the media."""
        layout = environment.layout
        rows = empty_rows(self.num_slots, self.config.blocks_per_chunk, layout)
        queues = {
            tier.name: HeldQueue(
                media[environment.rank], environment.clock, has_index=tier.has_index, is_listed=tier.is_listed
            )
            for tier, media in zip(self.options, self.media, strict=True)
        }
        self.queues.append(list(queues.values()))

        def made(parts: ByteRows) -> HeldTransfers:
            self.transfers.append(HeldTransfers(parts, rows, environment.clock))
            return self.transfers[-1]

        def make_transfers(kv_caches: Sequence[Sequence[Any]]) -> TransferWorker:
            return by_rows(kv_caches, layout, made)

        per_chunk, clock, rank = self.config.blocks_per_chunk, environment.clock, environment.rank
        tiers = TierWorker(queues, rows, per_chunk, clock, rank, self.namespace)
        return OffloadingWorker(make_transfers, tiers)

    def all_queues(self) -> list[HeldQueue]:
        """Every queue of the engine made last."""
        return [queue for queues in self.queues for queue in queues]
