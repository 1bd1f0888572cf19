"""Jobs of lower tiers, from the moment they are requested until all workers have reported them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cargohold.offload.manager.base import LoadHandle, OffloadKey, StoreHandle
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.promotion import Promotion


@dataclass(slots=True, eq=False)
class TierTask:
    """A job of a lower tier, waiting to be handed out or in flight. Each kind of job has a class of its own.

    Attributes:
        kind: what to do.
        tier: index of the tier.
        keys: the chunks, in any order.
        begun_at: time at which it was handed out.
        deadline: time at which it must have ended; infinite until it is handed out.
        answers: one byte per chunk: 1 if all workers that have answered were successful, else 0.
        num_answers: number of workers that have answered.
        num_overdue_checks: how often it was found in flight after its deadline.
        is_late: whether it is so long overdue that the tier was blamed for it.
        has_ended: whether it has ended and its consequences were drawn.
        is_cancelled: whether nobody needs it any more.
    """

    kind: ClassVar[JobKind]
    tier: int
    keys: Sequence[OffloadKey]
    begun_at: float = field(default=0.0, init=False)
    deadline: float = field(default=float("inf"), init=False)
    answers: bytes = field(default=b"", init=False)
    num_answers: int = field(default=0, init=False)
    num_overdue_checks: int = field(default=0, init=False)
    is_late: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)
    is_cancelled: bool = field(default=False, init=False)

    def note_answers(self, answers: bytes, num_workers: int) -> None:
        """Merge in the answers of ``num_workers`` further workers."""
        self.answers = both(self.answers, answers) if self.num_answers else answers
        self.num_answers += num_workers

    def succeeded(self, num_workers: int) -> list[bool]:
        """Return, per chunk, whether all ``num_workers`` workers were successful; ``False`` while some have not answered."""
        if self.num_answers != num_workers:
            return [False] * len(self.keys)
        return list(map(bool, self.answers))


@dataclass(slots=True, eq=False)
class ProbeTask(TierTask):
    """A question which chunks are there.

    Attributes:
        num_before: number of chunks that the same look-up has found in the tier before.
        num_after: number of chunks that it will ask the tier for if all of these are there.
        rewrites: if it looks after chunks in use: the chunks to write again if they are gone, with their parents.
        num_found: number of chunks that are there, once it is answered.
    """

    kind = JobKind.PROBE
    num_before: int = 0
    num_after: int = 0
    rewrites: Mapping[OffloadKey, OffloadKey | None] = field(default_factory=dict)
    num_found: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class TouchTask(TierTask):
    """The news that chunks are in use."""

    kind = JobKind.TOUCH


@dataclass(slots=True, eq=False)
class LoadTask(TierTask):
    """Chunks to bring up into host memory.

    Attributes:
        parents: the chunk before each in its prefix, or ``None``, parallel to ``keys``.
        reserved: the slots of host memory that are filled.
        promotion: the promotion that waits for it.
    """

    kind = JobKind.LOAD
    parents: Sequence[OffloadKey | None]
    reserved: StoreHandle
    promotion: Promotion


@dataclass(slots=True, eq=False)
class WriteTask(TierTask):
    """Chunks to write down from host memory.

    Attributes:
        parents: the chunk before each in its prefix, or ``None``, parallel to ``keys``.
        pins: pins on the chunks, which are read.
    """

    kind = JobKind.STORE
    parents: Sequence[OffloadKey | None]
    pins: LoadHandle


def both(left: bytes, right: bytes) -> bytes:
    """Merge two answers: per chunk, 1 if both say success, else 0."""
    return bytes(a & b for a, b in zip(left, right, strict=True))
