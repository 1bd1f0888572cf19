"""The policy port: decides which chunks of one tier stay, and which are evicted to make room for others.

A policy knows keys, slots and order; nothing of engines, tensors, groups, handles or bytes. It asks no clock: its time is the
sequence of calls, so the same calls always lead to the same choice.

A chunk is worth nothing when the chunk before it is gone, because a prefix is only usable up to its first hole. Two rules avoid
holes, and every policy here follows them:

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
"""Slots of a tier, as an array of integers (``intp``); each use says in what order."""

BusyCounts: TypeAlias = npt.NDArray[np.int32]
"""Per slot, the number of reasons not to evict its chunk now: it is being written, read, or before chunks on offer."""

NO_SLOT: Final = -1


class Offer(NamedTuple):
    """Chunks that could be stored: absent, consecutive in one prefix.

    Attributes:
        keys: the chunks, in prefix order.
        parent: slot of the chunk before the first, or ``NO_SLOT`` if that is not in the tier.
        ancestors: returns the slots of the chunks before the first, in prefix order, back to the first that is not in the
            tier; the last is ``parent``.
    """

    keys: Sequence[bytes]
    parent: int
    ancestors: Callable[[], Slots]


class Room(NamedTuple):
    """The slots that a policy gives up for an offer.

    Attributes:
        victims: slots whose chunks are evicted, in the order of eviction. An array (see ``Slots``), never a list; ``NO_SLOTS``
            if there are none.
        refused: if there are fewer victims than wanted, whether that is because the other chunks are worth more than those on
            offer. If false, all others are busy, and asking again later may give more.
    """

    victims: Slots
    refused: bool


NO_SLOTS: Final[Slots] = np.empty(0, dtype=np.intp)

_NOTHING: Final = Room(NO_SLOTS, refused=False)


def joined(pieces: Sequence[Slots]) -> Slots:
    """Concatenate arrays; the result may be one of them."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else NO_SLOTS


def distinct(slots: Slots) -> Slots:
    """Return each slot once, in ascending order.

    Not ``np.unique``, whose first call imports masked arrays: tens of milliseconds on the scheduler's thread.
    """
    slots = np.sort(slots)
    different: Slots = slots[np.diff(slots, prepend=NO_SLOT) != 0]
    return different


class ReplacementPolicy(ABC):
    """Decides which chunks one tier keeps.

    Attributes:
        name: the policy's name in options.
        evicts_ends_alone: whether the policy promises to evict only ends of prefixes: chunks behind which no other chunk in
            the tier was stored. Then the manager need not mark every chunk before an offer as busy.

    Args:
        capacity: number of slots of the tier.
    """

    name: ClassVar[str]
    evicts_ends_alone: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    def admit_all(self) -> None:  # noqa: B027  # most policies do so anyway
        """Refuse no chunk for its worth from now on. See ``OffloadManager.admit_all``."""

    @abstractmethod
    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        """Learn that a request uses chunks.

        Args:
            slots: slots of the request's chunks that are in the tier, in prefix order.
            is_whole: whether the last of them is the request's last chunk.
        """

    @abstractmethod
    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:
        """Choose chunks to evict for each of ``offers``, and forget them.

        No victim may be busy, or be before one of the offers in its prefix.

        Args:
            offers: chunks that want slots; each offer continues another prefix, or the same one at another chunk.
            num_slots: parallel to ``offers``: how many of each one's chunks have no slot yet. These are its last ones, because
                free slots go to its first ones. At most so many chunks are evicted for it; with 0, none.
            busy: slots whose count is not 0 must stay. May be changed during the call, but must be restored.

        Returns:
            The slots given up for each offer, parallel to ``offers``.
        """

    @abstractmethod
    def add(self, offers: Sequence[Offer], slots: Sequence[Slots]) -> None:
        """Learn that the leading chunks of each offer got the slots parallel to it; its other chunks will not be stored."""

    @abstractmethod
    def drop(self, slots: Slots) -> None:
        """Forget chunks that are gone for other reasons than eviction: a failed store, a corrupt chunk."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk. What was learned about the traffic may be kept."""

    @abstractmethod
    def check(self, slots: Slots) -> None:
        """Verify every invariant, given the slots that are in use. Raises ``AssertionError``. For tests and idle moments."""


class OneByOnePolicy(ReplacementPolicy):
    """A policy that looks at one offer after the other, independently of the others."""

    @abstractmethod
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        """Do the work of ``make_room`` for one offer, for which at least one slot is missing.

        If several offers come in one call, all chunks before any of them are busy. If one comes alone, the policy itself must
        not give up chunks before it.
        """

    @abstractmethod
    def add_one(self, offer: Offer, slots: Slots) -> None:
        """Do the work of ``add`` for one offer."""

    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:  # noqa: D102
        # An offer that comes alone need not be protected from others.
        guarded = [offer.ancestors() for offer in offers] if len(offers) > 1 else []
        for slots in guarded:
            busy[slots] += 1
        rooms, has_idle = [], True
        for offer, num_missing in zip(offers, num_slots, strict=True):
            room = self.make_room_for(offer, num_missing, busy) if num_missing and has_idle else _NOTHING
            rooms.append(room)
            # If an offer gets fewer slots than it wants and is not refused, all others are busy, for later offers, too.
            has_idle = has_idle and (room.refused or len(room.victims) >= num_missing)
        for slots in guarded:
            busy[slots] -= 1
        return rooms

    def add(self, offers: Sequence[Offer], slots: Sequence[Slots]) -> None:  # noqa: D102
        for offer, of_offer in zip(offers, slots, strict=True):
            self.add_one(offer, of_offer)
