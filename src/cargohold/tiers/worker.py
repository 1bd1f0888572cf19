"""A worker's part of the tiers below host memory: hands jobs to their queues and reports how they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cargohold.cache.manager import OffloadKey, Slot
from cargohold.protocol import Clock, Stats, Tally, TransferOutcome, metrics
from cargohold.tiers.chunk_format import NO_DETAILS, Note
from cargohold.tiers.health import HEALTHY, TierHealth
from cargohold.tiers.memory import Buffer, ByteRows, Pieces
from cargohold.tiers.messages import TierCommand, TierReport
from cargohold.tiers.port import (
    EMPTY,
    LISTED_AT_ONCE,
    NO_LOSSES,
    ONE_BY_ONE,
    OPEN,
    URGENT,
    JobKind,
    JobStatus,
    Listing,
    LoadOutcome,
    Losses,
    StoreOutcome,
    TierJob,
    TierUsage,
)

_NOT_TRIED = {JobKind.STORE: bytes([OPEN])}
"""The verdict on each chunk of a job that a queue did not take, where that is not 0."""
_OUTCOMES = {
    JobStatus.DONE: TransferOutcome.DONE,
    JobStatus.FAILED: TransferOutcome.FAILED,
    JobStatus.EXPIRED: TransferOutcome.ABANDONED,
    JobStatus.CANCELLED: TransferOutcome.ABANDONED,
}


class JobQueue:
    """Takes jobs and returns them; no method but the last waits. ``cargohold.tiers.TierQueue`` carries them out.

    By itself it is for a worker whose chunks another worker stores and loads, and says at once that all went well. A job ends
    when all workers have reported it, so it is the other worker's answers that count.
    """

    def __init__(self) -> None:
        self._ended: list[TierJob] = []

    def submit(self, job: TierJob) -> bool:
        """Take a job. Returns ``False`` if the queue cannot take it now; then ``poll`` does not return it.

        By default it ends at once. It is not said what was stored or loaded: bytes are counted where they are moved.
        """
        job.answers = [True] * len(job.keys)
        job.status = JobStatus.DONE
        self._ended.append(job)
        return True

    def poll(self) -> Sequence[TierJob]:
        """Return the jobs that ended since the last call. Nothing reads or writes their buffers any more."""
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_id: int) -> None:
        """Make a job end soon, if it has not ended."""

    def health(self) -> TierHealth:
        """Return which kinds of jobs the queue takes now."""
        return HEALTHY

    def take_losses(self) -> Losses:
        """Return what the tier has lost since the last call, as far as it knows."""
        return NO_LOSSES

    def lacking(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the chunks that the tier does not have, by its index: only for a tier that reported losses."""
        del keys
        return []

    def usage(self) -> TierUsage:
        """Return how full the tier is, as far as is known here."""
        return EMPTY

    def shutdown(self) -> None:
        """Stop the queue."""


class RecentLosses:
    """What one tier has lost lately, so that no report says of a lost chunk that it is there.

    A job says of a chunk that it is there, and then the chunk is lost while the job goes on with others. So what is lost is
    kept for as long as jobs are in flight that began before, and reported again after these jobs if it is still not there.

    Args:
        queue: the tier's queue.
    """

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        # By chunk, and for all chunks together, the job that was begun last before it was lost; the oldest first.
        self._lost: dict[OffloadKey, int] = {}
        self._all_lost = 0

    def take(self, ended: Sequence[TierJob], last_begun: int, oldest: int) -> Losses:
        """Return what was lost since the last call, or before one of the jobs that have ended now.

        Args:
            ended: jobs that have ended since the last call.
            last_begun: the latest job so far; their ids ascend.
            oldest: the oldest job in flight.
        """
        losses = self._queue.take_losses()
        if losses:
            for key in losses.keys:
                self._lost.pop(key, None)
                self._lost[key] = last_begun
            self._all_lost = last_begun if losses.is_all else self._all_lost
        if not (self._lost or self._all_lost):
            return NO_LOSSES  # mostly
        suspects = set(losses.keys)
        for job in ended:
            if job.kind not in LISTED_AT_ONCE:
                suspects.update(job.keys if job.job_id <= self._all_lost else self._lost.keys() & job.keys)
        for key in [key for key, begun in self._lost.items() if begun < oldest]:
            del self._lost[key]
        self._all_lost = self._all_lost if self._all_lost >= oldest else 0
        return Losses(tuple(self._queue.lacking(list(suspects))), losses.is_all)


