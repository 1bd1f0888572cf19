"""The policy port: which chunks of one tier stay, and which make room for others.

A policy knows keys, slots and order; nothing of engines, tensors, groups, handles or bytes. It asks no clock: its time is the
operations it is told of, so the same operations always end in the same choice.

A chunk is worth nothing when the chunk before it is gone, because a prefix is only usable up to its first hole. Two habits
keep holes away, and every policy here has them:

* **leaf first**: of chunks used together, the last counts as used first, so it is evicted first;
* **never for its own child**: a chunk is not evicted to make room for one that follows it in a prefix.

Tables as long as the tier are made with ``np.full``, not ``np.zeros``: it touches their pages at once, and so the scheduler's
thread does not wait for the kernel to clear them in some later call (up to 90 ms at a million chunks).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.intp]
"""Slots of a tier, as an array of whole numbers (``intp``), in an order that the context says."""

BusyCounts: TypeAlias = npt.NDArray[np.int32]
"""Per slot, how many reasons there are not to evict it now: it is being written, read, or in front of chunks on offer."""

NO_SLOT: Final = -1


class Offer(NamedTuple):
    """Chunks that could be stored: absent, consecutive in one prefix.

    Attributes:
        keys: which, in prefix order.
        parent: slot of the chunk before the first, or ``NO_SLOT`` if that is not in the tier.
        ancestors: gives the slots of all chunks before the first that are in the tier, in prefix order; the last is ``parent``.
    """

    keys: Sequence[bytes]
    parent: int
    ancestors: Callable[[], Slots]


class Room(NamedTuple):
    """What a policy gives up for an offer.

    Attributes:
        victims: slots that are free from now on, in the order of eviction. An array as of ``Slots``, never a list; ``NO_SLOTS``
            if there are none.
        refused: there are no more victims because the rest is worth more than what is on offer. If false, there are none
            because everything else is busy, and asking again later may give more.
    """

    victims: Slots
    refused: bool


NO_SLOTS: Final[Slots] = np.empty(0, dtype=np.intp)

_NOTHING: Final = Room(NO_SLOTS, refused=False)


def joined(pieces: Sequence[Slots]) -> Slots:
    """One array of all pieces, which may be one of them."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else NO_SLOTS


def distinct(slots: Slots) -> Slots:
    """Each slot once, ascending.

    Not ``np.unique``, whose first call imports masked arrays: tens of milliseconds on the scheduler's thread.
    """
    slots = np.sort(slots)
    different: Slots = slots[np.diff(slots, prepend=NO_SLOT) != 0]
    return different


class ReplacementPolicy(ABC):
    """Decides what one tier keeps.

    Attributes:
        name: what users call it.
        evicts_ends_alone: whether no chunk is given up that another in the tier was stored behind. Where that is promised, the
            manager need not say of every chunk in front of an offer that it must stay.

    Args:
        capacity: slots of the tier.
    """

    name: ClassVar[str]
    evicts_ends_alone: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    def admit_all(self) -> None:  # noqa: B027  # most policies do so anyway
        """Refuse nothing from now on for what it is worth. See ``OffloadManager.admit_all``."""

    @abstractmethod
    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        """A request uses these chunks, in prefix order.

        Args:
            slots: where those of its chunks are that are in the tier.
            is_whole: whether the last of them is the request's last chunk.
        """

    @abstractmethod
    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:
        """Give up chunks for each of ``offers``, none of which is busy or before one of them in its prefix; they are forgotten.

        Args:
            offers: what wants slots; each continues another prefix, or the same one elsewhere.
            num_slots: parallel to ``offers``: how many of each one's chunks have no slot yet: its last ones, as the first ones
                get what is free. At most so many chunks are given up for it; with 0, none.
            busy: which slots must stay; may be changed during the call, and is as it was afterwards.

        Returns:
            Parallel to ``offers``.
        """

    @abstractmethod
    def add(self, offers: Sequence[Offer], slots: Sequence[Slots]) -> None:
        """The leading chunks of each offer got the slots beside it; the others were not stored, for good."""

    @abstractmethod
    def drop(self, slots: Slots) -> None:
        """These chunks are gone for reasons of their own: a failed store, a corrupt chunk."""

    @abstractmethod
    def clear(self) -> None:
        """Every chunk is gone. What was learned of the traffic may be kept."""

    @abstractmethod
    def check(self, slots: Slots) -> None:
        """Verify every invariant, given the slots that are in use. Raises ``AssertionError``. For tests and idle moments."""


class OneByOnePolicy(ReplacementPolicy):
    """A policy that weighs one offer after the other, as if the others were not there."""

    @abstractmethod
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        """``make_room`` for one offer, of which at least one slot is missing.

        Where several offers come together, what is in front of any of them is busy; where one comes alone, the policy itself
        sees to it that nothing in front of it is given up.
        """

    @abstractmethod
    def add_one(self, offer: Offer, slots: Slots) -> None:
        """``add`` for one offer."""

    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:  # noqa: D102
        # One that is alone need not be kept from others.
        guarded = [offer.ancestors() for offer in offers] if len(offers) > 1 else []
        for slots in guarded:
            busy[slots] += 1
        rooms, has_idle = [], True
        for offer, num_missing in zip(offers, num_slots, strict=True):
            room = self.make_room_for(offer, num_missing, busy) if num_missing and has_idle else _NOTHING
            rooms.append(room)
            # Whoever gets less than it wants, and is not refused, has found everything else busy: so would all behind it.
            has_idle = has_idle and (room.refused or len(room.victims) >= num_missing)
        for slots in guarded:
            busy[slots] -= 1
        return rooms

    def add(self, offers: Sequence[Offer], slots: Sequence[Slots]) -> None:  # noqa: D102
        for offer, of_offer in zip(offers, slots, strict=True):
            self.add_one(offer, of_offer)
