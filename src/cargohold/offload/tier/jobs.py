"""What a tier's queue is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
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
    """A request used these chunks, which it had from elsewhere. Also says which of them are there."""


def reaches_medium(kind: JobKind, *, has_index: bool) -> bool:
    """Whether carrying out such a job shows that the medium lives; if not, it is no trial of one that failed.

    Args:
        kind: what the job does.
        has_index: whether the tier knows by itself what it holds.
    """
    return kind is not JobKind.TOUCH and not (has_index and kind is JobKind.PROBE)


class JobStatus(Enum):
    """How a job ended."""

    DONE = "done"
    """Every chunk has its answer."""
    FAILED = "failed"
    """The tier failed, or the thread that worked on it died; chunks without an answer were not dealt with."""
    EXPIRED = "expired"
    """Its deadline passed."""
    CANCELLED = "cancelled"
    """It was cancelled, or the queue was shut down."""


Answer: TypeAlias = bool | LoadOutcome | StoreOutcome
"""For one chunk: of a probe or touch, whether it is there; of a removal, ``True``; of loads and stores, what became of it."""

FROM_INDEX: Final[frozenset[Answer]] = frozenset({LoadOutcome.ABSENT, StoreOutcome.PRESENT, StoreOutcome.REFUSED})
"""What a tier that knows by itself what it holds answers without its medium: they say nothing of that."""


@dataclass(frozen=True, slots=True)
class TierJob:
    """Chunks to probe, load, store, remove or touch.

    Attributes:
        job_id: unique among the jobs of a queue, never used again.
        kind: what to do.
        keys: which chunks in any order.
        deadline: when it must have ended, in the queue's clock.
        buffers: loads and stores: where each chunk's bytes go or come from, parallel to ``keys``. Nobody else may write to
            them until the job's result was polled; the queue does not touch them any more after that.
        parents: stores: the chunk before each in its prefix, if there is one, parallel to ``keys``; empty if none has one.
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
        status: how.
        answers: per chunk, or ``None`` where there is none.
        reason: of a failure, why, in one line.
    """

    job: TierJob
    status: JobStatus
    answers: tuple[Answer | None, ...]
    reason: str = ""

    @property
    def succeeded(self) -> list[bool]:
        """Per chunk: a probe or touch found it, a load filled its buffer, a store left it there, a removal was carried out."""
        return [answer in _GOOD for answer in self.answers]


_GOOD: frozenset[Answer] = frozenset({True, LoadOutcome.LOADED, StoreOutcome.STORED, StoreOutcome.PRESENT})
