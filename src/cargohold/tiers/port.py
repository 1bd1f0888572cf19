"""The tier port: one worker's shard of a medium below host memory.

A tier stores bytes by key. Its calls block, may come from several threads at once, and may fail: ``TierQueue`` stands between
the tier and every caller that must not wait. A tier knows nothing of blocks, rows, requests or ranks. It hands out only chunks
that were written under its own namespace (``cargohold.tiers.namespace``), and verifies them first.

A key names contents, so what is stored under it never changes: storing a chunk twice is storing it once, and a lost chunk is a
miss.

The jobs of a tier's queue: one record each, from submission to the result, and the bookkeeping of those that are live.

::

    queued --take--> chunks under way --answer of the last chunk--> DONE
       |                   |
       +-------------------+-- failure, deadline, cancellation --> FAILED, EXPIRED, CANCELLED

A job ends once. Answers that come later are dropped. While a thread copies from or to the job's buffers, the job is not
returned, because the caller that polls it owns the buffers again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from cargohold.cache.manager import OffloadKey
from cargohold.cache.retention import Retention
from cargohold.protocol import Clock
from cargohold.tiers.chunk_format import NO_NOTE, Details, Note
from cargohold.tiers.memory import Buffer, Staging


class StoreOutcome(Enum):
    """How storing a chunk ended."""

    STORED = "stored"
    """The chunk is there now."""
    PRESENT = "present"
    """The chunk was there already."""
    REFUSED = "refused"
    """The chunk is not there, because there is no room for it. No fault of the medium.

    The scheduler side does not offer it again before it is used; see ``RetryQueue`` in ``scheduler_side.writing``.
    """
    LATER = "later"
    """The chunk is not there for now: another job is writing it, or making room. Offer it again soon."""
    FAILED = "failed"
    """The chunk is not there: the medium failed, but not for all chunks of the job. Only the queue says so; a tier raises."""


class LoadOutcome(Enum):
    """How loading a chunk ended."""

    LOADED = "loaded"
    """The destination holds the chunk, verified."""
    ABSENT = "absent"
    """The chunk is not there. The destination holds garbage."""
    CORRUPT = "corrupt"
    """The chunk failed its check, and was deleted if that is allowed. The destination holds garbage."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is.

    Attributes:
        num_chunks: number of chunks that are there; in a shared store, only those that this worker stored.
        num_bytes: bytes that they take, headers and padding included.
        capacity_bytes: bytes that they can take, which may be less than the limit in the options, because a file system has
            less room, for instance; ``None`` if the medium sets the limit.
        plain_bytes: bytes of the chunks before they were packed; about, where they differ in size.
    """

    num_chunks: int
    num_bytes: int
    capacity_bytes: int | None
    plain_bytes: int = 0


EMPTY: Final = TierUsage(0, 0, None)


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk that a tier has, with what is known of it.

    Attributes:
        key: its key.
        details: what events say of it.
    """

    key: OffloadKey
    details: Details


@dataclass(frozen=True, slots=True)
class Listing:
    """A part of the list of a tier's chunks. Columns, not one object per chunk: there are thousands.

    Attributes:
        keys: the chunks; if details were asked for, only those whose details are known.
        details: what events say of each, if that was asked for; else empty.
        cursor: where the next part begins; empty if there is none.
    """

    keys: tuple[OffloadKey, ...] = ()
    details: tuple[Details, ...] = ()
    cursor: bytes = b""


NOTHING_LISTED: Final = Listing()


@dataclass(frozen=True, slots=True)
class Losses:
    """Chunks that a tier had and has no more, evicted or found to be unreadable.

    Attributes:
        keys: their keys. Some may be there again.
        is_all: whether all others were lost, too.
    """

    keys: tuple[OffloadKey, ...] = ()
    is_all: bool = False

    def __or__(self, other: Losses) -> Losses:
        """Both."""
        return Losses(self.keys + other.keys, self.is_all or other.is_all)

    def __bool__(self) -> bool:
        return self.is_all or bool(self.keys)


NO_LOSSES: Final = Losses()
MAX_LOSSES: Final = 65536
"""A tier that has lost more since it was asked last says that all are lost; then it is listed again."""


