"""LRU and FIFO in plain lists, to compare the real policies with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.policies import ReplacementPolicy

PATIENCE = 8
"""A growing prefix counts as used again once one part in so many of the tier was used since its last use."""


class NaiveFIFO(ReplacementPolicy):
    """Evicts the last chunk of the oldest list whose last chunk can go."""

    name: ClassVar[str] = "naive"

    def __init__(self, table: ChunkTable) -> None:
        super().__init__(table)
        self.num_uses = 0
        # When each list of chunks was used, and the list; the oldest first.
        self.lists: list[tuple[int, list[int]]] = []

    def use_now(self, slots: Sequence[int]) -> None:
        self.drop(slots)
        self.num_uses += len(slots)
        if slots:
            self.lists.append((self.num_uses, list(slots)))

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        pass

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        for _ in range(num_slots):
            ends = [slots[-1] for _, slots in self.lists]
            victims = [slot for slot in ends if not self.table.children[slot] and not self.table.pins[slot]]
            if victims:
                self.drop(victims[:1])
                self.table.evict(victims[0])
        return False

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        self.use_now(slots)

    def drop(self, slots: Sequence[int]) -> None:
        left = [(when, [slot for slot in some if slot not in slots]) for when, some in self.lists]
        self.lists = [(when, some) for when, some in left if some]

    def clear(self) -> None:
        self.lists.clear()

    def check(self) -> None:
        used = [slot for slot, key in enumerate(self.table.keys) if key is not None]
        assert sorted(slot for _, slots in self.lists for slot in slots) == used


class NaiveLRU(NaiveFIFO):
    """LRU. A chunk that is stored behind another one counts as used with it, just before it."""

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        self.use_now(slots)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        self.use_parent(parent)
        return super().make_room(keys, parent, num_slots)

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        if parent == NO_SLOT:
            self.use_now(slots)
        else:
            self.use_parent(parent)
            self.num_uses += len(slots)
            at = self.at(parent)
            when, stem = self.lists[at]
            if stem[-1] == parent:
                stem.extend(slots)
            else:  # a branch
                self.lists.insert(at, (when, list(slots)))

    def renew(self, slot: int) -> None:
        self.num_uses += 1
        self.use_again(slot)

    def use_parent(self, parent: int) -> None:
        if parent != NO_SLOT and self.num_uses - self.lists[self.at(parent)][0] > self.table.capacity // PATIENCE:
            self.renew(parent)

    def use_again(self, slot: int) -> None:
        """Make the prefix that ends here the newest lists: of each of its lists the part up to it, its end first."""
        while slot != NO_SLOT:
            at = self.at(slot)
            when, slots = self.lists.pop(at)
            if when == self.num_uses:
                self.lists.insert(at, (when, slots))
                return
            end = slots.index(slot) + 1
            if slots[end:]:
                self.lists.insert(at, (when, slots[end:]))
            self.lists.append((self.num_uses, slots[:end]))
            slot = self.table.parents[slots[0]]

    def at(self, slot: int) -> int:
        return next(at for at, (_, slots) in enumerate(self.lists) if slot in slots)
