"""Messages from the scheduler side to the workers, and the workers' answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from cargohold.offload.tiering.commands import TierCommand
from cargohold.offload.tiering.task import both


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A job that fills blocks of a request from the tier.

    Attributes:
        job_id: id of the job.
        request_id: the request that waits for it.
        block_ids: destinations.
        rows: block-sized rows of the tier, parallel to ``block_ids``.
        timeout_s: the job is given up if it has not started after this time.
    """

    job_id: int
    request_id: str
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A job that copies blocks to the tier, once the step's forward pass is over.

    Attributes:
        job_id: id of the job.
        block_ids: sources; held until the job has ended on all workers.
        rows: block-sized rows of the tier, parallel to ``block_ids``.
        timeout_s: the job is given up if it has not started after this time.
    """

    job_id: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class OffloadingMetadata:
    """One step's jobs.

    Attributes:
        loads: jobs to start at once.
        stores: jobs to start after the forward pass.
        finish_stores: whether all stores must have read their sources before this step overwrites blocks, because these
            sources are not held.
        release: ended requests whose blocks no store reads any more; workers report them as ``finished_sending``.
        tier_commands: jobs for the tiers below host memory, to start at once.
        cancelled_tier_jobs: ids of jobs for these tiers that nobody needs any more.
        given_up_loads: ids of loads that did not end in time. Workers whose copy has not ended report their requests' loads as
            failed now, and the job when its copy has ended.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    finish_stores: bool = False
    release: tuple[str, ...] = ()
    tier_commands: tuple[TierCommand, ...] = ()
    cancelled_tier_jobs: tuple[int, ...] = ()
    given_up_loads: tuple[int, ...] = ()


NOTHING_TO_DO = OffloadingMetadata()


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """How a job of a tier below host memory went, chunk by chunk.

    Attributes:
        succeeded: one byte per chunk: 1 if all of the ``num_workers`` workers were successful, else 0.
        num_workers: number of workers whose answers are merged here.
    """

    succeeded: bytes
    num_workers: int = 1

    def aggregate(self, other: TierAnswer) -> TierAnswer:
        """Return the answers of both, merged: a chunk succeeded only if it did in both."""
        return TierAnswer(both(self.succeeded, other.succeeded), self.num_workers + other.num_workers)


@dataclass(frozen=True, slots=True)
class TierReport:
    """A report from workers to the scheduler side on lower tiers.

    Attributes:
        answers: answers of jobs that ended, by job id. Workers may report the same job in different steps.
        tiers_off: indices of tiers that a worker will not use any more; each worker reports each once.
    """

    answers: dict[int, TierAnswer] = field(default_factory=dict)
    tiers_off: frozenset[int] = frozenset()

    def aggregate(self, other: TierReport) -> TierReport:
        """Return both reports, merged."""
        merged = dict(self.answers)
        for job_id, theirs in other.answers.items():
            mine = merged.get(job_id)
            merged[job_id] = theirs if mine is None else mine.aggregate(theirs)
        return TierReport(merged, self.tiers_off | other.tiers_off)
