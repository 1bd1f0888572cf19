"""The bookkeeping of a tier's jobs: which are live, which piece of work comes next, how jobs end. No threads, no I/O.

::

    queued --take--> pieces under way --answer of the last chunk--> DONE
       |                   |
       +-------------------+-- failure, deadline, cancellation --> FAILED, EXPIRED, CANCELLED

A job ends once. Answers of pieces whose job has ended are dropped. While a piece copies from or to the job's buffers, the
job's result is held back until the copy is done, because the caller that polls the result owns the buffers again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.jobs import ACCESS_OF, Access, Answer, JobKind, JobStatus, TierJob, TierResult
from cargohold.protocol import Clock

URGENT = frozenset(kind for kind in JobKind if ACCESS_OF[kind] is not Access.WRITE)
"""Kinds of jobs that go before others, because somebody waits for them or they take hardly any time."""
_ONE_BY_ONE = frozenset({JobKind.LOAD, JobKind.STORE})


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job that has not ended.

    Attributes:
        job: the job.
        queued_at: time at which it was queued.
        answers: one per chunk; ``None`` where there is none yet.
        num_taken: number of chunks that were handed out in pieces.
        num_answered: number of chunks that have an answer.
        num_copying: number of pieces that copy from or to the buffers right now.
        end: status and reason once it has ended; its result follows when no piece copies any more.
    """

    job: TierJob
    queued_at: float
    answers: list[Answer | None]
    num_taken: int = 0
    num_answered: int = 0
    num_copying: int = 0
    end: tuple[JobStatus, str] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of work for one thread: some chunks of a job.

    Attributes:
        live: the job.
        first: index of the first chunk in the job.
        count: number of chunks.
    """

    live: LiveJob
    first: int
    count: int

    @property
    def kind(self) -> JobKind:
        """What to do."""
        return self.live.job.kind

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """Keys of the chunks."""
        return self.live.job.keys[self.first : self.first + self.count]


@dataclass(slots=True)
class JobLedger:
    """The live jobs of one queue. Not thread-safe: its owner holds a lock.

    Attributes:
        clock: monotonic time in seconds.
        results: results of jobs that ended and were not polled yet.
        num_chunks: number of chunks in live jobs: in ``URGENT`` ones under ``True``, in the others under ``False``.
    """

    clock: Clock
    results: list[TierResult] = field(default_factory=list)
    num_chunks: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _live: dict[int, LiveJob] = field(default_factory=dict)
    _waiting: dict[Access, deque[LiveJob]] = field(default_factory=lambda: {access: deque() for access in Access})
    _taken_last: Access = Access.WRITE

    def __len__(self) -> int:
        return len(self._live)

    def add(self, job: TierJob) -> None:
        """Queue a job; one without chunks ends at once."""
        assert job.job_id not in self._live, f"job {job.job_id} was submitted twice"
        live = LiveJob(job, self.clock(), [None] * len(job.keys))
        self._live[job.job_id] = live
        self.num_chunks[job.kind in URGENT] += len(job.keys)
        if not job.keys:
            self.end(live, JobStatus.DONE)
        else:
            queue = self._waiting[ACCESS_OF[job.kind]]
            while queue and queue[0].end:
                queue.popleft()  # while every thread hangs in the medium, nobody else removes jobs that have ended
            queue.append(live)

    def take(self) -> Piece | None:
        """Return the next piece of work, or ``None``.

        Look-ups and loads take turns: whoever asks what is there does not wait for all of what others load, nor are loads kept
        back by look-ups without end. Writes come after both.
        """
        turns = (Access.LOOK_UP, Access.LOAD, Access.WRITE)
        if self._taken_last is Access.LOOK_UP:
            turns = (Access.LOAD, Access.LOOK_UP, Access.WRITE)
        for access in turns:
            piece = self._take_from(self._waiting[access])
            if piece is not None:
                self._taken_last = access
                return piece
        return None

    def begin_copy(self, piece: Piece) -> bool:
        """Whether the piece's buffers may be used; if so, ``end_copy`` must follow soon."""
        if piece.live.end:
            return False
        piece.live.num_copying += 1
        return True

    def end_copy(self, piece: Piece) -> bool:
        """Note that the piece's buffers are not used any more; return whether the job's result was waiting for that."""
        piece.live.num_copying -= 1
        return self._settle(piece.live)

    def answer(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Note the answers of a piece; return whether that ended its job."""
        live = piece.live
        if live.end:
            return False
        live.answers[piece.first : piece.first + piece.count] = answers
        live.num_answered += piece.count
        if live.num_answered < len(live.answers):
            return False
        self.end(live, JobStatus.DONE)
        return True

    def end(self, live: LiveJob, status: JobStatus, reason: str = "") -> bool:
        """End a job; return whether it had not ended before."""
        if live.end:
            return False
        live.end = (status, reason)
        self._settle(live)
        return True

    def find(self, job_id: int) -> LiveJob | None:
        """Return a live job; ``None`` if there is none with that id."""
        return self._live.get(job_id)

    def late(self) -> list[LiveJob]:
        """Return the live jobs whose deadline has passed."""
        now = self.clock()
        return [live for live in self._live.values() if now > live.job.deadline]

    def all(self) -> Iterator[LiveJob]:
        """Iterate over a copy of the list of live jobs."""
        return iter(list(self._live.values()))

    def _take_from(self, queue: deque[LiveJob]) -> Piece | None:
        while queue:
            live = queue[0]
            count = 0 if live.end else self._piece_size(live)
            if live.num_taken + count >= len(live.answers) or live.end:
                queue.popleft()
            if count:
                live.num_taken += count
                return Piece(live, live.num_taken - count, count)
        return None

    def _piece_size(self, live: LiveJob) -> int:
        """Return how many chunks of a job one piece has. Loads and stores: one, so that several threads share the job."""
        return 1 if live.job.kind in _ONE_BY_ONE else len(live.answers)

    def _settle(self, live: LiveJob) -> bool:
        """Make the result of a job that has ended, unless its buffers are in use; return whether it was made now."""
        if live.end and not live.num_copying and self._live.pop(live.job.job_id, None):
            status, reason = live.end
            self.num_chunks[live.job.kind in URGENT] -= len(live.job.keys)
            self.results.append(TierResult(live.job, status, tuple(live.answers), reason))
            return True
        return False
