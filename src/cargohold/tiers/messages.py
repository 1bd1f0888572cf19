"""What the scheduler side tells the workers of tiers below host memory, and what they report."""

from __future__ import annotations

from dataclasses import dataclass, field

from cargohold.cache.manager import OffloadKey, Slot
from cargohold.tiers.chunk_format import Note
from cargohold.tiers.health import TierHealth
from cargohold.tiers.port import NO_LOSSES, JobKind, Listing, Losses


@dataclass(frozen=True, slots=True)
class TierCommand:
    """A job as every worker gets it, for its queue of one tier.

    Attributes:
        job_id: id of the job.
        tier: index of the tier; 0 is the fastest.
        kind: what to do.
        keys: the chunks' names in the tier, in any order.
        slots: for loads and stores, their slots in host memory, parallel to ``keys``.
        parents: for stores, the chunk before each in its prefix, or ``None``, parallel to ``keys``.
        timeout_s: the job is given up after this time.
        notes: for stores and new retentions, what else is known of each chunk, parallel to ``keys``; empty if that is nothing.
        cancels: whether it is no longer needed: it is in flight, and is reported like all others, only sooner.
    """

    job_id: int
    tier: int
    kind: JobKind
    keys: tuple[OffloadKey, ...] = ()
    slots: tuple[Slot, ...] = ()
    parents: tuple[OffloadKey | None, ...] = ()
    timeout_s: float = 0.0
    notes: tuple[Note, ...] = ()
    cancels: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """How a block that was computed again differs from what is kept of it.

    Attributes:
        block_id: the block.
        layer: number of the layer that differs most, among those of the block's group.
        distance: its distance; infinite if the type of numbers is not known, or they are not finite.
    """

    block_id: int
    layer: int
    distance: float


@dataclass(frozen=True, slots=True)
class TierReport:
    """A report from workers to the scheduler side on host memory and lower tiers.

    Attributes:
        answers: how jobs that ended went, by job id: one byte per chunk, the merged ``TierJob.verdicts`` of all workers that
            are merged here; and the number of these workers. Workers may report the same job in different steps.
        health: the health of tiers by rank of the worker and index of the tier, where it has changed.
        namespace: with the first report of the first worker, the outline of its namespace; else empty.
        listings: by job, what the first worker has listed.
        losses: by the tier's index, what workers have lost there. Chunks of jobs that ended count as lost after these jobs.
        seconds: how long look-ups and loads took that ended, by job id; of several workers, the longest time.
        gaps: by comparison that has ended, how blocks differ; equal ones are left out.
    """

    answers: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    health: dict[tuple[int, int], TierHealth] = field(default_factory=dict)
    namespace: dict[str, str] = field(default_factory=dict)
    listings: dict[int, Listing] = field(default_factory=dict)
    losses: dict[int, Losses] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    gaps: dict[int, tuple[Gap, ...]] = field(default_factory=dict)

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
        seconds = dict(self.seconds)
        for job_id, took_s in other.seconds.items():
            seconds[job_id] = max(took_s, seconds.get(job_id, 0.0))
        health, namespace = self.health | other.health, self.namespace or other.namespace
        gaps = {job_id: self.gaps.get(job_id, ()) + other.gaps.get(job_id, ()) for job_id in self.gaps | other.gaps}
        return TierReport(merged, health, namespace, listings, losses, seconds, gaps)


def both(left: bytes, right: bytes) -> bytes:
    """Merge two workers' verdicts on the same chunks: success, or that a chunk can be tried again, is what both say."""
    assert len(left) == len(right), "two workers were asked for different chunks"
    return (int.from_bytes(left) & int.from_bytes(right)).to_bytes(len(left))
