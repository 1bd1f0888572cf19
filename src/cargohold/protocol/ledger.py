"""A count of the references that a connector holds on blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cargohold.errors import BlockNotHeldError


class BlockLedger:
    """Counts the references that one connector holds on each block, so that it can give back only its own.

    Nearly always a connector holds one reference on a block, and takes and gives back hundreds at once: hence sets.
    """

    def __init__(self) -> None:
        self._held: set[int] = set()
        # References beyond the first, of blocks in ``_held``.
        self._more: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._held) + self._more.total()

    def __bool__(self) -> bool:
        return bool(self._held)

    def counts(self) -> Counter[int]:
        """Return the number of references held, per block id, as a copy."""
        return Counter(self._held) + self._more

    def take(self, block_ids: Sequence[int]) -> None:
        """Count one more reference for each of ``block_ids``."""
        taken = set(block_ids)
        if len(taken) == len(block_ids) and taken.isdisjoint(self._held):
            self._held |= taken
            return
        for block_id in block_ids:
            if block_id in self._held:
                self._more[block_id] += 1
            else:
                self._held.add(block_id)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Count one reference less for each of ``block_ids``.

        Raises ``BlockNotHeldError``, and changes nothing, unless the connector holds all of them.
        """
        given = set(block_ids)
        if len(given) == len(block_ids) and given <= self._held and given.isdisjoint(self._more):
            self._held -= given
            return
        counts = Counter(block_ids)
        for block_id, count in counts.items():
            held = (block_id in self._held) + self._more[block_id]
            if count > held:
                raise BlockNotHeldError(block_id, held, count)
        for block_id in block_ids:
            if self._more[block_id]:
                self._more[block_id] -= 1
            else:
                self._held.remove(block_id)
        self._more = +self._more

    def give_back_all(self) -> tuple[int, ...]:
        """Set all counts to 0; return the block ids, each repeated once per reference that was held."""
        held = tuple(self.counts().elements())
        self._held, self._more = set(), Counter()
        return held
