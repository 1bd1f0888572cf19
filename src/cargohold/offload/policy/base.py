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
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.intp]
"""Slots of a tier, in an order that the context says."""

BusyCounts: TypeAlias = npt.NDArray[np.int32]
"""Per slot, how many reasons there are not to evict it now: it is being written, read, or among the chunks on offer."""

NO_SLOT: Final = -1

REFUSED: Final = -2
"""In the place of a victim: what is there is worth more."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Chunks that could be stored: absent, consecutive in one prefix.

    Attributes:
        keys: which, in prefix order.
        parent: slot of the chunk before the first, or ``NO_SLOT`` if that is not in the tier.
        ancestors: gives the slots of all chunks before the first that are in the tier, in prefix order; the last is ``parent``.
    """

    keys: Sequence[bytes]
    parent: int
    ancestors: Callable[[], Slots]


@dataclass(frozen=True, slots=True)
class Room:
    """What a policy gives up for an offer.

    Attributes:
        victims: slots that are free from now on, in the order of eviction.
        refused: there are no more victims because the rest is worth more than what is on offer. If false, there are none
            because everything else is busy, and asking again later may give more.
    """

    victims: Slots
    refused: bool


NO_SLOTS: Final[Slots] = np.empty(0, dtype=np.intp)


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

    Args:
        capacity: slots of the tier.
    """

    name: ClassVar[str]

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
    def make_room(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        """Give up at most ``num_slots`` chunks for ``offer``, none of which is busy; they are forgotten.

        Args:
            offer: what wants a slot.
            num_slots: how many slots are missing; at least 1.
            busy: which slots must stay; may be changed during the call, and is as it was afterwards.
        """

    @abstractmethod
    def add(self, offer: Offer, slots: Slots) -> None:
        """The first ``len(slots)`` chunks of ``offer`` got these slots; the others were not stored, for good."""

    def make_room_for_each(self, offers: Sequence[Offer], num_slots: int, busy: BusyCounts) -> list[int]:
        """``make_room`` for several chunks at once, each of another prefix: no chunk goes that is before one of them.

        Args:
            offers: one chunk each; their parents are busy.
            num_slots: how many slots are missing, at least 1: the last of ``offers`` have none.
            busy: as above.

        Returns:
            For each that has none the slot that was given up for it, ``REFUSED``, or ``NO_SLOT`` if everything else is busy.
        """
        held = [offer.ancestors() for offer in offers]
        for slots in held:
            busy[slots] += 1
        answers: list[int] = []
        given_up: list[int] = []
        for offer in offers[-num_slots:]:
            room = self.make_room(offer, 1, busy)
            victims = room.victims.tolist()
            answers += victims or [REFUSED if room.refused else NO_SLOT]
            given_up += victims
            busy[victims] += 1
        busy[given_up] -= 1
        for slots in held:
            busy[slots] -= 1
        return answers

    def add_each(self, offers: Sequence[Offer], slots: Slots) -> None:
        """``add`` for chunks of several prefixes: the first ``len(slots)`` got these slots, the others were not stored."""
        for at, offer in enumerate(offers):
            self.add(offer, slots[at : at + 1])

    @abstractmethod
    def drop(self, slots: Slots) -> None:
        """These chunks are gone for reasons of their own: a failed store, a corrupt chunk."""

    @abstractmethod
    def clear(self) -> None:
        """Every chunk is gone. What was learned of the traffic may be kept."""

    @abstractmethod
    def check(self, slots: Slots) -> None:
        """Verify every invariant, given the slots that are in use. Raises ``AssertionError``. For tests and idle moments."""
