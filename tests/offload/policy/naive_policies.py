"""LRU and FIFO in plain dicts, to compare the real policies with."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Offer, OneByOnePolicy, Room, Slots

PATIENCE = 8
"""A growing prefix counts as used again once one part in so many of the tier was used since its last use."""


class NaiveOrder(OneByOnePolicy):
    """Evicts the chunk with the smallest ``(when, -place in its request, slot)``."""

    name: ClassVar[str] = "naive"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_uses = 0
        self.order: dict[int, tuple[int, int, int]] = {}

    def use(self, slots: Slots, when: int, place: int) -> None:
        for at, slot in enumerate(slots.tolist()):
            self.order[slot] = (when, -place - at, slot)

    def use_now(self, slots: Slots) -> None:
        self.num_uses += len(slots)
        self.use(slots, self.num_uses, 0)

    @abstractmethod
    def may_go(self, offer: Offer) -> set[int]:
        """The slots that may be evicted for an offer unless they are busy."""

    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        may_go = self.may_go(offer)
        idle = [slot for slot in sorted(self.order, key=self.order.__getitem__) if not busy[slot]]
        victims = [slot for slot in idle if slot in may_go][:num_slots]
        self.drop(np.array(victims, dtype=np.intp))
        refused = len(victims) < num_slots and len(idle) > len(victims)
        return Room(np.array(victims, dtype=np.intp), refused)

    def drop(self, slots: Slots) -> None:
        for slot in slots.tolist():
            del self.order[slot]

    def clear(self) -> None:
        self.order.clear()

    def check(self, slots: Slots) -> None:
        assert sorted(self.order) == sorted(slots.tolist())


class NaiveLRU(NaiveOrder):
    """LRU. A chunk that is stored behind another one counts as used with it, just before it."""

    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        self.use_now(slots)

    def may_go(self, offer: Offer) -> set[int]:
        self.use_parent(offer)
        limit = self.order.get(offer.parent, (self.num_uses + 1, 0, 0))[:2]
        return {slot for slot, (when, place, _) in self.order.items() if (when, place) < limit}

    def add_one(self, offer: Offer, slots: Slots) -> None:
        if offer.parent == NO_SLOT:
            self.use_now(slots)
        else:
            self.use_parent(offer)
            when, place, _ = self.order[offer.parent]
            self.use(slots, when, 1 - place)

    def use_parent(self, offer: Offer) -> None:
        if offer.parent != NO_SLOT and self.num_uses - self.order[offer.parent][0] > self.capacity // PATIENCE:
            self.use_now(offer.ancestors())


class NaiveFIFO(NaiveOrder):
    """FIFO: evicts by the time of the store."""

    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        pass

    def may_go(self, offer: Offer) -> set[int]:
        return self.order.keys() - set(offer.ancestors().tolist())

    def add_one(self, offer: Offer, slots: Slots) -> None:
        self.use_now(slots)
