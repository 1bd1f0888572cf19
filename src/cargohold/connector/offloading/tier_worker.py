"""Worker side of lower tiers: moves chunks between this worker's shard of host memory and its shards of the tiers below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from cargohold.connector.offloading.messages import TierAnswer
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome
from cargohold.offload.tier.host import ByteRows
from cargohold.offload.tier.jobs import JobKind, JobStatus, TierJob, TierResult
from cargohold.offload.tiering.commands import TierCommand
from cargohold.protocol import Clock, Stats, TransferOutcome

_OUTCOMES = {
    JobStatus.DONE: TransferOutcome.DONE,
    JobStatus.FAILED: TransferOutcome.FAILED,
    JobStatus.EXPIRED: TransferOutcome.ABANDONED,
    JobStatus.CANCELLED: TransferOutcome.ABANDONED,
}


class JobQueue(Protocol):
    """The interface of ``cargohold.offload.tier.TierQueue``: takes jobs and returns results; no method but the last waits."""

    def submit(self, job: TierJob) -> bool:
        """Take a job. Returns ``False`` if the queue cannot take it now; then there will be no result."""
        ...

    def poll(self) -> Sequence[TierResult]:
        """Return the results of jobs that ended since the last call. Nothing reads or writes their buffers any more."""
        ...

    def cancel(self, job_id: int) -> None:
        """Make a job end soon, if it has not ended."""
        ...

    @property
    def is_off(self) -> bool:
        """Whether the queue refuses every job from now on."""
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
    """

    def __init__(self, queues: Mapping[str, JobQueue], rows: ByteRows, rows_per_slot: int, clock: Clock) -> None:
        self._names, self._queues = tuple(queues), tuple(queues.values())
        self._chunks = rows.reshape(len(rows) // rows_per_slot, -1)
        self._clock = clock
        self._refused: list[TierCommand] = []
        # The queue of each job in flight.
        self._queue_of: dict[int, JobQueue] = {}
        self._reported_off: set[int] = set()
        self._stats: Counter[str] = Counter()

    def start(self, command: TierCommand) -> None:
        """Submit a job to its tier's queue. If the queue refuses it, ``poll`` reports it as abandoned."""
        buffers: list[memoryview] = []
        if command.kind in (JobKind.LOAD, JobKind.STORE):
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

    def poll(self) -> dict[int, tuple[TransferOutcome, TierAnswer]]:
        """Return the jobs that ended since the last call, each with its outcome and whether each of its chunks succeeded."""
        refused, self._refused = self._refused, []
        ended = {
            command.job_id: (TransferOutcome.ABANDONED, TierAnswer(bytes(len(command.keys)))) for command in refused
        }
        for name, queue in zip(self._names, self._queues, strict=True):
            for result in queue.poll():
                self._queue_of.pop(result.job.job_id, None)
                self._count(name, result)
                ended[result.job.job_id] = (_OUTCOMES[result.status], TierAnswer(bytes(result.succeeded)))
        return ended

    def take_off(self) -> frozenset[int]:
        """Return the indices of tiers that are off for good, each only once."""
        news = frozenset(at for at, queue in enumerate(self._queues) if queue.is_off) - self._reported_off
        self._reported_off |= news
        return news

    def take_stats(self) -> Stats:
        """Return the bytes moved and the chunks that failed their check, per tier, since the last call."""
        stats, self._stats = self._stats, Counter()
        return stats

    def shutdown(self) -> None:
        """Stop all queues."""
        for queue in self._queues:
            queue.shutdown()

    def _count(self, name: str, result: TierResult) -> None:
        if result.job.kind not in (JobKind.LOAD, JobKind.STORE):
            return
        for answer, counter, amount in (
            (LoadOutcome.LOADED, "loaded_bytes", self._chunks.shape[1]),
            (LoadOutcome.CORRUPT, "corrupt_chunks", 1),
            (StoreOutcome.STORED, "stored_bytes", self._chunks.shape[1]),
        ):
            if count := result.answers.count(answer):
                self._stats[f"{name}_{counter}"] += count * amount
