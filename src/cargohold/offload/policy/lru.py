"""Least recently used, leaf first."""

from __future__ import annotations

from typing import ClassVar

from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Offer, OneByOnePolicy, Room, Slots
from cargohold.offload.policy.oldest_first import NO_STAMP, OldestFirst, Stamps
from cargohold.offload.policy.stamps import REFRESHED_AFTER_PART, StampClock, new_stamps, stamps_below


class LRUPolicy(OneByOnePolicy):
    """Evicts the chunks used longest ago; of chunks used together, the last one first.

    Stored chunks count as used together with the chunk before them, just before it. So recency only falls along every prefix,
    eviction in its order never leaves a hole, and no chunk is evicted for its own descendants: they would be the next victims
    themselves. A prefix that grows is in use: if more chunks than an eighth of the tier holds were used since it was touched,
    it counts as used again.

    Args:
        capacity: number of slots of the tier.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, capacity: int) -> None:
        self._patience = capacity // REFRESHED_AFTER_PART
        self._stamps = new_stamps(capacity)
        self._clock = StampClock()
        self._oldest = OldestFirst(self._stamps, 0, NO_STAMP)

    def touch(self, slots: Slots, *, is_whole: bool) -> None:  # noqa: D102
        self._stamp(slots, self._clock.next_stamps(len(slots)))

    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:  # noqa: D102
        before = self._stamp_of_parent(offer)
        victims = self._oldest.take(num_slots, busy, before)
        self._stamps[victims] = NO_STAMP
        is_short = len(victims) < num_slots
        return Room(victims, refused=is_short and before is not None and self._oldest.has_idle(busy, before))

    def add_one(self, offer: Offer, slots: Slots) -> None:  # noqa: D102
        before = self._stamp_of_parent(offer)
        stamps = self._clock.next_stamps(len(slots)) if before is None else stamps_below(before, len(slots))
        self._stamp(slots, stamps)

    def drop(self, slots: Slots) -> None:  # noqa: D102
        self._stamps[slots] = NO_STAMP

    def clear(self) -> None:  # noqa: D102
        self._stamps[:] = NO_STAMP
        self._oldest.clear()

    def check(self, slots: Slots) -> None:  # noqa: D102
        assert set((self._stamps != NO_STAMP).nonzero()[0].tolist()) == set(slots.tolist()), "not the slots in use"

    def _stamp(self, slots: Slots, stamps: Stamps) -> None:
        self._stamps[slots] = stamps
        self._oldest.note(slots, stamps)

    def _stamp_of_parent(self, offer: Offer) -> int | None:
        """Return the stamp of the chunk before an offer, or ``None`` if there is none.

        Victims must be older, so that none is evicted for its own child. May count the prefix as used again: see the class.
        """
        if offer.parent == NO_SLOT:
            return None
        if self._clock.uses_since(int(self._stamps[offer.parent])) > self._patience:
            self.touch(offer.ancestors(), is_whole=False)
        return int(self._stamps[offer.parent])