class Tier(ABC):
    """One worker's shard of a tier. Thread-safe; every call blocks until it is done.

    Every method but ``close`` raises ``TierError`` when the medium fails or cannot be reached, and nothing else. After an
    error the tier can still be used: the medium may come back.

    Attributes:
        name: the tier's name for users: ``disk``, ``shared``.
        chunk_bytes: bytes of the largest chunk.
        has_index: whether the tier keeps an index of its chunks, and answers probes without asking its medium.
    """

    name: str
    chunk_bytes: int
    has_index: bool = False

    def begin(self) -> None:  # noqa: B027  # most tiers have nothing to do
        """Get ready to serve an engine; called once before all other calls, and does not wait. By default, nothing."""

    def staging(self) -> memoryview:
        """Return memory for one chunk, for one caller's stores and loads. ``store`` may overwrite it.

        A tier may return a part of a larger memory, so that its medium reads and writes chunks where they lie.
        """
        return Staging(self.chunk_bytes).view

    @abstractmethod
    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each chunk is there."""

    @abstractmethod
    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        """Write a chunk, and let it be found once all of it is written.

        Args:
            key: the chunk's key.
            payload: the chunk's bytes: contiguous, ``chunk_bytes`` at most. They must not change during the call.
            parent: key of the chunk before it in its prefix, if there is one, so that eviction leaves no hole.
            note: what else is known of it, to be kept with it by tiers that can.
        """

    @abstractmethod
    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Read a chunk and verify it.

        Args:
            key: the chunk's key.
            into: destination, exactly as long as what was stored: contiguous, writable. Holds garbage unless ``LOADED`` is
                returned.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark chunks as used by a request; ``keys`` are in prefix order. Absent chunks are ignored."""

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks at once. Absent chunks are ignored."""

    def rank(self, keys: Sequence[OffloadKey], retentions: Sequence[Retention]) -> None:
        """Take what hints ask for chunks, from now on. Absent chunks are ignored, and by default all."""
        del keys, retentions

    def list_chunks(self, cursor: bytes, limit: int, *, with_details: bool) -> Listing:
        """Return some of the chunks that are there, without using them.

        A tier that cannot say, or whose medium has its price for each question, lists nothing: the default. Chunks that come
        or go between two calls may be left out or listed twice.

        Args:
            cursor: empty for the first part; then what the call before has returned.
            limit: maximum number of chunks to look at.
            with_details: whether to read what events say of them. Without that the medium is not asked.
        """
        del cursor, limit, with_details
        return NOTHING_LISTED

    def take_losses(self) -> Losses:
        """Return the chunks lost since the last call, if the tier knows, from its index and at once. By default, none."""
        return NO_LOSSES

    @abstractmethod
    def usage(self) -> TierUsage:
        """Return how full the tier is, from what is known here, without asking the medium."""

    @abstractmethod
    def close(self) -> None:
        """Release files, locks and connections; the chunks stay. The last call, in a thread of its own; never raises."""


# --- the jobs of a tier's queue ---------------------------------------------------------------------------------------


class JobKind(Enum):
    """What a job does with its chunks."""

    PROBE = "probe"
    LOAD = "load"
    STORE = "store"
    REMOVE = "remove"
    TOUCH = "touch"
    """Mark chunks as used by a request that got them from elsewhere. Also answers which of them are there."""
    CHECK = "check"
    """Answer which chunks are there, for no request: that is no use of them."""
    RANK = "rank"
    """Change what hints ask for chunks."""
    LIST = "list"
    """List chunks that are there. The only key is the cursor; see ``Tier.list_chunks``."""
    DESCRIBE = "describe"
    """List chunks with their details, which takes longer."""


class Access(Enum):
    """A way of using a medium. One may work while another does not; the values name them in messages."""

    LOOK_UP = "look-ups"
    LOAD = "loads"
    WRITE = "writes"


ACCESS_OF: Final[Mapping[JobKind, Access]] = {
    JobKind.PROBE: Access.LOOK_UP,
    JobKind.TOUCH: Access.LOOK_UP,
    JobKind.CHECK: Access.LOOK_UP,
    JobKind.LIST: Access.LOOK_UP,
    JobKind.DESCRIBE: Access.LOAD,
    JobKind.RANK: Access.WRITE,
    JobKind.LOAD: Access.LOAD,
    JobKind.STORE: Access.WRITE,
    JobKind.REMOVE: Access.WRITE,
}
URGENT: Final = frozenset(kind for kind in JobKind if ACCESS_OF[kind] is not Access.WRITE)
"""Kinds of jobs that go before others, because a request waits for them or they take hardly any time."""
LISTED_AT_ONCE: Final[Mapping[JobKind, int]] = {JobKind.LIST: 4096, JobKind.DESCRIBE: 64}
"""Kinds of jobs that list, and the number of chunks that one looks at."""
SHOW_NOTHING: Final = frozenset({JobKind.TOUCH, JobKind.CHECK, JobKind.RANK, *LISTED_AT_ONCE})
"""Kinds of jobs whose end does not show whether the medium works. They pass while it does, and are no trials."""
ONE_BY_ONE: Final = frozenset({JobKind.LOAD, JobKind.STORE})
"""Kinds of jobs whose chunks are worked on one by one, so that several threads share a job."""


class JobStatus(Enum):
    """How a job ended."""

    DONE = "done"
    """Every chunk has its answer."""
    FAILED = "failed"
    """The tier failed, or the thread that worked on the job died; chunks without an answer were not dealt with."""
    EXPIRED = "expired"
    """The job's deadline passed."""
    CANCELLED = "cancelled"
    """The job was cancelled, or the queue was shut down."""


