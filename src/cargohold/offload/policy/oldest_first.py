"""Finds the chunks used longest ago: exact order of recency without a list to keep in order.

Every chunk has a *stamp*, and a use is one write of new stamps. The order is needed only to evict: then the oldest few per cent
are picked out in one pass over the stamps and sorted, and serve many evictions. An entry whose stamp has changed since is void.
So a use costs a few nanoseconds per chunk, the only memory is the stamp, nothing is ever compacted, and the longest pause is
one pass: a few milliseconds for a million chunks, and one more pass over the busy chunks if nearly all are busy. If the order
has few members, those stamped since the last pass are listed, and no pass is needed at all.

::

    stamps   [first, cutoff)                     [cutoff, end)
             picked out: in the queue,           not looked at yet; all uses give stamps here
             or put aside (busy when met,
             or stamped late)
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.base import NO_SLOTS, BusyCounts, Slots, distinct, joined

Stamps = npt.NDArray[np.int64]

NO_STAMP: Final = np.iinfo(np.int64).max
"""The stamp of a slot without a chunk; beyond every range."""

_MIN_PICK: Final = 1024
_PICKED_PART: Final = 64
_SAMPLE: Final = 4096
_NO_STAMPS: Final[Stamps] = np.empty(0, dtype=np.int64)


class OldestFirst:
    """The slots whose stamps are in a range, oldest first; among equal stamps, the lowest slot first.

    Args:
        stamps: one per slot; ``NO_STAMP`` for a slot without a chunk. Written only by the owner, which calls ``note`` then.
        first: start of the range.
        end: end of the range, exclusive.
    """

    def __init__(self, stamps: Stamps, first: int, end: int) -> None:
        self._stamps = stamps
        self._first, self._end = first, end
        self._num_picked = max(_MIN_PICK, len(stamps) // _PICKED_PART)
        self.clear()

    def clear(self) -> None:
        """Forget all slots, because the owner has emptied the range."""
        self._cutoff = self._first
        self._queue, self._queue_stamps, self._at = NO_SLOTS, _NO_STAMPS, 0
        self._aside, self._aside_stamps = NO_SLOTS, _NO_STAMPS
        self._recent: list[Slots] | None = []
        self._num_recent = 0

    def note(self, slots: Slots, stamps: Stamps) -> None:
        """Learn that slots got ``stamps``, which are in the range and descending. Mutates the queue and the lists."""
        if not len(slots):
            return
        if stamps[-1] < self._cutoff:
            late = stamps < self._cutoff
            self._sort_in(slots[late], stamps[late])
            slots = slots[~late]
        if self._recent is not None:
            self._recent.append(slots)
            self._num_recent += len(slots)
            if self._num_recent > 4 * self._num_picked:
                self._recent = None

    def take(self, num_slots: int, busy: BusyCounts | None = None, before: int | None = None) -> Slots:
        """Take out and return the oldest slots that are not busy, oldest first. The owner must change their stamps.

        Args:
            num_slots: maximum number of slots.
            busy: slots whose count is not 0 are passed over; ``None`` if no slot is busy.
            before: take only slots with a smaller stamp than this.
        """
        if not num_slots:
            return NO_SLOTS
        limit = self._end if before is None else before
        taken = [self._take_aside(num_slots, busy, limit)] if len(self._aside) else []
        missing = num_slots - sum(map(len, taken))
        width = 2 * num_slots + 16
        while missing and (self._at < len(self._queue) or self._pick()) and self._queue_stamps[self._at] < limit:
            slots = self._take_next(missing, busy, limit)
            if not len(slots):
                slots = self._take_queued(missing, width, busy, limit)
            taken.append(slots)
            missing -= len(slots)
            # Busy slots are put aside, sorted among those put aside before. Wider steps keep the number of sorts small.
            width *= 2
        return joined(taken)

    def has_idle(self, busy: BusyCounts, since: int) -> bool:
        """Whether a slot with a stamp of at least ``since`` is not busy. Looks at all slots."""
        return bool(((busy == 0) & (self._stamps >= since) & (self._stamps < self._end)).any())

    def _take_aside(self, num_slots: int, busy: BusyCounts | None, limit: int) -> Slots:
        valid = self._stamps[self._aside] == self._aside_stamps
        if not valid.all():
            self._aside, self._aside_stamps = self._aside[valid], self._aside_stamps[valid]
        usable = self._aside_stamps < limit
        if busy is not None:
            usable &= busy[self._aside] == 0
        chosen = usable.nonzero()[0][:num_slots]
        if not len(chosen):
            return NO_SLOTS
        taken = self._aside[chosen]
        self._aside, self._aside_stamps = np.delete(self._aside, chosen), np.delete(self._aside_stamps, chosen)
        return taken

    def _take_next(self, num_slots: int, busy: BusyCounts | None, limit: int) -> Slots:
        """Take the next entries of the queue if every one can be taken, as is usual, else none; in half of the time."""
        window = slice(self._at, self._at + num_slots)
        slots, stamps = self._queue[window], self._queue_stamps[window]
        if (
            stamps[-1] >= limit
            or np.count_nonzero(self._stamps[slots] == stamps) < len(slots)
            or (busy is not None and np.count_nonzero(busy[slots]))
        ):
            return NO_SLOTS
        self._at += len(slots)
        return slots

    def _take_queued(self, num_slots: int, width: int, busy: BusyCounts | None, limit: int) -> Slots:
        """Take slots from the next ``width`` entries of the queue."""
        window = slice(self._at, self._at + width)
        slots, stamps = self._queue[window], self._queue_stamps[window]
        if stamps[-1] >= limit:
            num_below = int(stamps.searchsorted(limit))
            slots, stamps = slots[:num_below], stamps[:num_below]
        valid = self._stamps[slots] == stamps
        usable = valid if busy is None else valid & (busy[slots] == 0)
        chosen = usable.nonzero()[0][:num_slots]
        num_passed = int(chosen[-1]) + 1 if len(chosen) == num_slots else len(slots)
        # Entries between the chosen ones are void, or busy: these must be looked at again next time.
        if np.count_nonzero(valid[:num_passed]) > len(chosen):
            passed_over = (valid & ~usable)[:num_passed]
            self._put_aside(slots[:num_passed][passed_over], stamps[:num_passed][passed_over])
        self._at += num_passed
        taken: Slots = slots[chosen]
        return taken

    def _sort_in(self, slots: Slots, stamps: Stamps) -> None:
        """Add slots whose stamps are below the cutoff to the queue, or put them aside. Mutates both.

        A slot that was emptied and filled again may have got the stamp that it had before. Its old entry would be valid again
        beside the new one, so it is removed.
        """
        if len(self._aside):
            others = ~np.isin(self._aside, slots)
            self._aside, self._aside_stamps = self._aside[others], self._aside_stamps[others]
        is_next = self._at < len(self._queue)
        passed = stamps < (self._queue_stamps[self._at] if is_next else self._cutoff)
        if passed.any():
            self._put_aside(slots[passed], stamps[passed])
        if not passed.all():
            queue, queue_stamps = self._queue[self._at :], self._queue_stamps[self._at :]
            others = ~np.isin(queue, slots)
            slots = np.concatenate((queue[others], slots[~passed]))
            stamps = np.concatenate((queue_stamps[others], stamps[~passed]))
            order = np.lexsort((slots, stamps))
            self._queue, self._queue_stamps, self._at = slots[order], stamps[order], 0

    def _put_aside(self, slots: Slots, stamps: Stamps) -> None:
        # Slots passed over in the queue come in order, behind those put aside before.
        is_in_order = not (np.diff(stamps) <= 0).any() and not (self._aside_stamps[-1:] >= stamps[:1]).any()
        slots = np.concatenate((self._aside, slots))
        stamps = np.concatenate((self._aside_stamps, stamps))
        if not is_in_order:
            order = np.lexsort((slots, stamps))
            slots, stamps = slots[order], stamps[order]
        self._aside, self._aside_stamps = slots, stamps

    def _pick(self) -> bool:
        """Refill the queue with the next oldest slots; return whether there are any. Mutates the queue and the cutoff."""
        if self._recent is None:
            end = self._next_cutoff()
            slots = ((self._stamps >= self._cutoff) & (self._stamps < end)).nonzero()[0]
            self._recent = [] if end == self._end else None
        else:
            # Sorted and without duplicates: a slot is listed as often as it was stamped.
            slots = distinct(joined(self._recent))
            slots = slots[(self._stamps[slots] >= self._cutoff) & (self._stamps[slots] < self._end)]
            self._recent = []
        self._num_recent = 0
        if not len(slots):
            return False
        stamps = self._stamps[slots]
        order = stamps.argsort(kind="stable")
        self._queue, self._queue_stamps, self._at = slots[order], stamps[order], 0
        self._cutoff = int(self._queue_stamps[-1]) + 1
        return True

    def _next_cutoff(self) -> int:
        """Return a stamp below which are about as many further slots as are worth a pass, or all of them."""
        stride = max(1, len(self._stamps) // _SAMPLE)
        sample = self._stamps[::stride]
        sample = sample[(sample >= self._cutoff) & (sample < self._end)]
        rank = self._num_picked // stride
        if rank + 1 >= len(sample):
            return self._end
        sample.partition(rank)
        return int(sample[rank]) + 1
