"""Worker side of lower tiers: moves chunks between this worker's shard of host memory and its shards of the tiers below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from cargohold.connector.offloading.messages import TierReport
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome
from cargohold.offload.tier.health import HEALTHY, TierHealth
from cargohold.offload.tier.host import ByteRows
from cargohold.offload.tier.jobs import ONE_BY_ONE, JobStatus, TierJob
from cargohold.offload.tiering.tasks import TierCommand
from cargohold.protocol import Clock, Stats, TransferOutcome

_OUTCOMES = {
    JobStatus.DONE: TransferOutcome.DONE,
    JobStatus.FAILED: TransferOutcome.FAILED,
    JobStatus.EXPIRED: TransferOutcome.ABANDONED,
    JobStatus.CANCELLED: TransferOutcome.ABANDONED,
}


class JobQueue(Protocol):
    """The interface of ``cargohold.offload.tier.TierQueue``: takes jobs and returns them; no method but the last waits."""

    def submit(self, job: TierJob) -> bool:
        """Take a job. Returns ``False`` if the queue cannot take it now; then ``poll`` does not return it."""
        ...

    def poll(self) -> Sequence[TierJob]:
        """Return the jobs that ended since the last call. Nothing reads or writes their buffers any more."""
        ...

    def cancel(self, job_id: int) -> None:
        """Make a job end soon, if it has not ended."""
        ...

    def health(self) -> TierHealth:
        """Return which kinds of jobs the queue takes now."""
        ...

    def num_bytes(self) -> int:
        """Return the bytes of the chunks that the tier holds, as far as is known here."""
        ...

    def shutdown(self) -> None:
        """Stop the queue."""
        ...


class TierWorker:
    """Hands commands to the queues of one worker's tiers.

    Args:
        queues: one queue per tier, by the tier's name, the fastest first.
        rows: this worker's shard of host memory, one row per block.
        rows_per_slot: number of rows that make a slot.
        clock: monotonic time in seconds.
        rank: the worker's rank.
    """

    def __init__(
        self, queues: Mapping[str, JobQueue], rows: ByteRows, rows_per_slot: int, clock: Clock, rank: int = 0
    ) -> None:
        self._names, self._queues = tuple(queues), tuple(queues.values())
        self._chunks = rows.reshape(len(rows) // rows_per_slot, -1)
        self._clock = clock
        self._rank = rank
        self._health = [HEALTHY] * len(queues)
        self._num_bytes = [0] * len(queues)
        self._knows_bytes = False
        self._answers: dict[int, tuple[bytes, int]] = {}
        self._refused: list[TierCommand] = []
        # The queue of each job in flight.
        self._queue_of: dict[int, JobQueue] = {}
        self._stats: Counter[str] = Counter()

    def start(self, command: TierCommand) -> None:
        """Submit a job to its tier's queue. If the queue refuses it, ``poll`` reports it as abandoned."""
        buffers: list[memoryview] = []
        if command.kind in ONE_BY_ONE:
            buffers = [self._chunks[slot].data for slot in command.slots]
        deadline = self._clock() + command.timeout_s
        queue = self._queues[command.tier]
        if queue.submit(TierJob(command.job_id, command.kind, command.keys, deadline, buffers, command.parents)):
            self._queue_of[command.job_id] = queue
        else:
            self._refused.append(command)

    def cancel(self, job_id: int) -> None:
        """Make a job end soon, because nobody needs it any more. ``poll`` reports it like any other."""
        queue = self._queue_of.get(job_id)
        if queue is not None:
            queue.cancel(job_id)

    def poll(self) -> dict[int, TransferOutcome]:
        """Return the jobs that ended since the last call, and how. ``take_report`` says how it went for each chunk."""
        refused, self._refused = self._refused, []
        outcomes = dict.fromkeys((command.job_id for command in refused), TransferOutcome.ABANDONED)
        self._answers.update((command.job_id, (bytes(len(command.keys)), 1)) for command in refused)
        for name, queue in zip(self._names, self._queues, strict=True):
            for job in queue.poll():
                self._knows_bytes = False
                self._queue_of.pop(job.job_id, None)
                self._count(name, job)
                assert job.status is not None
                outcomes[job.job_id] = _OUTCOMES[job.status]
                self._answers[job.job_id] = bytes(job.succeeded), 1
        return outcomes

    def take_report(self) -> TierReport | None:
        """Return whether each chunk of the jobs that ended succeeded, and the health of tiers where it changed, if any did."""
        answers, self._answers = self._answers, {}
        health = [queue.health() for queue in self._queues]
        news = {(self._rank, at): now for at, now in enumerate(health) if now != self._health[at]}
        for name, before, now in zip(self._names, self._health, health, strict=True):
            self._stats[f"{name}_suspensions"] += now.num_open > before.num_open
            self._stats[f"num_{name}_suspended"] += now.num_open - before.num_open
        self._health = health
        return TierReport(answers, news) if answers or news else None

    def take_stats(self) -> Stats:
        """Return the bytes moved and the chunks that failed their check, per tier, since the last call, and changed levels."""
        self._count_bytes()
        stats, self._stats = self._stats, Counter()
        return stats

    def shutdown(self) -> None:
        """Stop all queues."""
        for queue in self._queues:
            queue.shutdown()

    def _count_bytes(self) -> None:
        """Note how much more, or less, the tiers hold than when this was last counted."""
        if self._knows_bytes:
            return
        self._knows_bytes = True
        for at, (name, queue) in enumerate(zip(self._names, self._queues, strict=True)):
            before, self._num_bytes[at] = self._num_bytes[at], queue.num_bytes()
            self._stats[f"num_{name}_bytes"] += self._num_bytes[at] - before

    def _count(self, name: str, job: TierJob) -> None:
        self._stats[f"{name}_failures"] += job.status in (JobStatus.FAILED, JobStatus.EXPIRED)
        for answer, counter, amount in (
            (LoadOutcome.LOADED, "loaded_bytes", self._chunks.shape[1]),
            (LoadOutcome.CORRUPT, "corrupt_chunks", 1),
            (StoreOutcome.STORED, "stored_bytes", self._chunks.shape[1]),
        ):
            if job.kind in ONE_BY_ONE and (count := job.answers.count(answer)):
                self._stats[f"{name}_{counter}"] += count * amount
