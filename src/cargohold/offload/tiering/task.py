"""Jobs of lower tiers, from the moment they are wanted until all workers have reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cargohold.offload.manager.base import LoadHandle, OffloadKey, StoreHandle
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.promotion import Promotion


@dataclass(slots=True, eq=False)
class TierTask:
    """A job, wanted or in flight.

    Attributes:
        kind: what to do.
        tier: which tier.
        keys: which chunks in any order.
        slots: where they are in host memory; probes have none.
        parents: stores and loads: the chunk before each in its prefix, if there is one, parallel to ``keys``.
        rewrites: probes that look after chunks in use: which of them to write again if they are gone, with their parents.
        reserved: loads: the slots being filled.
        pins: stores: the chunks being read.
        promotion: loads: who waits for it.
        deadline: when it must have ended; known when it is handed out.
        answers: per chunk, 1 where all workers that have answered were successful, else 0.
        num_answers: workers that have answered.
        num_overdue_checks: how often it was found in flight behind its deadline.
        is_late: its deadline has passed, and the tier was blamed for it.
        has_ended: whether its consequences were drawn.
        is_cancelled: nobody wants it any more.
    """

    kind: JobKind
    tier: int
    keys: Sequence[OffloadKey]
    slots: Sequence[int] = ()
    parents: Sequence[OffloadKey | None] = ()
    rewrites: Mapping[OffloadKey, OffloadKey | None] = field(default_factory=dict)
    reserved: StoreHandle | None = None
    pins: LoadHandle | None = None
    promotion: Promotion | None = None
    deadline: float = field(default=float("inf"))
    answers: bytes = b""
    num_answers: int = 0
    num_overdue_checks: int = 0
    is_late: bool = False
    has_ended: bool = False
    is_cancelled: bool = False

    def note_answers(self, answers: bytes, num_workers: int) -> None:
        """What further workers say."""
        self.answers = both(self.answers, answers) if self.num_answers else answers
        self.num_answers += num_workers

    def succeeded(self, num_workers: int) -> list[bool]:
        """Per chunk, whether all of so many workers were successful."""
        if self.num_answers != num_workers:
            return [False] * len(self.keys)
        return list(map(bool, self.answers))


def both(left: bytes, right: bytes) -> bytes:
    """Per chunk, 1 where both were successful, else 0."""
    return bytes(a & b for a, b in zip(left, right, strict=True))
