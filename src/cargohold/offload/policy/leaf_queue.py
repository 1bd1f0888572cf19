"""The leaves of the prefix tree that are worth least."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Slots
from cargohold.offload.policy.prefix_tree import PrefixTree
from cargohold.offload.policy.reuse_model import NUM_AGES, Index, age_buckets

_QUEUED_PART: Final = 8
_MIN_USES_BETWEEN: Final = 64
_STALE_PART: Final = 8
_WINDOW: Final = 1 << 18
_TOLERANCE: Final = 1e-6

_MIN_LINE: Final = 100
"""Where fewer chunks are wanted, it is quicker to look at one after the other."""

NEVER: Final = -1


class Eviction(NamedTuple):
    """What was evicted.

    Attributes:
        slots: from where.
        last_uses: when the chunks there were used last, parallel to ``slots``.
        refused: whether a chunk was not worth more than the next victim.
    """

    slots: Slots
    last_uses: npt.NDArray[np.int64]
    refused: bool


class LeafQueue:
    """Finds what to evict.

    Worth changes as chunks age, so there is no order to maintain. Now and then all leaves are looked at, an eighth of them
    is queued by worth, and each is looked at again when its turn comes. Evicting a leaf may make one of its parent, which is
    queued if it belongs there: cold prefixes are eaten from their ends. Of large tiers, a part is looked at each time.

    Args:
        last_uses: per slot, when its chunk was used last; ``NEVER`` where there is none, and for what ``take`` takes.
        classes: per slot, the class of its chunk. Read only.
        tree: which chunk follows which; ``take`` removes what it takes.
        index: worth, by class and age bucket.
    """

    def __init__(
        self, last_uses: npt.NDArray[np.int64], classes: npt.NDArray[np.uint8], tree: PrefixTree, index: Index
    ) -> None:
        self._last_uses, self._classes, self._tree = last_uses, classes, tree
        # The same memory: single elements are read three times faster this way.
        self._last_use_of, self._class_of = last_uses.data, classes.data
        self._children_of = tree.num_children.data
        self._queue_age = max(_MIN_USES_BETWEEN, len(last_uses) // _STALE_PART)
        self._window_start = 0
        self.use_index(index)

    def use_index(self, index: Index) -> None:
        """Worth has changed. Mutates the queue."""
        self._index = index
        self._rows: list[list[float]] = index.tolist()
        # (worth when queued, last use, slot), the smallest first.
        self._heap: list[tuple[float, int, int]] = []
        self._highest = 0.0
        self._queued_at = -self._queue_age

    def take(self, worth: npt.NDArray[np.float64], now: int, busy: BusyCounts) -> Eviction:
        """Evict one leaf for each chunk that wants in, as long as that is worth no less than the leaf.

        Args:
            worth: of the chunks that want in, in prefix order.
            now: the time.
            busy: which slots must be passed over.
        """
        if now - self._queued_at >= self._queue_age:
            self._queue_leaves(now, busy)
        victims: list[int] = []
        last_uses: list[int] = []
        passed: list[tuple[float, int, int]] = []
        refused = False
        lowest = worth.min()
        while len(victims) < len(worth):
            found = self._lowest(now, busy, passed)
            if found is None:
                break
            if worth[len(victims)] < found[1]:
                refused = True
                break
            last_use = self._last_use_of[found[0]]
            num_wanted = len(worth) - len(victims)
            if found[1] > lowest and (is_worse := worth[len(victims) :] < found[1]).any():
                num_wanted = int(is_worse.argmax())
            chain = self._evict_upwards(found[0], num_wanted, now, busy)
            victims += chain
            last_uses += [last_use] * len(chain)
        for entry in passed:
            heappush(self._heap, entry)
        return Eviction(np.array(victims, dtype=np.intp), np.array(last_uses, dtype=np.int64), refused)

    def _evict_upwards(self, slot: int, num_wanted: int, now: int, busy: BusyCounts) -> list[int]:
        """Evict the leaf at the head of the queue, and what was in front of it as long as that is the same in all respects.

        A chunk that becomes a leaf by an eviction, and is of the same class and age, is as low as anything in the queue: a
        cold prefix goes in one piece. Mutates the queue and the tree.
        """
        heappop(self._heap)
        last_use_of, class_of, cut_leaf = self._last_use_of, self._class_of, self._tree.cut_leaf
        last_use, chunk_class, is_busy = last_use_of[slot], class_of[slot], busy.data
        evicted: list[int] = []
        if num_wanted >= _MIN_LINE and self._tree.follows_its_neighbour(slot):
            first = self._line_alike(slot, num_wanted, busy)
            evicted += range(slot, first - 1, -1)
            self._last_uses[first : slot + 1] = NEVER
            slot = self._tree.cut_line(first, slot)
        for _ in range(num_wanted - len(evicted)):
            if slot == NO_SLOT or last_use_of[slot] != last_use or class_of[slot] != chunk_class or is_busy[slot]:
                break
            last_use_of[slot] = NEVER
            evicted.append(slot)
            slot = cut_leaf(slot)
        self._queue_if_low(slot, now)
        return evicted

    def _line_alike(self, leaf: int, num_wanted: int, busy: BusyCounts) -> int:
        """Where the line of chunks begins that end in ``leaf`` and are the same as this in all respects."""
        line = slice(self._tree.line_before(leaf, num_wanted), leaf)
        differs = (self._last_uses[line] != self._last_uses[leaf]) | (self._classes[line] != self._classes[leaf])
        differs |= busy[line] > 0
        return leaf - int(differs[::-1].argmax()) if differs.any() else line.start

    def _lowest(self, now: int, busy: BusyCounts, passed: list[tuple[float, int, int]]) -> tuple[int, float] | None:
        """The leaf at the head of the queue and its worth, or ``None``. Mutates the queue; busy leaves go to ``passed``."""
        heap, is_busy = self._heap, busy.data
        for _ in range(2 + (len(self._last_uses) - 1) // _WINDOW):
            while heap:
                queued_worth, last_use, slot = heap[0]
                if self._last_use_of[slot] != last_use or self._children_of[slot]:
                    heappop(heap)
                elif is_busy[slot]:
                    passed.append(heappop(heap))
                elif (worth := self._worth(slot, now)) > queued_worth * (1 + 2 * _TOLERANCE):
                    heappop(heap)
                    self._queue_if_low(slot, now)
                else:
                    return slot, worth
            self._queue_leaves(now, busy)
        return None

    def _worth(self, slot: int, now: int) -> float:
        age = now - self._last_use_of[slot]
        return self._rows[self._class_of[slot]][min(max(age.bit_length() - 1, 0), NUM_AGES - 1)]

    def _queue_if_low(self, slot: int, now: int) -> None:
        if slot != NO_SLOT and (worth := self._worth(slot, now)) <= self._highest:
            heappush(self._heap, (worth, self._last_use_of[slot], slot))

    def _queue_leaves(self, now: int, busy: BusyCounts) -> None:
        """Look at all leaves, or at the next part of them, and queue the lowest that are not busy. Mutates the queue."""
        window = slice(self._window_start, self._window_start + _WINDOW)
        self._window_start = window.stop if window.stop < len(self._last_uses) else 0
        last_uses = self._last_uses[window]
        is_leaf = (last_uses != NEVER) & (self._tree.num_children[window] == 0) & (busy[window] == 0)
        leaves = is_leaf.nonzero()[0]
        last_uses = last_uses[leaves]
        leaves += window.start
        worth = self._index[self._classes[leaves], age_buckets(now - last_uses)]
        # Among equals, the one used longest ago.
        worth *= 1 + _TOLERANCE / (now + 1) * last_uses
        num_queued = max(1, len(leaves) // _QUEUED_PART)
        if num_queued < len(leaves):
            order = worth.argpartition(num_queued)
            self._highest = float(worth[order[num_queued]])
            chosen = order[:num_queued]
        else:
            self._highest = float("inf")
            chosen = np.arange(len(leaves))
        self._heap[:] = sorted(
            zip(worth[chosen].tolist(), last_uses[chosen].tolist(), leaves[chosen].tolist(), strict=True)
        )
        self._queued_at = now
