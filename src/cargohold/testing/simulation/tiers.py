"""Tiers below host memory, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cargohold.cache import OffloadKey, make_manager
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler, OffloadingWorker
from cargohold.connector.offloading.factory import scheduler_side
from cargohold.connector.offloading.worker import TierWorker
from cargohold.protocol import Clock, SchedulerEnvironment, WorkerEnvironment
from cargohold.testing.simulation.transfers import HeldTransfers
from cargohold.tiers import Answer, BreakerConfig, JobKind, JobStatus, LoadOutcome, StoreOutcome, TierHealth, TierJob
from cargohold.tiers.health import MediumHealth
from cargohold.tiers.port import ACCESS_OF
from cargohold.tiers.scheduler_side import LowerTiers, TieringManager, TierOptions


class SimulatedMedium:
    """One worker's shard of a medium, which outlives engines.

    Attributes:
        chunks: contents of the chunks that are there, by key.
        max_chunks: most chunks that it holds; the oldest are evicted first.
        is_gone: whether every access fails.
        stalls: whether accesses never end.
    """

    def __init__(self, max_chunks: int = 10**9) -> None:
        self.chunks: dict[OffloadKey, bytes] = {}
        self.max_chunks = max_chunks
        self.is_gone = False
        self.stalls = False

    def access(self, kind: JobKind, key: OffloadKey, buffer: memoryview | None) -> Answer:
        """Probe, touch, load or store one chunk."""
        chunk = self.chunks.get(key)
        if kind in {JobKind.PROBE, JobKind.TOUCH}:
            return chunk is not None
        assert buffer is not None
        if kind is JobKind.STORE:
            self.chunks.setdefault(key, bytes(buffer))
            while len(self.chunks) > self.max_chunks:
                del self.chunks[next(iter(self.chunks))]
            return StoreOutcome.STORED if chunk is None else StoreOutcome.PRESENT
        if chunk is None:
            return LoadOutcome.ABSENT
        if len(chunk) != len(buffer):
            del self.chunks[key]
            return LoadOutcome.CORRUPT
        buffer[:] = chunk
        return LoadOutcome.LOADED

    def corrupt(self, key: OffloadKey) -> None:
        """Damage a chunk, in a way that a check would notice."""
        self.chunks[key] = self.chunks[key][:-1]


class HeldQueue:
    """Carries out a job at the next poll, or when told to. Satisfies ``JobQueue``.

    Args:
        medium: the medium that jobs access.
        clock: virtual time.
        auto: whether jobs are carried out at the next poll without being told to.
        has_index: whether the tier answers look-ups without its medium.

    Attributes:
        pending: jobs that have not ended.
        held: kinds of jobs that are carried out only when told to.
        is_off: whether it refuses every job, for good.
        on_job: told of every job that is carried out.
    """

    def __init__(self, medium: SimulatedMedium, clock: Clock, *, auto: bool = True, has_index: bool = True) -> None:
        self.medium = medium
        self.auto = auto
        self.pending: list[TierJob] = []
        self.held: frozenset[JobKind] = frozenset()
        self.is_off = False
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
        buffers: Sequence[memoryview | None] = job.buffers or [None] * len(job.keys)
        for at, (key, buffer) in enumerate(zip(job.keys[:num_done], buffers, strict=False)):
            answer = job.answers[at] = self.medium.access(job.kind, key, buffer)
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
        ended, self._ended = self._ended, []
        return ended

    def num_bytes(self) -> int:
        """Nothing: fingerprints take no room."""
        return 0

    def health(self) -> TierHealth:
        """The health of the medium, judged as a real queue does."""
        return replace(self._health.report(), is_off=self.is_off)

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
        job.status, job.reason = status, f"simulated: {status.value}"
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
        self.config = OffloadConfig(host_bytes=1, **options)
        self.media = [[SimulatedMedium() for _ in range(world_size)] for _ in self.options]
        self.manager: TieringManager
        self.lower: LowerTiers
        self.transfers: list[HeldTransfers] = []
        self.queues: list[list[HeldQueue]] = []

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """A scheduler side with an empty host memory."""
        host = make_manager(self.config.policy, self.num_slots, record_events=True)
        self.transfers, self.queues = [], []
        side = scheduler_side(self.config, environment, host, self.options)
        assert isinstance(side.manager, TieringManager)
        self.manager = side.manager
        self.lower = self.manager.lower
        return side

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """A worker side with an empty host memory, and the rank's shards of the media."""
        num_rows = self.num_slots * self.config.blocks_per_chunk
        rows = np.zeros((num_rows, environment.layout.block_bytes), dtype=np.uint8)
        queues = {
            tier.name: HeldQueue(media[environment.rank], environment.clock, has_index=tier.has_index)
            for tier, media in zip(self.options, self.media, strict=True)
        }
        self.queues.append(list(queues.values()))

        def make_transfers(regions: Sequence[Any]) -> HeldTransfers:
            self.transfers.append(HeldTransfers(regions[0], rows, environment.clock))
            return self.transfers[-1]

        tiers = TierWorker(queues, rows, self.config.blocks_per_chunk, environment.clock, environment.rank)
        return OffloadingWorker(make_transfers, tiers)

    def all_queues(self) -> list[HeldQueue]:
        """Every queue of the engine made last."""
        return [queue for queues in self.queues for queue in queues]
