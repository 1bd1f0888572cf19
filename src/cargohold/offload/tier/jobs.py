"""The jobs of a tier's queue, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome


class JobKind(Enum):
    """What a job does with its chunks."""

    PROBE = "probe"
    LOAD = "load"
    STORE = "store"
    REMOVE = "remove"
    TOUCH = "touch"
    """Mark chunks as used by a request that got them from elsewhere. Also answers which of them are there."""


class Access(Enum):
    """A way of using a medium. One may work while another does not; the values name them in messages."""

    LOOK_UP = "look-ups"
    LOAD = "loads"
    WRITE = "writes"


ACCESS_OF: Final[Mapping[JobKind, Access]] = {
    JobKind.PROBE: Access.LOOK_UP,
    JobKind.TOUCH: Access.LOOK_UP,
    JobKind.LOAD: Access.LOAD,
    JobKind.STORE: Access.WRITE,
    JobKind.REMOVE: Access.WRITE,
}


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

FROM_INDEX: Final[frozenset[Answer]] = frozenset({LoadOutcome.ABSENT, StoreOutcome.PRESENT, StoreOutcome.REFUSED})
"""Answers that a tier with an index gives without asking its medium: they do not show that the medium works."""


@dataclass(frozen=True, slots=True)
class TierJob:
    """Chunks to probe, load, store, remove or touch.

    Attributes:
        job_id: unique among the jobs of a queue, never used again.
        kind: what to do.
        keys: the chunks, in any order.
        deadline: time at which it must have ended, by the queue's clock.
        buffers: for loads and stores, the destination or source of each chunk, parallel to ``keys``. Nobody else may write to
            them until the job's result was polled; after that, the queue does not read or write them any more.
        parents: for stores, the chunk before each in its prefix, or ``None``, parallel to ``keys``; empty if none has one.
    """

    job_id: int
    kind: JobKind
    keys: Sequence[OffloadKey]
    deadline: float
    buffers: Sequence[memoryview] = field(default=(), repr=False)
    parents: Sequence[OffloadKey | None] = ()


@dataclass(frozen=True, slots=True)
class TierResult:
    """How a job ended.

    Attributes:
        job: the job.
        status: how it ended.
        answers: one per chunk; ``None`` where there is none.
        reason: why it failed or expired, in one line; else empty.
    """

    job: TierJob
    status: JobStatus
    answers: tuple[Answer | None, ...]
    reason: str = ""

    @property
    def succeeded(self) -> list[bool]:
        """Whether each chunk succeeded: a probe or touch found it, a load filled its buffer, a store or removal was done.

        A store counts as done also if the chunk was there already.
        """
        return [answer in _GOOD for answer in self.answers]


_GOOD: frozenset[Answer] = frozenset({True, LoadOutcome.LOADED, StoreOutcome.STORED, StoreOutcome.PRESENT})
