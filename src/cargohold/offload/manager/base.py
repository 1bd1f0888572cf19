"""The manager port: which chunks a tier holds and where, and who is using them.

A manager plans; it moves no bytes, does no I/O, starts no thread and asks no clock. Everything it hands out is a handle that
must be given back exactly once. The life of a chunk::

    absent --prepare_stores-> writing --commit--> ready <--> being read (n)     (prepare_load / release)
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
from typing import NamedTuple, Protocol, TypeAlias, final

OffloadKey: TypeAlias = bytes
"""Block hash of a chunk's last block, then the KV-cache group's index in four bytes, little-endian: 36 bytes."""


@dataclass(frozen=True, slots=True)
class ChunksStored:
    """Chunks became ready.

    Attributes:
        keys: which; those of one prefix in order.
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
        keys: the chunks to store, those of one prefix in order: those offered that were absent and are worth a slot.
        slots: where each goes, parallel to ``keys``.
        deferred: chunks that found no slot, only because slots are being written or read. Offer them again later. Chunks in
            neither are there already, or not worth a slot.
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
    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:
        """Reserve slots for those chunks on offer that are absent and worth one, evicting others if need be.

        While many requests generate, most steps complete a chunk of several: one call costs a fraction of one for each.

        Each chunk offered ends in one of four places:

        * it is there or being written already: nothing to do;
        * it is in the handle's ``keys``;
        * it is in the handle's ``deferred``: it found no slot, but others will let go of some. Of an offer no more chunks are
          deferred than there are slots that others write or read: a request longer than the tier is not offered for ever;
        * none of these: it is not worth a slot, or never will find one. Do not offer it again for this request.

        Slots go to the leading chunks of each offer: what lies behind a hole is worth nothing. In ``keys`` and ``deferred`` the
        chunks of an offer are in order; offers need not be. A chunk that is in several offers is stored once.

        Never evicts a chunk that is pinned or being written, nor one that is offered, nor one before them in their prefix, as
        far as each of these was there when the next was stored.
        """

    @final
    def prepare_store(self, keys: Sequence[OffloadKey], parent: OffloadKey | None = None) -> StoreHandle:
        """``prepare_stores`` for one offer."""
        return self.prepare_stores((StoreOffer(keys, parent),))

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
