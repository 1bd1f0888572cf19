"""Which chunk follows which, for the chunks that are in the tier."""

from __future__ import annotations

from typing import Final

import numpy as np

from cargohold.offload.policy.base import NO_SLOT, Slots

_ONE: Final = np.int32(1)


class PrefixTree:
    """A forest over slots: the parent of a chunk is the one before it in its prefix.

    Attributes:
        num_children: per slot, how many chunks in the tier come right after it.
    """

    def __init__(self, capacity: int) -> None:
        self._parents = np.full(capacity, NO_SLOT, dtype=np.int32)
        self.num_children = np.full(capacity, 0, dtype=np.int32)
        # The same memory: single elements are read and written three times faster this way.
        self._parent_view = self._parents.data
        self._children_view = self.num_children.data

    def link(self, slots: Slots, parent: int) -> None:
        """Add chunks, one behind the other, behind ``parent`` if there is one."""
        self._parents[slots[1:]] = slots[:-1]
        self._parents[slots[0]] = parent
        self.num_children[slots] = 1
        self.num_children[slots[-1]] = 0
        if parent != NO_SLOT:
            self._children_view[parent] += 1

    def cut_leaf(self, slot: int) -> int:
        """Remove a chunk without children; its parent if that has become a leaf by it, else ``NO_SLOT``."""
        parent = self._parent_view[slot]
        self._parent_view[slot] = NO_SLOT
        if parent == NO_SLOT:
            return NO_SLOT
        self._children_view[parent] -= 1
        return NO_SLOT if self._children_view[parent] else parent

    def cut(self, slots: Slots) -> None:
        """Remove any chunks. Children that stay have no parent from now on. Walks everything if there are some."""
        parents = self._parents[slots]
        np.subtract.at(self.num_children, parents[parents != NO_SLOT], _ONE)
        self._parents[slots] = NO_SLOT
        abandoned = slots[self.num_children[slots] > 0]
        if len(abandoned):
            self._parents[np.isin(self._parents, abandoned)] = NO_SLOT
            self.num_children[abandoned] = 0

    def clear(self) -> None:
        """Remove everything."""
        self._parents[:] = NO_SLOT
        self.num_children[:] = 0

    def check(self, slots: Slots) -> None:
        """Verify the counts, given the slots in use. Raises ``AssertionError``."""
        parents = self._parents[self._parents != NO_SLOT]
        counts = np.bincount(parents, minlength=len(self._parents))
        assert (counts == self.num_children).all(), "children are counted wrongly"
        assert np.isin(parents, slots).all(), "a parent is not in the tier"
        assert np.isin((self._parents != NO_SLOT).nonzero()[0], slots).all(), "a child is not in the tier"