Answer: TypeAlias = bool | LoadOutcome | StoreOutcome
"""The answer for one chunk: for a probe or touch, whether it is there; for a removal, ``True``; else the outcome."""

FROM_INDEX: Final[frozenset[Answer]] = frozenset(
    {LoadOutcome.ABSENT, StoreOutcome.PRESENT, StoreOutcome.REFUSED, StoreOutcome.LATER}
)
"""Answers that a tier with an index gives without asking its medium: they do not show that the medium works."""
_GOOD: Final[frozenset[Answer | None]] = frozenset(
    {True, LoadOutcome.LOADED, StoreOutcome.STORED, StoreOutcome.PRESENT}
)
DONE: Final = 1
OPEN: Final = 2
"""Bits of ``TierJob.verdicts``."""
_VERDICTS: Final[Mapping[Answer | None, int]] = {
    True: DONE | OPEN,
    StoreOutcome.STORED: DONE | OPEN,
    StoreOutcome.PRESENT: DONE | OPEN,
    StoreOutcome.REFUSED: 0,
}


@dataclass(slots=True, eq=False)
class TierJob:
    """Chunks to probe, load, store, remove or touch. The queue fills in how that goes.

    Attributes:
        job_id: unique among the jobs of a queue, never used again.
        kind: what to do.
        keys: the chunks, in any order.
        deadline: time at which it must have ended, by the queue's clock.
        buffers: for loads and stores, the destination or source of each chunk, parallel to ``keys``. Nothing else may write to
            them until the job was polled; after that, the queue does not read or write them any more.
        parents: for stores, the chunk before each in its prefix, or ``None``, parallel to ``keys``; empty if none has one.
        notes: for stores and new retentions, what else is known of each, parallel to ``keys``; empty if that is nothing.
        listing: what was listed, for a job that lists.
        queued_at, ended_at: times at which it was queued and ended.
        answers: one per chunk; ``None`` where there is none.
        num_taken: number of chunks that threads were given.
        num_copying: number of threads that copy from or to the buffers right now.
        status: how it ended; ``None`` before.
        reason: why it failed or expired, or a chunk of it could not be stored, in one line; else empty.
    """

    job_id: int
    kind: JobKind
    keys: Sequence[OffloadKey]
    deadline: float
    buffers: Sequence[Buffer] = field(default=(), repr=False)
    parents: Sequence[OffloadKey | None] = ()
    notes: Sequence[Note] = ()
    listing: Listing = field(default=NOTHING_LISTED, init=False)
    queued_at: float = field(default=0.0, init=False)
    ended_at: float = field(default=0.0, init=False)
    answers: list[Answer | None] = field(init=False)
    num_taken: int = field(default=0, init=False)
    num_copying: int = field(default=0, init=False)
    status: JobStatus | None = field(default=None, init=False)
    reason: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.keys)

    @property
    def succeeded(self) -> list[bool]:
        """Whether each chunk succeeded: a probe or touch found it, a load filled its buffer, a store or removal was done.

        A store counts as done also if the chunk was there already.
        """
        return [answer in _GOOD for answer in self.answers]

    @property
    def verdicts(self) -> bytes:
        """How each chunk went, one byte per chunk, so that ``&`` merges what several workers say.

        ``DONE`` is in the byte if it succeeded. Of a store, ``OPEN`` is in it unless the tier has no room for the chunk: what
        failed, was put off, or was not tried because the job has ended, can be tried again.
        """
        if self.kind is not JobKind.STORE:
            return bytes(self.succeeded)
        return bytes([_VERDICTS.get(answer, OPEN) for answer in self.answers])


