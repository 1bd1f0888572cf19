"""Who was used longest ago: exact order of recency without a list to keep in order.

Every chunk has a *stamp*, and a use is one write of new stamps. The order is looked at only to evict: then the oldest few
per cent are picked out in one pass over the stamps and sorted, and serve many evictions. A stamp that has changed since tells
that its entry is void. So a use costs a few nanoseconds per chunk, memory is the stamp alone, nothing is ever compacted, and
the longest pause is one pass: a few milliseconds for a million chunks.

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

from cargohold.offload.policy.base import NO_SLOTS, BusyCounts, Slots

Stamps = npt.NDArray[np.int64]

ABSENT: Final = np.iinfo(np.int64).max
"""The stamp of a slot without a chunk; beyond every range."""

_MIN_PICK: Final = 1024
_PICKED_PART: Final = 64
_SAMPLE: Final = 4096
_NO_STAMPS: Final[Stamps] = np.empty(0, dtype=np.int64)


class OldestFirst:
    """The slots whose stamps are in a range, oldest first.

    Args:
        stamps: one per slot, ``ABSENT`` where there is none. Written by the owner; never by this class.
        first: where the range starts.
        end: where it ends, exclusive.
    """

    def __init__(self, stamps: Stamps, first: int, end: int) -> None:
        self._stamps = stamps
        self._first, self._end = first, end
        self.clear()

    def clear(self) -> None:
        """Look at everything again."""
        self._cutoff = self._first
        self._queue, self._queue_stamps, self._at = NO_SLOTS, _NO_STAMPS, 0
        self._aside, self._aside_stamps = NO_SLOTS, _NO_STAMPS

    @property
    def cutoff(self) -> int:
        """Stamps below this belong to the oldest, which will be evicted soon."""
        return self._cutoff

    def note(self, slots: Slots, stamps: Stamps) -> None:
        """Slots got these stamps, which are not newer than all others. Mutates what was put aside."""
        late = (stamps >= self._first) & (stamps < self._cutoff)
        if late.any():
            self._put_aside(slots[late], stamps[late])

    def take(self, num_slots: int, busy: BusyCounts, before: int | None = None) -> Slots:
        """The oldest slots that are not busy, oldest first, at most ``num_slots``. The owner must change their stamps.

        Args:
            num_slots: how many are wanted.
            busy: slots that must be passed over.
            before: take only those whose stamp is smaller.
        """
        limit = self._end if before is None else before
        taken = [self._take_aside(num_slots, busy, limit)]
        missing = num_slots - len(taken[0])
        while missing and (self._at < len(self._queue) or self._pick()) and self._queue_stamps[self._at] < limit:
            slots = self._take_queued(missing, busy, limit)
            taken.append(slots)
            missing -= len(slots)
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def has_idle(self, busy: BusyCounts, since: int) -> bool:
        """Whether a slot with a stamp of at least ``since`` is not busy. Looks at all slots."""
        return bool(((busy == 0) & (self._stamps >= since) & (self._stamps < self._end)).any())

    def _take_aside(self, num_slots: int, busy: BusyCounts, limit: int) -> Slots:
        if not len(self._aside):
            return NO_SLOTS
        valid = self._stamps[self._aside] == self._aside_stamps
        self._aside, self._aside_stamps = self._aside[valid], self._aside_stamps[valid]
        usable = (busy[self._aside] == 0) & (self._aside_stamps < limit)
        chosen = np.flatnonzero(usable)[:num_slots]
        taken = self._aside[chosen]
        self._aside, self._aside_stamps = np.delete(self._aside, chosen), np.delete(self._aside_stamps, chosen)
        return taken

    def _take_queued(self, num_slots: int, busy: BusyCounts, limit: int) -> Slots:
        window = slice(self._at, self._at + 2 * num_slots + 16)
        slots, stamps = self._queue[window], self._queue_stamps[window]
        num_below = int(np.searchsorted(stamps, limit))
        slots, stamps = slots[:num_below], stamps[:num_below]
        valid = self._stamps[slots] == stamps
        usable = valid & (busy[slots] == 0)
        chosen = np.flatnonzero(usable)[:num_slots]
        # What lies between the chosen ones is void, or busy and must be looked at again next time.
        num_passed = int(chosen[-1]) + 1 if len(chosen) == num_slots else num_below
        passed_over = (valid & ~usable)[:num_passed]
        if passed_over.any():
            self._put_aside(slots[:num_passed][passed_over], stamps[:num_passed][passed_over])
        self._at += num_passed
        return slots[chosen]

    def _put_aside(self, slots: Slots, stamps: Stamps) -> None:
        slots = np.concatenate((self._aside, slots))
        stamps = np.concatenate((self._aside_stamps, stamps))
        order = np.argsort(stamps, kind="stable")
        self._aside, self._aside_stamps = slots[order], stamps[order]

    def _pick(self) -> bool:
        """Pick out the next oldest slots. ``False`` if there are none. Mutates the queue and the cutoff."""
        slots = np.flatnonzero((self._stamps >= self._cutoff) & (self._stamps < self._next_cutoff()))
        if not len(slots):
            return False
        stamps = self._stamps[slots]
        order = np.argsort(stamps, kind="stable")
        self._queue, self._queue_stamps, self._at = slots[order], stamps[order], 0
        self._cutoff = int(self._queue_stamps[-1]) + 1
        return True

    def _next_cutoff(self) -> int:
        """A stamp below which lie a few per cent of what was not looked at yet, and at least one."""
        sample = self._stamps[:: max(1, len(self._stamps) // _SAMPLE)]
        sample = sample[(sample >= self._cutoff) & (sample < self._end)]
        part = max(_MIN_PICK / len(self._stamps), 1 / _PICKED_PART)
        rank = int(len(sample) * part)
        if rank + 1 >= len(sample):
            return self._end
        return int(np.partition(sample, rank)[rank]) + 1
