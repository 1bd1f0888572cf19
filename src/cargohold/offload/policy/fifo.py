"""First in, first out: the baseline against which the value of knowing uses is measured."""

from __future__ import annotations

from typing import ClassVar

from cargohold.offload.policy.base import BusyCounts, Offer, OneByOnePolicy, Room, Slots
from cargohold.offload.policy.oldest_first import NO_STAMP, OldestFirst
from cargohold.offload.policy.stamps import StampClock, new_stamps


class FIFOPolicy(OneByOnePolicy):
    """Evicts the chunks stored longest ago; of chunks stored together, the last one first.

    It knows nothing of prefixes that grow later: their old beginning is evicted first, which makes the rest useless.

    Args:
        capacity: number of slots of the tier.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self, capacity: int) -> None:
        self._stamps = new_stamps(capacity)
        self._clock = StampClock()
        self._oldest = OldestFirst(self._stamps, 0, NO_STAMP)

    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        """Do nothing: uses do not count here."""

    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:  # noqa: D102
        guarded = offer.ancestors()
        busy[guarded] += 1
        victims = self._oldest.take(num_slots, busy)
        busy[guarded] -= 1
        self._stamps[victims] = NO_STAMP
        is_short = len(victims) < num_slots
        return Room(victims, refused=is_short and self._oldest.has_idle(busy, 0))

    def add_one(self, offer: Offer, slots: Slots) -> None:  # noqa: D102
        stamps = self._clock.next_stamps(len(slots))
        self._stamps[slots] = stamps
        self._oldest.note(slots, stamps)

    def drop(self, slots: Slots) -> None:  # noqa: D102
        self._stamps[slots] = NO_STAMP

    def clear(self) -> None:  # noqa: D102
        self._stamps[:] = NO_STAMP
        self._oldest.clear()

    def check(self, slots: Slots) -> None:  # noqa: D102
        assert set((self._stamps != NO_STAMP).nonzero()[0].tolist()) == set(slots.tolist()), "not the slots in use"
