"""Messages from the scheduler side to the workers, and the workers' answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from cargohold.tiers.health import TierHealth
from cargohold.tiers.port import NO_LOSSES, Listing, Losses
from cargohold.tiers.scheduler_side.tasks import TierCommand, both


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
class TierReport:
    """A report from workers to the scheduler side on lower tiers.

    Attributes:
        answers: how jobs that ended went, by job id: one byte per chunk, 1 if all workers that are merged here were successful,
            else 0; and the number of these workers. Workers may report the same job in different steps.
        health: the health of tiers by rank of the worker and index of the tier, where it has changed.
        namespace: with the first report of the first worker, the outline of its namespace; else empty.
        listings: by job, what the first worker has listed.
        losses: by the tier's index, what workers have lost there. Chunks of jobs that ended count as lost after these jobs.
    """

    answers: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    health: dict[tuple[int, int], TierHealth] = field(default_factory=dict)
    namespace: dict[str, str] = field(default_factory=dict)
    listings: dict[int, Listing] = field(default_factory=dict)
    losses: dict[int, Losses] = field(default_factory=dict)

    def aggregate(self, other: TierReport) -> TierReport:
        """Return both reports, merged: a chunk succeeded only if it did in both."""
        merged = dict(self.answers)
        for job_id, (theirs, num_workers) in other.answers.items():
            mine, num_mine = merged.get(job_id, (theirs, 0))
            merged[job_id] = both(mine, theirs), num_mine + num_workers
        listings = self.listings | other.listings
        losses = {
            at: self.losses.get(at, NO_LOSSES) | other.losses.get(at, NO_LOSSES)
            for at in self.losses.keys() | other.losses.keys()
        }
        return TierReport(merged, self.health | other.health, self.namespace or other.namespace, listings, losses)
