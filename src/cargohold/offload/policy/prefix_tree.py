"""The tree of prefixes in the tier: which chunk follows which."""

from __future__ import annotations

from typing import Final

import numpy as np

from cargohold.offload.policy.base import NO_SLOT, Slots

_ONE: Final = np.int32(1)


class PrefixTree:
    """A forest over slots: the parent of a chunk is the one before it in its prefix.

    Attributes:
        num_children: per slot, the number of chunks in the tier that come right after its chunk.
    """

    def __init__(self, capacity: int) -> None:
        self._parents = np.full(capacity, NO_SLOT, dtype=np.int32)
        self.num_children = np.full(capacity, 0, dtype=np.int32)
        # The same memory: single elements are read and written three times faster this way.
        self._parent_view = self._parents.data
        self._children_view = self.num_children.data

    def link(self, slots: Slots, parent: int) -> None:
        """Add consecutive chunks of one prefix, behind the chunk in ``parent`` unless that is ``NO_SLOT``."""
        if len(slots) == 1:  # while a request generates, chunks come one by one
            (slot,) = slots.tolist()
            self._parent_view[slot] = parent
            self._children_view[slot] = 0
        else:
            self._parents[slots[1:]] = slots[:-1]
            self._parents[slots[0]] = parent
            self.num_children[slots] = 1
            self.num_children[slots[-1]] = 0
        if parent != NO_SLOT:
            self._children_view[parent] += 1

    def follows_its_neighbour(self, slot: int) -> bool:
        """Whether a chunk's parent is in the slot before: mostly so, because chunks stored together lie together."""
        return 0 < slot == self._parent_view[slot] + 1

    def line_before(self, leaf: int, num_chunks: int) -> int:
        """Return the first slot of the *line* that ends in ``leaf``.

        In a line, each chunk is in the slot after its parent's, and is the parent's only child.

        Args:
            leaf: slot of a chunk without children.
            num_chunks: maximum length of the line.
        """
        first = max(0, leaf + 1 - num_chunks)
        breaks = self._parents[first + 1 : leaf + 1] != np.arange(first, leaf, dtype=np.int32)
        breaks |= self.num_children[first:leaf] != 1
        return leaf - int(breaks[::-1].argmax()) if breaks.any() else first

    def cut_leaf(self, slot: int) -> int:
        """Remove a chunk without children; return its parent if that has become a leaf, else ``NO_SLOT``."""
        parent = self._parent_view[slot]
        self._parent_view[slot] = NO_SLOT
        if parent == NO_SLOT:
            return NO_SLOT
        self._children_view[parent] -= 1
        return NO_SLOT if self._children_view[parent] else parent

    def cut_line(self, first: int, leaf: int) -> int:
        """Remove the chunks of a line; return the parent of its first chunk if that has become a leaf, else ``NO_SLOT``."""
        self._parents[first + 1 : leaf + 1] = NO_SLOT
        self.num_children[first:leaf] = 0
        return self.cut_leaf(first)

    def cut(self, slots: Slots) -> None:
        """Remove any chunks. Children that stay have no parent from now on; if there are any, the whole tree is walked."""
        parents = self._parents[slots]
        np.subtract.at(self.num_children, parents[parents != NO_SLOT], _ONE)
        self._parents[slots] = NO_SLOT
        abandoned = slots[self.num_children[slots] > 0]
        if len(abandoned):
            self._parents[np.isin(self._parents, abandoned)] = NO_SLOT
            self.num_children[abandoned] = 0

    def clear(self) -> None:
        """Remove all chunks."""
        self._parents[:] = NO_SLOT
        self.num_children[:] = 0

    def check(self, slots: Slots) -> None:
        """Verify the counts, given the slots in use. Raises ``AssertionError``."""
        parents = self._parents[self._parents != NO_SLOT]
        counts = np.bincount(parents, minlength=len(self._parents))
        assert (counts == self.num_children).all(), "children are counted wrongly"
        assert np.isin(parents, slots).all(), "a parent is not in the tier"
        assert np.isin((self._parents != NO_SLOT).nonzero()[0], slots).all(), "a child is not in the tier"
