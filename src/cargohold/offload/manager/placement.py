"""A store being planned: what is on offer, and what of it found a slot."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import takewhile

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.manager.chain_index import Strand
from cargohold.offload.policy.base import Slots


@dataclass(slots=True)
class OfferedChain:
    """Chunks on offer, consecutive in one prefix, on their way to slots.

    Attributes:
        keys: those that were not dealt with yet.
        parent: the chunk before them.
        present: parallel to ``keys``: where each is, if it is there.
        run: the leading ones that are absent: they come next.
        num_fitting: how many of these have a slot, or will.
        is_refused: whether the policy gives none to the others.
        num_placed: how many got one ever.
    """

    keys: tuple[OffloadKey, ...]
    parent: OffloadKey | None
    present: Sequence[int | None] = ()
    run: tuple[OffloadKey, ...] = ()
    num_fitting: int = 0
    is_refused: bool = False
    num_placed: int = 0

    def skip_present(self) -> None:
        """Go on at the first chunk that is absent. Mutates the chain."""
        self.run = ()
        num_absent = self.present.count(None)
        if num_absent < len(self.keys):
            self._go_on_at(self.present.index(None) if num_absent else len(self.keys))

    def begin_run(
        self, claimed: set[OffloadKey], missed: AbstractSet[OffloadKey], pending: AbstractSet[OffloadKey]
    ) -> bool:
        """Find the next run; whether there is one. The next chunk is absent. Mutates the chain and ``claimed``.

        Args:
            claimed: what is in runs of others, where it is decided on first.
            missed: what has found no slot in another chain, and will find none in this.
            pending: what is in some chain, and was not dealt with: nothing behind it goes first.
        """
        self.run = self.keys
        if self.parent in pending:
            self.run = ()
        elif self.present.count(None) < len(self.keys) or not (
            claimed.isdisjoint(self.keys) and missed.isdisjoint(self.keys)
        ):
            others = claimed | missed
            self.run = tuple(takewhile(lambda key: key not in others, self.keys[: self._num_leading_absent()]))
        claimed.update(self.run)
        return bool(self.run)

    def has_more(self, claimed: AbstractSet[OffloadKey]) -> bool:
        """Whether there is something to place behind the run: chunks that are absent, and in nobody's run."""
        items = zip(self.keys[len(self.run) :], self.present[len(self.run) :], strict=True)
        return any(slot is None and key not in claimed for key, slot in items)

    def end_run(self) -> bool:
        """Go on behind the run; whether there is more to do. Mutates the chain."""
        if self.num_fitting < len(self.run) or len(self.run) == len(self.keys):
            return False  # what lies behind a hole is worth nothing
        self._go_on_at(len(self.run))
        return True

    def absent(self) -> list[OffloadKey]:
        """Those of ``keys`` that are not there."""
        return [key for key, slot in zip(self.keys, self.present, strict=True) if slot is None]

    def _num_leading_absent(self) -> int:
        return next((at for at, slot in enumerate(self.present) if slot is not None), len(self.keys))

    def _go_on_at(self, at: int) -> None:
        if at:
            self.keys, self.parent, self.present = self.keys[at:], self.keys[at - 1], self.present[at:]


@dataclass(slots=True)
class Placement:
    """A store being planned: what of the offered chunks found a slot so far.

    Attributes:
        around: slots of chunks that stay because of those on offer.
        num_waiting: slots that others were using before, and may free.
        deferred: chunks that may find a slot when others let go of theirs.
        missed: chunks that found none, for now or for good.
    """

    around: list[int]
    num_waiting: int
    keys: list[OffloadKey] = field(default_factory=list)
    slots: list[Slots] = field(default_factory=list)
    strands: list[Strand] = field(default_factory=list)
    deferred: list[OffloadKey] = field(default_factory=list)
    missed: set[OffloadKey] = field(default_factory=set)

    def gives_up(self, chain: OfferedChain, claimed: AbstractSet[OffloadKey]) -> bool:
        """Whether a chunk found no slot that is next in a chain, or before it: then nothing behind it gets one either.

        What is behind one that may find a slot later may do so, too, if so many are waited for. Mutates everything.

        Args:
            chain: its next chunk is absent.
            claimed: what may get a slot now, in another chain.
        """
        if chain.keys[0] in self.missed:
            in_front = chain.keys[0]
        elif chain.parent in self.missed:
            in_front = chain.parent
        else:
            return False
        others = self.missed | claimed
        behind = [
            key for key, slot in zip(chain.keys, chain.present, strict=True) if slot is None and key not in others
        ]
        if in_front in self.deferred:
            self.deferred += behind[: max(0, self.num_waiting - len(self.deferred))]
        self.missed.update(behind)
        chain.keys = ()
        return True


def are_apart(chains: Sequence[OfferedChain]) -> bool:
    """Whether nothing of chains is there, none continues another, and no chunk is in two of them: nearly always so.

    Not of chains without chunks, nor of no chains: then there is nothing to place.
    """
    if any(chain.present.count(None) < len(chain.present) for chain in chains):
        return False
    if len(chains) < 2:
        return len(chains) == 1 and len(chains[0].keys) > 0
    num_keys = sum([len(chain.keys) for chain in chains])
    keys = {key for chain in chains for key in chain.keys}
    return len(keys) == num_keys and all(chain.keys and chain.parent not in keys for chain in chains)