class JobLedger:
    """The live jobs of one queue. Not thread-safe: its owner holds a lock.

    Attributes:
        ended: jobs that ended and were not polled yet.
        num_chunks: number of chunks in live jobs: in ``URGENT`` ones under ``True``, in the others under ``False``.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self.ended: list[TierJob] = []
        self.num_chunks = {True: 0, False: 0}
        self._clock = clock
        self._live: dict[int, TierJob] = {}
        self._waiting: dict[Access, deque[TierJob]] = {access: deque() for access in Access}
        self._taken_last = Access.WRITE

    def __len__(self) -> int:
        return len(self._live)

    def add(self, job: TierJob) -> None:
        """Queue a job; one without chunks ends at once."""
        assert job.job_id not in self._live, f"job {job.job_id} was submitted twice"
        job.queued_at = self._clock()
        self._live[job.job_id] = job
        self.num_chunks[job.kind in URGENT] += len(job.keys)
        if not job.keys:
            self.end(job, JobStatus.DONE)
        else:
            queue = self._waiting[ACCESS_OF[job.kind]]
            while queue and queue[0].status:
                queue.popleft()  # while every thread hangs in the medium, nothing else removes jobs that have ended
            queue.append(job)

    def take(self) -> tuple[TierJob, int] | None:
        """Return the next job to work on, and the index of its chunk if it is ``ONE_BY_ONE``; ``None`` if there is nothing.

        Look-ups and loads take turns: the caller what is there does not wait for all of what others load, nor are loads kept
        back by look-ups without end. Writes come after both.
        """
        turns = (Access.LOOK_UP, Access.LOAD, Access.WRITE)
        if self._taken_last is Access.LOOK_UP:
            turns = (Access.LOAD, Access.LOOK_UP, Access.WRITE)
        for access in turns:
            taken = self._take_from(self._waiting[access])
            if taken is not None:
                self._taken_last = access
                return taken
        return None

    def begin_copy(self, job: TierJob) -> bool:
        """Whether a job's buffers may be used; if so, ``end_copy`` must follow soon."""
        if job.status:
            return False
        job.num_copying += 1
        return True

    def end_copy(self, job: TierJob) -> bool:
        """Note that a job's buffers are not used any more; return whether the job was waiting for that to be returned."""
        job.num_copying -= 1
        return self._settle(job)

    def answer(self, job: TierJob, at: int, answers: Sequence[Answer]) -> bool:
        """Note the answers for a job's chunks from index ``at`` on; return whether that ended it."""
        if job.status:
            return False
        job.answers[at : at + len(answers)] = answers
        return None not in job.answers and self.end(job, JobStatus.DONE)

    def end(self, job: TierJob, status: JobStatus, reason: str = "") -> bool:
        """End a job; return whether it had not ended before."""
        if job.status:
            return False
        job.status, job.reason, job.ended_at = status, reason or job.reason, self._clock()
        self._settle(job)
        return True

    def find(self, job_id: int) -> TierJob | None:
        """Return a live job; ``None`` if there is none with that id."""
        return self._live.get(job_id)

    def late(self) -> list[TierJob]:
        """Return the live jobs whose deadline has passed."""
        now = self._clock()
        return [job for job in self._live.values() if now > job.deadline]

    def all(self) -> Iterator[TierJob]:
        """Iterate over a copy of the list of live jobs."""
        return iter(list(self._live.values()))

    def _take_from(self, queue: deque[TierJob]) -> tuple[TierJob, int] | None:
        while queue:
            job = queue[0]
            at = job.num_taken
            job.num_taken += 1 if job.kind in ONE_BY_ONE else len(job.keys)
            if job.status or job.num_taken >= len(job.keys):
                queue.popleft()
            if not job.status:
                return job, at
        return None

    def _settle(self, job: TierJob) -> bool:
        """Hand over a job that has ended, unless its buffers are in use; return whether that was done now."""
        if job.status and not job.num_copying and self._live.pop(job.job_id, None):
            self.num_chunks[job.kind in URGENT] -= len(job.keys)
            self.ended.append(job)
            return True
        return False
