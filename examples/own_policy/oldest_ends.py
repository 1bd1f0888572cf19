"""A policy in a few lines: what was used longest ago goes, ends of prefixes first."""

from collections import OrderedDict
from collections.abc import Sequence

from cargohold.cache.chunk_table import ChunkTable
from cargohold.cache.policies import ReplacementPolicy


class OldestEnds(ReplacementPolicy):
    """Keeps all slots in use in one list, and looks through it for victims: simple, and slow where a tier is large."""

    name = "oldest-ends"

    def __init__(self, table: ChunkTable) -> None:
        super().__init__(table)
        self._slots = OrderedDict[int, None]()

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        for slot in reversed(slots):  # the last counts as used first
            self._slots[slot] = None
            self._slots.move_to_end(slot)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        for _ in range(num_slots):
            ends = (slot for slot in self._slots if not self.table.children[slot] and not self.table.pins[slot])
            oldest = next(ends, None)
            if oldest is None:
                break
            del self._slots[oldest]
            self.table.evict(oldest)
        return False  # never because the others are worth more

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        self.touch([*self.table.ancestors(parent), *slots], is_whole=False)

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._slots[slot]

    def clear(self) -> None:
        self._slots.clear()

    def check(self) -> None:
        assert sum(key is not None for key in self.table.keys) == len(self._slots)
