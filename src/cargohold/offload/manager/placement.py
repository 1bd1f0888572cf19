"""The plan of a store: chunks on offer, and which of them found a slot."""

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
    """The chunks of one offer, consecutive in one prefix, while slots are found for them.

    Attributes:
        keys: the chunks that were not dealt with yet.
        parent: the chunk before them.
        present: the slot of each, or ``None`` if it is absent; parallel to ``keys``.
        run: the leading absent chunks of ``keys``, which get slots next.
        num_fitting: how many chunks of ``run`` have a slot, or will get one.
        is_refused: whether the policy refuses slots to the others.
        num_placed: how many chunks of the offer have got a slot so far.
    """

    keys: tuple[OffloadKey, ...]
    parent: OffloadKey | None
    present: Sequence[int | None] = ()
    run: tuple[OffloadKey, ...] = ()
    num_fitting: int = 0
    is_refused: bool = False
    num_placed: int = 0

    def skip_present(self) -> None:
        """Drop the leading chunks that are there from ``keys``. Mutates the chain."""
        self.run = ()
        num_absent = self.present.count(None)
        if num_absent < len(self.keys):
            self._go_on_at(self.present.index(None) if num_absent else len(self.keys))

    def begin_run(
        self, claimed: set[OffloadKey], missed: AbstractSet[OffloadKey], pending: AbstractSet[OffloadKey]
    ) -> bool:
        """Find the next run; return whether there is one. The first of ``keys`` is absent. Mutates the chain and ``claimed``.

        Args:
            claimed: chunks in the runs of other chains, which decide on them first; those of this run are added.
            missed: chunks that have found no slot in another chain, and will find none in this one.
            pending: absent chunks of all chains that were not dealt with: a chain behind one of them waits.
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
        """Whether chunks behind the run are still to be placed: absent ones that are in no chain's run."""
        items = zip(self.keys[len(self.run) :], self.present[len(self.run) :], strict=True)
        return any(slot is None and key not in claimed for key, slot in items)

    def end_run(self) -> bool:
        """Drop the run from ``keys``; return whether there is more to do. Mutates the chain."""
        if self.num_fitting < len(self.run) or len(self.run) == len(self.keys):
            return False  # all are dealt with, or there is a hole: chunks behind it are worth nothing
        self._go_on_at(len(self.run))
        return True

    def absent(self) -> list[OffloadKey]:
        """Return the chunks of ``keys`` that are absent."""
        return [key for key, slot in zip(self.keys, self.present, strict=True) if slot is None]

    def _num_leading_absent(self) -> int:
        return next((at for at, slot in enumerate(self.present) if slot is not None), len(self.keys))

    def _go_on_at(self, at: int) -> None:
        if at:
            self.keys, self.parent, self.present = self.keys[at:], self.keys[at - 1], self.present[at:]


@dataclass(slots=True)
class Placement:
    """The plan of a store: the slots found so far for chunks on offer.

    Attributes:
        around: slots of chunks that must not be evicted, because chunks on offer follow them.
        num_waiting: number of slots that were being written or read before, and will become free.
        keys: chunks that found a slot.
        slots: their slots, in pieces, in the same order.
        strands: the strands of the index that they are in.
        deferred: chunks that may find a slot when others become free.
        missed: chunks that found no slot, for now or for good.
    """

    around: list[int]
    num_waiting: int
    keys: list[OffloadKey] = field(default_factory=list)
    slots: list[Slots] = field(default_factory=list)
    strands: list[Strand] = field(default_factory=list)
    deferred: list[OffloadKey] = field(default_factory=list)
    missed: set[OffloadKey] = field(default_factory=set)

    def gives_up(self, chain: OfferedChain, claimed: AbstractSet[OffloadKey]) -> bool:
        """Give a chain up if its next chunk, or the one before it, found no slot; return whether that is so.

        Then no chunk behind gets a slot either: those chunks are missed. If the chunk in front is deferred, they are deferred,
        too, as far as slots will become free. Mutates everything.

        Args:
            chain: the chain; its next chunk is absent.
            claimed: chunks that may get a slot now in another chain.
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
    """Whether all chunks of chains are absent, no chain continues another, and no chunk is in two: nearly always so.

    ``False`` also if there are no chains, or one without chunks: then there is nothing to place.
    """
    if any(chain.present.count(None) < len(chain.present) for chain in chains):
        return False
    if len(chains) < 2:
        return len(chains) == 1 and len(chains[0].keys) > 0
    num_keys = sum([len(chain.keys) for chain in chains])
    keys = {key for chain in chains for key in chain.keys}
    return len(keys) == num_keys and all(chain.keys and chain.parent not in keys for chain in chains)
