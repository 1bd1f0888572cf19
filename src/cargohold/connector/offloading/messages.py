"""What the scheduler side tells the workers, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from cargohold.offload.tiering.commands import TierCommand
from cargohold.offload.tiering.task import both


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill blocks of a request from the tier.

    Attributes:
        job_id: the job.
        request_id: who waits for it.
        block_ids: destinations.
        rows: block-sized rows of the tier, parallel to ``block_ids``.
        timeout_s: give up if it has not started after this time.
    """

    job_id: int
    request_id: str
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy blocks to the tier, once the step's forward pass is over.

    Attributes:
        job_id: the job.
        block_ids: sources; held until the job has ended on all workers.
        rows: block-sized rows of the tier, parallel to ``block_ids``.
        timeout_s: give up if it has not started after this time.
    """

    job_id: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class OffloadingMetadata:
    """One step's jobs.

    Attributes:
        loads: to start at once.
        stores: to start after the forward pass.
        finish_stores: let all stores end before this step overwrites blocks: their sources could not be held.
        release: ended requests whose blocks no store reads any more; workers pass it on as ``finished_sending``.
        tier_commands: jobs for the tiers below host memory, to start at once.
        cancelled_tier_jobs: such jobs that nobody needs any more.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    finish_stores: bool = False
    release: tuple[str, ...] = ()
    tier_commands: tuple[TierCommand, ...] = ()
    cancelled_tier_jobs: tuple[int, ...] = ()


NOTHING_TO_DO = OffloadingMetadata()


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """How a job of a tier below host memory went, chunk by chunk.

    Attributes:
        succeeded: 1 where all of the workers that speak here were successful, else 0.
        num_workers: how many speak here.
    """

    succeeded: bytes
    num_workers: int = 1

    def aggregate(self, other: TierAnswer) -> TierAnswer:
        """Both workers' answers."""
        return TierAnswer(both(self.succeeded, other.succeeded), self.num_workers + other.num_workers)


@dataclass(frozen=True, slots=True)
class TierReport:
    """What workers tell the scheduler side: jobs of lower tiers that ended.

    Attributes:
        answers: by job. Workers may report the same job in different steps.
        tiers_off: tiers that a worker will not use any more; reported once by each.
    """

    answers: dict[int, TierAnswer] = field(default_factory=dict)
    tiers_off: frozenset[int] = frozenset()

    def aggregate(self, other: TierReport) -> TierReport:
        """Both workers' reports."""
        merged = dict(self.answers)
        for job_id, theirs in other.answers.items():
            mine = merged.get(job_id)
            merged[job_id] = theirs if mine is None else mine.aggregate(theirs)
        return TierReport(merged, self.tiers_off | other.tiers_off)
