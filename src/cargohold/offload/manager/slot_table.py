"""The slots of a tier: the state of each, and the number of holds on it. Knows nothing of keys.

::

    FREE --reserve--> WRITING --publish--> READY --retire--> LEAVING --last hold given back--> FREE
      ^                  |                   |
      +---- forfeit -----+                   +-- retire, when nobody holds it --> FREE

A slot being written is held once, by its writer; a ready one once per load that reads it. ``LEAVING`` is a chunk that was
removed while being read: it cannot be found any more, and its slot is free when the last reader has given its hold back.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cargohold.offload.policy.base import BusyCounts, Slots, distinct

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2
LEAVING: Final = 3
NUM_STATES: Final = 4
# Of the type of ``busy``: numpy counts ten times slower if it has to convert.
_ONE: Final = np.int32(1)


class SlotTable:
    """States and holds of ``capacity`` slots. Callers make only legal moves; here they are checked by assertions at most.

    Attributes:
        busy: number of holds, per slot.
        num_free: number of free slots.
        num_writing: number of slots being written.
        num_ready: number of slots of chunks that can be loaded.
        num_leaving: number of slots of removed chunks that are still being read.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.busy: BusyCounts = np.full(capacity, 0, dtype=np.int32)
        # One more than there are slots: NO_SLOT, which is -1, finds the last one, which is always free.
        self._states = np.full(capacity + 1, FREE, dtype=np.uint8)
        # A stack of free slots; low ones are given first.
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        # The same memory: single elements are read and written three times faster this way, and while requests generate, chunks
        # come one by one.
        self._busy_of, self._state_of, self._free_at = self.busy.data, self._states.data, self._free.data
        self.num_free = capacity
        self.num_writing = self.num_ready = self.num_leaving = 0

    def states(self, slots: Slots) -> bytes:
        """Return one byte per slot, its state; ``FREE`` for ``NO_SLOT``."""
        return self._states[slots].tobytes()

    def slots_in(self, *states: int) -> Slots:
        """Return all slots in one of these states. Walks the whole table."""
        is_wanted = np.zeros(NUM_STATES, dtype=np.bool_)
        is_wanted[list(states)] = True
        return is_wanted[self._states[:-1]].nonzero()[0]

    def reserve(self, num_slots: int) -> Slots:
        """Take free slots for a writer. Returns them in ascending order, because neighbours are copied together."""
        assert num_slots <= self.num_free, "more slots reserved than are free"
        self.num_free -= num_slots
        self.num_writing += num_slots
        if num_slots == 1:
            slot = self._free_at[self.num_free]
            self._state_of[slot] = WRITING
            self._busy_of[slot] = 1
            return np.array([slot], dtype=np.intp)
        slots: Slots = np.sort(self._free[self.num_free : self.num_free + num_slots]).astype(np.intp)
        self._states[slots] = WRITING
        self.busy[slots] = 1
        return slots

    def publish(self, slots: Slots) -> None:
        """Make written slots ready, and give back the writer's hold."""
        if len(slots) == 1:
            (slot,) = slots.tolist()
            self._state_of[slot] = READY
            self._busy_of[slot] -= 1
        else:
            self._states[slots] = READY
            self.busy[slots] -= 1
        self.num_writing -= len(slots)
        self.num_ready += len(slots)

    def forfeit(self, slots: Slots) -> None:
        """Make slots that were not written free again, and give back the writer's hold."""
        self.busy[slots] -= 1
        self.num_writing -= len(slots)
        self._free_again(slots)

    def retire(self, slots: Slots) -> None:
        """Take chunks out of ready slots: slots without holds become free, the others are leaving."""
        self.num_ready -= len(slots)
        if len(slots) == 1 and not self._busy_of[slots[0]]:
            self._free_again(slots)
            return
        held = self.busy[slots]
        if np.count_nonzero(held):
            leaving = slots[held > 0]
            self._states[leaving] = LEAVING
            self.num_leaving += len(leaving)
            slots = slots[held == 0]
        self._free_again(slots)

    def hold(self, slots: Slots) -> None:
        """Take one hold on each slot; two on a slot given twice."""
        np.add.at(self.busy, slots, _ONE)

    def let_go(self, slots: Slots) -> None:
        """Give back one hold on each slot; leaving slots without holds become free."""
        np.subtract.at(self.busy, slots, _ONE)
        if self.num_leaving:
            left = distinct(slots[(self._states[slots] == LEAVING) & (self.busy[slots] == 0)])
            self.num_leaving -= len(left)
            self._free_again(left)

    def check(self) -> None:
        """Verify that every slot is accounted for once. Raises ``AssertionError``."""
        counts = np.bincount(self._states[:-1], minlength=NUM_STATES).tolist()
        assert counts == [self.num_free, self.num_writing, self.num_ready, self.num_leaving], f"counts are {counts}"
        assert sorted(self._free[: self.num_free].tolist()) == self.slots_in(FREE).tolist(), (
            "the free slots are not free"
        )
        assert (self.busy >= 0).all(), "a hold was given back that was not taken"
        assert not self.busy[self.slots_in(FREE)].any(), "a free slot is held"
        assert self.busy[self.slots_in(WRITING, LEAVING)].all(), (
            "nobody holds a slot that is written, or should be free"
        )

    def _free_again(self, slots: Slots) -> None:
        self._states[slots] = FREE
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)