class TierWorker:
    """Hands commands to the queues of one worker's tiers.

    Args:
        queues: one queue per tier, by the tier's name, the fastest first.
        rows: this worker's shard of host memory.
        rows_per_slot: number of rows that make a slot, where slots are numbered.
        clock: monotonic time in seconds.
        rank: the worker's rank.
        namespace: the outline of what the chunks' bytes depend on in the first shared tier; empty if there is none.
    """

    def __init__(  # made in one place
        self,
        queues: Mapping[str, JobQueue],
        rows: ByteRows,
        rows_per_slot: int,
        clock: Clock,
        rank: int = 0,
        namespace: Mapping[str, str] | None = None,
    ) -> None:
        self._names, self._queues = tuple(queues), tuple(queues.values())
        self._rows = rows
        self._chunks = rows.reshape(len(rows) // rows_per_slot, -1)
        self._clock = clock
        self._rank = rank
        self._health = [HEALTHY] * len(queues)
        self._usage = [EMPTY] * len(queues)
        self._knows_usage = False
        self._answers: dict[int, tuple[bytes, int]] = {}
        self._listings: dict[int, Listing] = {}
        self._seconds: dict[int, float] = {}
        self._recent = [RecentLosses(queue) for queue in self._queues]
        self._losses: dict[int, Losses] = {}
        self._last_begun = 0
        self._refused: list[TierJob] = []
        # Reported once, by one worker: the others' differ only in the part of the model that they have.
        self._untold = dict(namespace or {}) if rank == 0 else {}
        # The queue of each job in flight.
        self._queue_of: dict[int, JobQueue] = {}
        self._stats = Tally()

    def carry_out(self, message: Sequence[TierCommand]) -> None:
        """Start and cancel jobs."""
        for command in message:
            if command.cancels:
                self._queues[command.tier].cancel(command.job_id)
            else:
                self.start(command)

    def start(self, command: TierCommand) -> None:
        """Submit a job to its tier's queue. If the queue refuses it, ``poll`` reports it as abandoned."""
        buffers: list[Buffer] = []
        if command.kind in ONE_BY_ONE:
            buffers = [self._memory_of(slot) for slot in command.slots]
        deadline = self._clock() + command.timeout_s
        queue = self._queues[command.tier]
        notes = command.notes
        if self._rank and command.kind is JobKind.STORE:
            # Only the first worker lists chunks with what was kept of them.
            notes = tuple(note if note.details is NO_DETAILS else Note(retention=note.retention) for note in notes)
        job = TierJob(command.job_id, command.kind, command.keys, deadline, buffers, command.parents, notes)
        self._last_begun = command.job_id
        if queue.submit(job):
            self._queue_of[command.job_id] = queue
        else:
            self._refused.append(job)

    def poll(self) -> dict[int, TransferOutcome]:
        """Return the jobs that ended since the last call, and how. ``take_report`` says how it went for each chunk."""
        refused, self._refused = self._refused, []
        outcomes = dict.fromkeys((job.job_id for job in refused), TransferOutcome.ABANDONED)
        self._answers.update((job.job_id, (_NOT_TRIED.get(job.kind, b"\0") * len(job.keys), 1)) for job in refused)
        ended = [queue.poll() for queue in self._queues]
        for name, jobs in zip(self._names, ended, strict=True):
            for job in jobs:
                self._knows_usage = False
                self._queue_of.pop(job.job_id, None)
                self._count(name, job)
                assert job.status is not None
                outcomes[job.job_id] = _OUTCOMES[job.status]
                self._answers[job.job_id] = job.verdicts, 1
                if job.kind in URGENT and job.ended_at:
                    self._seconds[job.job_id] = job.ended_at - job.queued_at
                if job.kind in LISTED_AT_ONCE and self._rank == 0:
                    self._listings[job.job_id] = job.listing
        oldest = next(iter(self._queue_of), self._last_begun + 1)
        for at, recent in enumerate(self._recent):
            losses = recent.take(ended[at], self._last_begun, oldest)
            if losses:
                self._losses[at] = self._losses.get(at, NO_LOSSES) | losses
        return outcomes

    def take_report(self) -> TierReport | None:
        """Return whether each chunk of the jobs that ended succeeded, and the health of tiers where it changed, if any did."""
        answers, self._answers = self._answers, {}
        health = [queue.health() for queue in self._queues]
        news = {(self._rank, at): now for at, now in enumerate(health) if now != self._health[at]}
        for name, before, now in zip(self._names, self._health, health, strict=True):
            self._stats[metrics.SUSPENSIONS.of(name)] += now.num_open > before.num_open
            self._stats[metrics.OTHER_LEVELS.of(f"num_{name}_suspended")] += now.num_open - before.num_open
        self._health = health
        namespace, self._untold = self._untold, {}
        listings, self._listings = self._listings, {}
        losses, self._losses = self._losses, {}
        seconds, self._seconds = self._seconds, {}
        if not (answers or news or namespace or losses):
            return None
        return TierReport(answers, news, namespace, listings, losses, seconds)

    def take_stats(self) -> Stats:
        """Return the bytes moved and the chunks that failed their check, per tier, since the last call, and changed levels."""
        self._count_usage()
        stats, self._stats = self._stats, Tally()
        return stats

    def shutdown(self) -> None:
        """Stop all queues."""
        for queue in self._queues:
            queue.shutdown()

    def _count_usage(self) -> None:
        """Note how much more, or less, the tiers hold, and can hold, than when this was last counted."""
        if self._knows_usage:
            return
        self._knows_usage = True
        for at, (name, queue) in enumerate(zip(self._names, self._queues, strict=True)):
            before, self._usage[at] = self._usage[at], (now := queue.usage())
            self._stats[metrics.TIER_READY.of(name)] += now.num_bytes - before.num_bytes
            self._stats[metrics.TIER_PLAIN.of(name)] += now.plain_bytes - before.plain_bytes
            if now.capacity_bytes is not None:
                self._stats[metrics.TIER_CAPACITY.of(name)] += now.capacity_bytes - (before.capacity_bytes or 0)

    def _memory_of(self, slot: Slot) -> Buffer:
        return self._chunks[slot].data if isinstance(slot, int) else Pieces([self._rows[row].data for row in slot])

    def _count(self, name: str, job: TierJob) -> None:
        self._stats[metrics.TIER_FAILURES.of(name)] += job.status in (JobStatus.FAILED, JobStatus.EXPIRED)
        if job.kind not in ONE_BY_ONE:
            return
        for answer, buffer in zip(job.answers, job.buffers, strict=False):  # a job that has failed may lack answers
            match answer:
                case LoadOutcome.LOADED:
                    self._stats[metrics.MOVED.of(name, "out")] += len(buffer)
                case LoadOutcome.CORRUPT:
                    self._stats[metrics.CORRUPT.of(name)] += 1
                case StoreOutcome.STORED:
                    self._stats[metrics.MOVED.of(name, "in")] += len(buffer)
