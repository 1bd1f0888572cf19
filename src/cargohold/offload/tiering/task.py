"""Jobs of lower tiers, from the moment they are requested until all workers have reported them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cargohold.offload.manager.base import LoadHandle, OffloadKey, StoreHandle
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.promotion import Promotion


@dataclass(slots=True, eq=False)
class TierTask:
    """A job of a lower tier, waiting to be handed out or in flight.

    Attributes:
        kind: what to do.
        tier: index of the tier.
        keys: the chunks, in any order.
        slots: their slots in host memory, parallel to ``keys``; empty for probes and touches.
        parents: for stores and loads, the chunk before each in its prefix, or ``None``, parallel to ``keys``.
        rewrites: for probes that look after chunks in use, the chunks to write again if they are gone, with their parents.
        num_before: for probes, the number of chunks that the same look-up has found in the tier before.
        num_after: for probes, the number of chunks that it will ask the tier for if all of these are there.
        num_found: for probes that were answered, the number of chunks that are there.
        reserved: for loads, the slots being filled.
        pins: for stores, the chunks being read.
        promotion: for loads, the promotion that waits for it.
        begun_at: time at which it was handed out.
        deadline: time at which it must have ended; infinite until it is handed out.
        answers: one byte per chunk: 1 if all workers that have answered were successful, else 0.
        num_answers: number of workers that have answered.
        num_overdue_checks: how often it was found in flight after its deadline.
        is_late: whether it is so long overdue that the tier was blamed for it.
        has_ended: whether it has ended and its consequences were drawn.
        is_cancelled: whether nobody needs it any more.
    """

    kind: JobKind
    tier: int
    keys: Sequence[OffloadKey]
    slots: Sequence[int] = ()
    parents: Sequence[OffloadKey | None] = ()
    rewrites: Mapping[OffloadKey, OffloadKey | None] = field(default_factory=dict)
    num_before: int = 0
    num_after: int = 0
    num_found: int = 0
    reserved: StoreHandle | None = None
    pins: LoadHandle | None = None
    promotion: Promotion | None = None
    begun_at: float = 0.0
    deadline: float = field(default=float("inf"))
    answers: bytes = b""
    num_answers: int = 0
    num_overdue_checks: int = 0
    is_late: bool = False
    has_ended: bool = False
    is_cancelled: bool = False

    def note_answers(self, answers: bytes, num_workers: int) -> None:
        """Merge in the answers of ``num_workers`` further workers."""
        self.answers = both(self.answers, answers) if self.num_answers else answers
        self.num_answers += num_workers

    def succeeded(self, num_workers: int) -> list[bool]:
        """Return, per chunk, whether all ``num_workers`` workers were successful; ``False`` while some have not answered."""
        if self.num_answers != num_workers:
            return [False] * len(self.keys)
        return list(map(bool, self.answers))


def both(left: bytes, right: bytes) -> bytes:
    """Merge two answers: per chunk, 1 if both say success, else 0."""
    return bytes(a & b for a, b in zip(left, right, strict=True))
