"""The ARC policy: balances recency and frequency, and evicts leaves first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from cargohold.offload.policy.arc_balance import Balance
from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Offer, OneByOnePolicy, Room, Slots, joined
from cargohold.offload.policy.ghosts import Ghosts
from cargohold.offload.policy.oldest_first import NO_STAMP, OldestFirst, Stamps
from cargohold.offload.policy.stamps import REFRESHED_AFTER_PART, StampClock, new_stamps, stamps_below

_OFTEN: Final = 1 << 62
"""Added to the stamps of chunks in the second list."""

_MOMENT: Final = 4096
"""Maximum number of ghosts beyond the paper's limit while chunks come in."""


class ARCPolicy(OneByOnePolicy):
    """Balances recency and frequency by the evictions that it regrets.

    Chunks used once and chunks used more often are in two LRU lists. Keys evicted from either are remembered as *ghosts*, and
    when one of them comes back, its list gets a larger part of the tier. N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low
    Overhead Replacement Cache", FAST 2003, figure 4; calls with one chunk at a time do exactly what is written there.

    Chunks that come together are taken from the last to the first, as in LRU, and all of them are looked up in the ghost lists
    before any list is changed. Busy chunks are passed over. Chunks stored behind others get the recency of these, so neither
    list gives up a chunk for its own descendants. Still a prefix may be evicted from the second list while its continuation is
    in the first: ARC knows no prefixes.

    Args:
        capacity: number of slots of the tier.
    """

    name: ClassVar[str] = "arc"

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._next_target = b"", 0.0
        self._sizes = [0, 0]
        self._clock = StampClock()
        self._stamps = new_stamps(capacity)
        self._keys = np.full(capacity, None, dtype=object)
        self._lists = (OldestFirst(self._stamps, 0, _OFTEN), OldestFirst(self._stamps, _OFTEN, NO_STAMP))
        self._ghosts = Ghosts(capacity + min(capacity, _MOMENT))

    def touch(self, slots: Slots, *, is_whole: bool) -> None:  # noqa: D102
        self._count(slots, -1)
        self._stamp(slots, self._clock.next_stamps(len(slots)), 1)
        self._count(slots, 1)

    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:  # noqa: D102
        before = self._recency_of_parent(offer)
        balance = self._balance(num_free=len(offer.keys) - num_slots)
        wanted = balance.admit(self._ghosts.find(offer.keys))
        # Applied when the chunks come in: if everything is busy, they do not, and are offered again.
        self._next_target = offer.keys[0], balance.target
        victims = self._take(wanted, self._capacity - balance.sizes[0], busy, before)
        is_short = len(victims) < num_slots
        return Room(victims, refused=is_short and before is not None and self._has_idle(busy, before))

    def add_one(self, offer: Offer, slots: Slots) -> None:  # noqa: D102
        keys = offer.keys[: len(slots)]
        ghosts = self._ghosts.find(keys)
        self._settle_target(keys, ghosts)
        recency = self._recency_of_parent(offer)
        stamps = self._clock.next_stamps(len(slots)) if recency is None else stamps_below(recency, len(slots))
        if ghosts.count(None) == len(ghosts):
            self._stamp(slots, stamps, 0)
        else:
            is_back = np.array([ghost is not None for ghost in ghosts])
            self._ghosts.forget([key for key, ghost in zip(keys, ghosts, strict=True) if ghost is not None])
            self._stamp(slots[~is_back], stamps[~is_back], 0)
            self._stamp(slots[is_back], stamps[is_back], 1)
        self._keys[slots] = keys
        self._count(slots, 1)
        self._ghosts.drop_oldest(0, self._sizes[0] + self._ghosts.sizes[0] - self._capacity)
        self._ghosts.drop_oldest(1, sum(self._sizes) + sum(self._ghosts.sizes) - 2 * self._capacity)

    def drop(self, slots: Slots) -> None:  # noqa: D102
        self._count(slots, -1)
        self._stamps[slots] = NO_STAMP
        self._keys[slots] = None

    def clear(self) -> None:  # noqa: D102
        self.drop((self._stamps != NO_STAMP).nonzero()[0])
        for queue in self._lists:
            queue.clear()

    def check(self, slots: Slots) -> None:  # noqa: D102
        used = (self._stamps != NO_STAMP).nonzero()[0]
        assert used.tolist() == sorted(slots.tolist()), "not the slots in use"
        num_often = int(np.count_nonzero(self._stamps[used] >= _OFTEN))
        assert self._sizes == [len(used) - num_often, num_often], "sizes are wrong"
        assert 0 <= self._target <= self._capacity, "the target is out of range"
        assert self._sizes[0] + self._ghosts.sizes[0] <= self._capacity, "the first list and its ghosts are too many"
        assert not any(ghost is not None for ghost in self._ghosts.find(self._keys[used].tolist())), "a ghost is here"
        self._ghosts.check()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _balance(self, num_free: int) -> Balance:
        return Balance(self._capacity, self._target, list(self._sizes), list(self._ghosts.sizes), num_free)

    def _settle_target(self, keys: Sequence[bytes], ghosts: Sequence[int | None]) -> None:
        """Adapt the target to chunks coming in that are ghosts. Mutates the target."""
        first_key, target = self._next_target
        if not keys or first_key != keys[0]:
            balance = self._balance(num_free=len(keys))
            balance.admit(ghosts)
            target = balance.target
        self._target, self._next_target = target, (b"", 0.0)

    def _take(self, wanted: Sequence[int], num_ghosts: int, busy: BusyCounts, before: int | None) -> Slots:
        """Evict from both lists; slots that one list cannot give are taken from the other. Mutates everything.

        Args:
            wanted: number of chunks to evict from the first and from the second list.
            num_ghosts: maximum number of chunks of the first list that may be remembered as ghosts.
            busy: slots whose count is not 0 are passed over.
            before: recency that victims must be older than, or ``None``.

        Returns:
            The slots of the victims.
        """
        victims: list[Slots] = []
        missing = 0
        for which, num_slots in ((0, wanted[0]), (1, wanted[1]), (0, 0)):
            limit = None if before is None else before + which * _OFTEN
            slots = self._lists[which].take(missing + num_slots, busy, limit)
            missing += num_slots - len(slots)
            if len(slots):
                remembered = slots if which else slots[max(0, len(slots) - num_ghosts) :]
                self._ghosts.remember(self._keys[remembered].tolist(), which)
                self.drop(slots)
                victims.append(slots)
        return joined(victims)

    def _has_idle(self, busy: BusyCounts, since: int) -> bool:
        return self._lists[0].has_idle(busy, since) or self._lists[1].has_idle(busy, since + _OFTEN)

    def _recency_of_parent(self, offer: Offer) -> int | None:
        """Return the recency of the chunk before an offer, in whichever list it is; ``None`` if there is none.

        May count the prefix as used again, as LRU does.
        """
        if offer.parent == NO_SLOT:
            return None
        recency = int(self._stamps[offer.parent]) & (_OFTEN - 1)
        if self._clock.uses_since(recency) > self._capacity // REFRESHED_AFTER_PART:
            # As in LRU. It is the same use, which goes on, so the chunks stay in their lists.
            slots = offer.ancestors()
            stamps = self._clock.next_stamps(len(slots))
            is_often = self._stamps[slots] >= _OFTEN
            self._stamp(slots[~is_often], stamps[~is_often], 0)
            self._stamp(slots[is_often], stamps[is_often], 1)
            recency = int(self._stamps[offer.parent]) & (_OFTEN - 1)
        return recency

    def _stamp(self, slots: Slots, stamps: Stamps, which: int) -> None:
        """Put chunks into list ``which`` (0 or 1), with the recency in ``stamps``, which are descending."""
        stamps = stamps + which * _OFTEN
        self._stamps[slots] = stamps
        self._lists[which].note(slots, stamps)

    def _count(self, slots: Slots, change: int) -> None:
        """Add ``change`` per chunk to the size of the list that its stamp puts it in. Mutates the sizes."""
        num_often = int(np.count_nonzero(self._stamps[slots] >= _OFTEN))
        self._sizes[0] += change * (len(slots) - num_often)
        self._sizes[1] += change * num_often
