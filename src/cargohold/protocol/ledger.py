"""A count of the references that a connector holds on blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cargohold.errors import BlockNotHeldError


class BlockLedger:
    """Counts the references that one connector holds on each block, so that it can give back only its own."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    def __bool__(self) -> bool:
        return bool(self._held)

    def counts(self) -> Counter[int]:
        """Return the number of references held, per block id, as a copy."""
        return Counter(self._held)

    def take(self, block_ids: Iterable[int]) -> None:
        """Count one more reference for each of ``block_ids``."""
        self._held.update(block_ids)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Count one reference less for each of ``block_ids``.

        Raises ``BlockNotHeldError``, and changes nothing, unless the connector holds all of them.
        """
        held = self._held
        for at, block_id in enumerate(block_ids):
            count = held.get(block_id, 0)
            if not count:
                self.take(block_ids[:at])
                raise BlockNotHeldError(block_id, held[block_id], Counter(block_ids)[block_id])
            if count == 1:
                del held[block_id]
            else:
                held[block_id] = count - 1

    def give_back_all(self) -> tuple[int, ...]:
        """Set all counts to 0; return the block ids, each repeated once per reference that was held."""
        held, self._held = tuple(self._held.elements()), Counter()
        return held
