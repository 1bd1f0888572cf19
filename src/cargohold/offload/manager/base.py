"""The manager port: which chunks a tier holds and where, and who is using them.

A manager plans; it moves no bytes, does no I/O, starts no thread and asks no clock. Everything it hands out is a handle that
must be given back exactly once. The life of a chunk::

    absent --prepare_store--> writing --commit--> ready <--> being read (n)     (prepare_load / release)
       ^                         |                  |
       +------- forfeit ---------+                  +-- evicted or removed, only when nobody reads it --> absent

Any other move is a bug of ours: it raises ``LifecycleError`` and changes nothing. At all times
free + ready + writing + leaving = capacity, and pins equal the loads that live handles stand for. *Leaving* are chunks that
were removed while somebody reads them: not found any more, their slots not free yet.

Keys come in prefix order, many at once: the scheduler's thread asks for thousands of chunks at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

OffloadKey: TypeAlias = bytes
"""Block hash of a chunk's last block, then the KV-cache group's index in four bytes, little-endian: 36 bytes."""


class CannotStore(Enum):
    """Why nothing can be stored at the moment."""

    BUSY = "busy"
    """None of the chunks found a slot, only because slots are being written or read. Offer all of them again later."""


@dataclass(frozen=True, slots=True)
class ChunksStored:
    """Chunks became ready.

    Attributes:
        keys: which, in prefix order.
    """

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class ChunksRemoved:
    """Chunks are gone.

    Attributes:
        keys: which, in the order of removal.
    """

    keys: tuple[OffloadKey, ...]


ManagerEvent: TypeAlias = ChunksStored | ChunksRemoved


class StoreOffer(NamedTuple):
    """Chunks that could be stored.

    Attributes:
        keys: consecutive chunks of one prefix.
        parent: the chunk before the first, if there is one.
    """

    keys: Sequence[OffloadKey]
    parent: OffloadKey | None = None


class StoreHandle(Protocol):
    """Slots reserved for chunks on their way into the tier.

    Attributes:
        keys: the chunks to store, in prefix order: those offered that were absent and are worth a slot.
        slots: where each goes, parallel to ``keys``.
        deferred: the chunks behind them that found no slot, only because slots are being written or read. Offer them again
            later; the last of ``keys`` is their parent. Chunks in neither are there already, or not worth a slot.
    """

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """The chunks to store."""
        ...

    @property
    def deferred(self) -> Sequence[OffloadKey]:
        """The chunks to offer again."""
        ...

    @property
    def slots(self) -> Sequence[int]:
        """Where each goes."""
        ...

    def commit(self) -> None:
        """The bytes are there: the chunks are ready from now on."""
        ...

    def forfeit(self) -> None:
        """The bytes are not there: the slots are free again."""
        ...


class LoadHandle(Protocol):
    """Chunks pinned while they are read.

    Attributes:
        keys: the chunks, in the order asked for.
        slots: where each is, parallel to ``keys``.
    """

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """The chunks."""
        ...

    @property
    def slots(self) -> Sequence[int]:
        """Where each is."""
        ...

    def release(self, bad_keys: Iterable[OffloadKey] = ()) -> None:
        """The read is over. ``bad_keys`` turned out to be corrupt: they are gone as soon as nobody else reads them, and not
        found from now on.
        """
        ...


class JoinedStores:
    """Several reservations as one. Satisfies ``StoreHandle``.

    Args:
        handles: the reservations.
        deferred: what is to be offered again, theirs included.
    """

    def __init__(self, handles: Sequence[StoreHandle], deferred: Sequence[OffloadKey]) -> None:
        self._handles = handles
        self.keys = [key for handle in handles for key in handle.keys]
        self.slots = [slot for handle in handles for slot in handle.slots]
        self.deferred = deferred

    def commit(self) -> None:
        """See ``StoreHandle.commit``."""
        for handle in self._handles:
            handle.commit()

    def forfeit(self) -> None:
        """See ``StoreHandle.forfeit``."""
        for handle in self._handles:
            handle.forfeit()


class OffloadManager(ABC):
    """One tier's chunks.

    Attributes:
        capacity: slots.
    """

    capacity: int

    def admit_all(self) -> None:  # noqa: B027  # a manager that refuses nothing has nothing to do
        """From now on every chunk is worth a slot.

        For a tier with others below it: they get only what this one takes, and give it back only through this one.
        """

    @property
    @abstractmethod
    def generation(self) -> int:
        """Changes whenever an answer of ``lookup`` may have changed: an equal generation means equal answers."""

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """One byte per key: ``cargohold.blocks.ABSENT``, ``READY`` or ``NOT_YET``. Changes nothing observable.

        A chunk that is still being written is absent: nobody waits for a copy that may fail.
        """

    @abstractmethod
    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Like ``lookup``, but ends before the first absent key."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A request uses these chunks, in prefix order, last one its last; mark those that are there as used now.

        Call it once when a request starts; again, when it ends, if it ran for long.
        """

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadHandle:
        """Pin ready chunks. Raises ``MissingChunkError`` for the first that is not ready, and then pins none."""

    @abstractmethod
    def prepare_store(self, keys: Sequence[OffloadKey], parent: OffloadKey | None = None) -> StoreHandle | CannotStore:
        """Reserve slots for those of ``keys`` that are absent and worth one, evicting others if need be.

        Each chunk offered ends in one of four places:

        * it is there or being written already: nothing to do;
        * it is in the handle's ``keys``;
        * it is in the handle's ``deferred``, or everything is and the answer is ``CannotStore.BUSY``: it found no slot, but
          others will let go of some. At most as many chunks are deferred as slots are being written or read, so a request
          longer than the tier is not offered for ever;
        * none of these: it is not worth a slot, or never will find one. Do not offer it again for this request.

        Slots go to the leading chunks: what lies behind a hole is worth nothing. Never evicts a chunk that is pinned or being
        written, nor one of ``keys``, nor one before them in their prefix, as far as each of these was there when the next was
        stored.

        Args:
            keys: consecutive chunks of one prefix.
            parent: the chunk before the first, if there is one.
        """

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:
        """``prepare_store`` for chunks of several prefixes, with one handle for all of them.

        While many requests generate, most steps complete a chunk or two of several; one call costs a fraction of one for each.

        What would be answered with ``CannotStore.BUSY`` is in the handle's ``deferred``, with what is deferred of the other
        offers. The chunks of an offer are in order in ``keys`` and ``deferred``; the offers need not be. A chunk that is in
        several offers is stored once.
        """
        handles: list[StoreHandle] = []
        deferred: list[OffloadKey] = []
        for offer in offers:
            handle = self.prepare_store(offer.keys, offer.parent)
            if isinstance(handle, CannotStore):
                deferred += offer.keys
            else:
                deferred += handle.deferred
                handles.append(handle)
        placed = {key for handle in handles for key in handle.keys}
        return JoinedStores(handles, [key for key in deferred if key not in placed])

    @abstractmethod
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget ready chunks: absent at once, their slots free as soon as nobody reads them. Unknown keys are ignored.

        Raises:
            LifecycleError: one is being written; nothing was changed.
        """

    @abstractmethod
    def reset(self) -> bool:
        """Forget everything. ``False``, and nothing forgotten, while something is being written.

        What is being read stays where it is until it is given back, and is not found any more.
        """

    @abstractmethod
    def take_events(self) -> list[ManagerEvent]:
        """What became ready and what was removed since the last call, in order; empty unless the manager records it."""

    @property
    @abstractmethod
    def num_ready(self) -> int:
        """Chunks that can be loaded."""

    @property
    @abstractmethod
    def num_writing(self) -> int:
        """Slots reserved by live store handles."""

    @property
    def num_removed(self) -> int:
        """Chunks that were there and have gone, ever since: evicted, removed or found corrupt. 0 if they are not counted."""
        return 0

    @property
    def num_leaving(self) -> int:
        """Slots of removed chunks that are still being read."""
        return 0

    @property
    @abstractmethod
    def num_pins(self) -> int:
        """Chunks pinned by live load handles, counted once per handle."""

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self.capacity - self.num_ready - self.num_writing - self.num_leaving

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``. Walks everything: for tests and idle moments."""
