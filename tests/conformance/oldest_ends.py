"""A policy in a few lines: what was used longest ago goes, ends of prefixes first."""

from collections import OrderedDict

import numpy as np

from cargohold.offload.policy.base import BusyCounts, Offer, OneByOnePolicy, Room, Slots


class OldestEnds(OneByOnePolicy):
    """Keeps all slots in use in one list, and looks through it for victims: simple, and slow where a tier is large."""

    name = "oldest-ends"

    def __init__(self, capacity: int) -> None:
        self._slots = OrderedDict[int, None]()

    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        for slot in slots[::-1].tolist():  # the last counts as used first
            self._slots[slot] = None
            self._slots.move_to_end(slot)

    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        in_front = set(offer.ancestors().tolist())
        idle = [slot for slot in self._slots if not busy[slot]]
        victims = [slot for slot in idle if slot not in in_front][:num_slots]
        for slot in victims:
            del self._slots[slot]
        return Room(np.array(victims, dtype=np.intp), refused=len(victims) < num_slots and len(victims) < len(idle))

    def add_one(self, offer: Offer, slots: Slots) -> None:
        self.touch(np.concatenate((offer.ancestors(), slots)), is_whole=False)

    def drop(self, slots: Slots) -> None:
        for slot in slots.tolist():
            del self._slots[slot]

    def clear(self) -> None:
        self._slots.clear()

    def check(self, slots: Slots) -> None:
        assert set(self._slots) == set(slots.tolist())
