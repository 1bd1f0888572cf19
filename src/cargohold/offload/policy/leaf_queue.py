"""A queue of the leaves of the prefix tree that are worth least."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Room, Slots
from cargohold.offload.policy.prefix_tree import PrefixTree
from cargohold.offload.policy.reuse_model import NUM_AGES, Index, age_buckets

_QUEUED_PART: Final = 8
_MIN_USES_BETWEEN: Final = 64
_STALE_PART: Final = 8
_WINDOW: Final = 1 << 18
_TOLERANCE: Final = 1e-6
_HIGHER: Final = 1 + 2 * _TOLERANCE
_PULLED: Final = 128
_MAX_AGE_BITS: Final = 63

_MIN_LINE: Final = 100
"""If fewer chunks are wanted than this, it is faster to look at one after the other."""

NEVER: Final = -1
"""The last use of a slot without a chunk."""

Entry: TypeAlias = tuple[float, int, int]
"""A queued leaf: its worth when it was queued, its last use, its slot. The smallest entry comes first."""

_NOTHING: Final[Entry] = (-1.0, NEVER, NO_SLOT)
_ALL: Final[Entry] = (float("inf"), NEVER, NO_SLOT)


class Eviction(NamedTuple):
    """The result of an eviction.

    Attributes:
        rooms: the slots given up for each offer.
        slots: all of these slots, in order.
        last_uses: time of the last use of the chunks that were there, parallel to ``slots``.
    """

    rooms: list[Room]
    slots: Slots
    last_uses: npt.NDArray[np.int64]


class LeafQueue:
    """Finds the leaves to evict.

    Worth changes as chunks age, so no order can be maintained. Now and then all leaves are looked at (in large tiers, a part of
    them each time), the lowest eighth is sorted by worth, and each leaf's worth is checked again when its turn comes. Evicting
    a leaf may make its parent a leaf, which is queued if its worth is low enough: cold prefixes are evicted from their ends.

    Sorted leaves are pulled into a heap piece by piece, where leaves queued since are among them.

    Args:
        last_uses: per slot, the time of its chunk's last use; ``NEVER`` for a slot without a chunk. ``take`` sets it to
            ``NEVER`` for the slots that it gives up.
        classes: per slot, the class of its chunk. Only read here.
        tree: which chunk follows which; ``take`` removes chunks from it.
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
        """Use a new table of worth, and empty the queue."""
        self._index = index
        # By class, then by the number of bits of an age: the fastest way to look up one element.
        self._worth_of = [[row[0], *row, *[row[-1]] * (_MAX_AGE_BITS - NUM_AGES)] for row in index.tolist()]
        self._heap: list[Entry] = []
        # Entries in ascending order, as columns; and how many of them were pulled into the heap.
        self._sorted: tuple[npt.NDArray[Any], ...] = ()
        self._num_pulled, self._last_pulled = 0, _NOTHING
        self._highest = 0.0
        self._queued_at = -self._queue_age

    def take(self, worth: npt.NDArray[np.float64], parts: Iterable[slice], now: int, busy: BusyCounts) -> Eviction:
        """Evict one leaf for each chunk on offer, while that chunk is worth no less than the leaf.

        Args:
            worth: worth of the chunks on offer.
            parts: the chunks of each offer that need a slot, consecutive in one prefix. If one is refused, so are those behind
                it.
            now: the time.
            busy: slots whose count is not 0 are passed over.
        """
        if now - self._queued_at >= self._queue_age:
            self._queue_leaves(now, busy)
        victims: list[int] = []
        last_uses: list[int] = []
        passed: list[Entry] = []
        found: list[tuple[int, bool]] = []
        has_more = True
        all_offered = worth.data
        for part in parts:
            offered, refused = all_offered[part], False
            while has_more and len(offered):
                lowest = self._lowest(now, busy, passed)
                if lowest is None:
                    has_more = False
                elif offered[0] < lowest[0]:
                    refused = True
                    break
                else:
                    gone = self._evict_upwards(lowest, offered, now, busy)
                    offered = offered[len(gone) :]
                    victims += gone
                    last_uses += [lowest[1]] * len(gone)
            found.append((len(victims), refused))
        for entry in passed:
            heappush(self._heap, entry)
        slots = np.array(victims, dtype=np.intp)
        starts = [0, *(end for end, _ in found)]
        rooms = [Room(slots[start:end], refused) for start, (end, refused) in zip(starts, found, strict=False)]
        return Eviction(rooms, slots, np.array(last_uses, dtype=np.int64))

    def _evict_upwards(self, leaf: Entry, offered: memoryview, now: int, busy: BusyCounts) -> list[int]:
        """Evict the leaf at the head of the queue, and its ancestors while they have the same class and last use.

        A chunk that becomes a leaf by an eviction, and has the same class and last use, is worth as little as anything in the
        queue, so a cold prefix is evicted in one piece. Mutates the queue and the tree.

        Args:
            leaf: the leaf, with its worth now.
            offered: worth of the chunks on offer; that of the first is no less than the leaf's.
            now: the time.
            busy: slots whose count is not 0 must stay.

        Returns:
            The slots given up, one for each chunk on offer that gets in.
        """
        heappop(self._heap)
        worth, last_use, slot = leaf
        last_use_of, class_of, cut_leaf, is_busy = self._last_use_of, self._class_of, self._tree.cut_leaf, busy.data
        chunk_class, num_offered = class_of[slot], len(offered)
        victims: list[int] = []
        if num_offered >= _MIN_LINE and self._tree.follows_its_neighbour(slot):
            is_worse = np.asarray(offered) < worth
            num_wanted = int(is_worse.argmax()) if is_worse.any() else len(is_worse)
            first = self._line_alike(slot, num_wanted, busy)
            victims += range(slot, first - 1, -1)
            self._last_uses[first : slot + 1] = NEVER
            slot = self._tree.cut_line(first, slot)
        while slot != NO_SLOT and len(victims) < num_offered and offered[len(victims)] >= worth:
            if last_use_of[slot] != last_use or class_of[slot] != chunk_class or is_busy[slot]:
                break
            last_use_of[slot] = NEVER
            victims.append(slot)
            slot = cut_leaf(slot)
        if slot != NO_SLOT:
            self._queue_if_low(slot, now)
        return victims

    def _line_alike(self, leaf: int, num_wanted: int, busy: BusyCounts) -> int:
        """Return the first slot of the line that ends in ``leaf`` and whose chunks have its class and last use.

        Busy chunks end the line; it has at most ``num_wanted`` chunks.
        """
        line = slice(self._tree.line_before(leaf, num_wanted), leaf)
        differs = (self._last_uses[line] != self._last_uses[leaf]) | (self._classes[line] != self._classes[leaf])
        differs |= busy[line] > 0
        return leaf - int(differs[::-1].argmax()) if differs.any() else line.start

    def _lowest(self, now: int, busy: BusyCounts, passed: list[Entry]) -> Entry | None:
        """Return the leaf at the head of the queue, with its worth now, or ``None``. It stays in the queue.

        Mutates the queue: void entries are dropped, and busy leaves moved to ``passed``.
        """
        heap, is_busy = self._heap, busy.data
        last_use_of, children_of = self._last_use_of, self._children_of
        for _ in range(2 + (len(self._last_uses) - 1) // _WINDOW):
            while self._has_next():
                queued_worth, last_use, slot = heap[0]
                if last_use_of[slot] != last_use or children_of[slot]:
                    heappop(heap)
                elif is_busy[slot]:
                    passed.append(heappop(heap))
                else:
                    worth = self._worth_of[self._class_of[slot]][(now - last_use).bit_length()]
                    if worth <= queued_worth * _HIGHER:
                        return worth, last_use, slot
                    heappop(heap)
                    self._queue_if_low(slot, now)
            self._queue_leaves(now, busy)
        return None

    def _has_next(self) -> bool:
        """Pull sorted leaves into the heap until its head is the head of the queue; return whether there is one."""
        heap = self._heap
        while not heap or heap[0] > self._last_pulled:
            part = slice(self._num_pulled, self._num_pulled + _PULLED)
            pulled = list(zip(*(column[part].tolist() for column in self._sorted), strict=True))
            if not pulled:
                self._last_pulled = _ALL
                break
            self._num_pulled += len(pulled)
            self._last_pulled = pulled[-1]
            heap += pulled
            heapify(heap)
        return bool(heap)

    def _queue_if_low(self, slot: int, now: int) -> None:
        last_use = self._last_use_of[slot]
        worth = self._worth_of[self._class_of[slot]][(now - last_use).bit_length()]
        if worth <= self._highest:
            heappush(self._heap, (worth, last_use, slot))

    def _queue_leaves(self, now: int, busy: BusyCounts) -> None:
        """Refill the queue with the lowest leaves that are not busy, of all leaves or the next part of them."""
        window = slice(self._window_start, self._window_start + _WINDOW)
        self._window_start = window.stop if window.stop < len(self._last_uses) else 0
        last_uses = self._last_uses[window]
        is_leaf = (last_uses != NEVER) & (self._tree.num_children[window] == 0) & (busy[window] == 0)
        leaves = is_leaf.nonzero()[0]
        last_uses = last_uses[leaves]
        leaves += window.start
        worth = self._index[self._classes[leaves], age_buckets(now - last_uses)]
        # Among leaves of equal worth, the one used longest ago is the lowest.
        worth *= 1 + _TOLERANCE / (now + 1) * last_uses
        num_queued = max(1, len(leaves) // _QUEUED_PART)
        if num_queued < len(leaves):
            order = worth.argpartition(num_queued)
            self._highest = float(worth[order[num_queued]])
            chosen = order[:num_queued]
        else:
            self._highest = float("inf")
            chosen = np.arange(len(leaves))
        worth, last_uses, leaves = worth[chosen], last_uses[chosen], leaves[chosen]
        order = np.lexsort((leaves, last_uses, worth))
        self._sorted = worth[order], last_uses[order], leaves[order]
        self._num_pulled, self._last_pulled = 0, _NOTHING
        self._heap.clear()
        self._queued_at = now
