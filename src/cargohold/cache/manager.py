"""The manager port: which chunks a tier holds, in which slots, and which of them are in use.

A manager plans; it moves no bytes, does no I/O, starts no thread and asks no clock. It hands out handles, each of which must
be given back exactly once. The life of a chunk::

    absent --prepare_stores-> writing --commit--> ready <--> being read (n)     (prepare_load / release)
       ^                         |                  |
       +------- forfeit ---------+                  +-- evicted or removed, only when no load reads it --> absent

Any other move is a bug of ours: it raises ``LifecycleError`` and changes nothing. At all times
free + ready + writing + leaving = capacity, and the number of pins is that of the chunks in live load handles. *Leaving* are
chunks that were removed while a load reads them: they are not found any more, but their slots are not free yet.

Keys come in prefix order, many in one call, because the scheduler's thread asks for thousands of chunks at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, final

from cargohold.cache.shares import Limits
from cargohold.errors import LifecycleError
from cargohold.protocol import KVCacheGroup, KVCacheLayout, TurnEnd
from cargohold.protocol.hooks import answered, passed_on

OffloadKey: TypeAlias = bytes
"""Block hash of a chunk's last block, the KV-cache group's index in a byte, the namespace's number in three: 36 bytes.

Namespace 0 is that of the weights in the model's files. Each of the others is of weights that one process held, and no other
process knows its number."""
Slot: TypeAlias = Any
"""Where a chunk lies in a tier: the number of its slot; or a tuple of its rows, where groups' blocks differ in size (see
``rows``). Not a union, because most managers only know numbers."""


@dataclass(frozen=True, slots=True)
class ChunksStored:
    """An event: chunks became ready.

    Attributes:
        keys: the chunks; those of one prefix in order.
    """

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class ChunksRemoved:
    """An event: chunks were evicted or removed.

    Attributes:
        keys: the chunks, in the order of removal.
    """

    keys: tuple[OffloadKey, ...]


ManagerEvent: TypeAlias = ChunksStored | ChunksRemoved


@dataclass(slots=True)
class StoreOffer:
    """Chunks that could be stored.

    Attributes:
        keys: consecutive chunks of one prefix.
        parent: the chunk before the first; ``None`` if there is none or it is not known.
        tenant: whose chunks they will be, for quotas; ``None`` if that is not known.
        level: the level that a hint gives them (see ``rank``): above 50, they are stored even if the policy would refuse them.
    """

    keys: Sequence[OffloadKey]
    parent: OffloadKey | None = None
    tenant: str | None = None
    level: int = 50


class _Handle:
    """Chunks in slots, and the moves of the handle so far, for errors."""

    __slots__ = ("_end", "_history", "keys", "places", "slots")
    _begun_with: ClassVar[str]

    def __init__(self, keys: Sequence[OffloadKey], slots: Sequence[int], end: Callable[..., None]) -> None:
        self.keys = keys
        self.places: Sequence[int] = slots  # in its manager's own table
        self.slots: Sequence[Slot] = slots
        self._end = end
        self._history: tuple[str, ...] = (self._begun_with,)

    def _move(self, move: str) -> None:
        """Note a move that ends this handle's life. Raises ``LifecycleError`` if it has ended already."""
        if len(self._history) > 1:
            subject = f"handle of {len(self.keys)} chunk(s)" + (f" from {self.keys[0].hex()} on" if self.keys else "")
            raise LifecycleError(subject, "given back", move, self._history)
        self._history = (*self._history, move)


class SlotReservation(_Handle):
    """Slots reserved for chunks on their way into the tier. It is given back exactly once.

    Args:
        keys: the chunks to store, in order within each prefix: those on offer that were absent and are worth a slot.
        slots: the slot of each, parallel to ``keys``.
        end: called once, when the handle is given back, with the handle and whether the chunks were written.
        deferred: chunks without a slot, only because other slots are being written or read. Offer them again later. Chunks
            in neither list are there already, or not worth a slot.
    """

    __slots__ = ("deferred",)
    _begun_with = "prepare_stores"

    def __init__(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        end: Callable[[SlotReservation, bool], None],
        deferred: Sequence[OffloadKey] = (),
    ) -> None:
        super().__init__(keys, slots, end)
        self.deferred = deferred

    def commit(self) -> None:
        """Give the handle back after the bytes were written: the chunks are ready from now on."""
        self._move("commit")
        self._end(self, True)

    def forfeit(self) -> None:
        """Give the handle back without the bytes written: the slots are free again."""
        self._move("forfeit")
        self._end(self, False)


class ChunkPins(_Handle):
    """Chunks pinned while they are read. It is given back exactly once.

    Args:
        keys: the chunks, in the order asked for.
        slots: the slot of each, parallel to ``keys``.
        end: called once, when the handle is given back, with the handle and the corrupt chunks.
    """

    __slots__ = ()
    _begun_with = "prepare_load"

    def release(self, bad_keys: Iterable[OffloadKey] = ()) -> None:
        """Give the handle back after the read.

        Chunks in ``bad_keys`` turned out to be corrupt: they are not found from now on, and their slots are free as soon as no
        other load reads them.
        """
        bad = list(dict.fromkeys(bad_keys))
        known = set(self.keys) if bad else ()
        for key in bad:
            if key not in known:
                raise LifecycleError(f"chunk {key.hex()}", "not pinned by this handle", "report as bad", self._history)
        self._move("release")
        self._end(self, bad)


class OffloadManager(ABC):
    """Manages the chunks of one tier.

    Attributes:
        capacity: number of slots; where chunks differ in size, of chunks of the largest group, and more fit of others.
    """

    capacity: int

    def admit_all(self) -> None:  # noqa: B027  # a manager that refuses nothing has nothing to do
        """Treat every chunk as worth a slot from now on.

        For a tier with lower tiers: they get only chunks that this tier takes, and give them back only through it.
        """

    @property
    def takes_hints(self) -> bool:
        """Whether ``rank`` does anything: not if the policy is one that keeps its own order of eviction."""
        return False

    def rank(self, keys: Sequence[OffloadKey], level: int, tenant: str | None = None) -> int:
        """Say when chunks are evicted, from now until they are ranked again or leave the tier.

        Args:
            keys: the chunks; those that are not ready are left alone.
            level: a priority from 0, evicted first, to 100, evicted last; 101 (``HELD``) means never. With 50, which is normal,
                what was said before is void; for all others, chunks of other tenants with a quota are left alone.
            tenant: the sender.

        Returns:
            How many of them are ready and were ranked.
        """
        return 0

    def others(self, keys: Sequence[OffloadKey], tenant: str | None) -> list[OffloadKey]:
        """Return those of the chunks in the tier that count for another tenant than this one, so that it cannot rank them."""
        return []

    @property
    def quotas(self) -> Mapping[str, Limits]:
        """The limits of tenants that have some, by tenant."""
        return {}

    # --- the device pool as a part of the cache; see ``rows.PooledTable``

    def pool_with_device(self, num_chunks: int, may_take: Callable[[Sequence[OffloadKey]], Sequence[bool]]) -> bool:
        """Make a device pool of so many chunks part of the cache, before any chunk is there. Return whether it is now.

        Then chunks that only the device holds can be listed. When slots are needed, those of chunks that the device holds too
        are taken first, beginning with the ones used last on the device, as far as ``may_take`` says so of them.
        """
        return False

    @property
    def num_listed(self) -> int:
        """Number of chunks that are listed without a slot, because the device holds them."""
        return 0

    def listed(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of the chunks that are listed without a slot."""
        return ()

    def num_known(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading chunks are there, being written or listed."""
        return len(self.lookup_run(keys))

    def list_on_device(self, offers: Sequence[StoreOffer]) -> bool:
        """List the absent chunks of these: the device has computed them, and they need no slot as long as it holds them.

        Returns whether some are not absent.
        """
        return False

    def note_copies(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027  # nothing is listed by default
        """Note that the device holds these chunks now, besides this tier."""

    def prepare_saves(self, keys: Sequence[OffloadKey], *, at_any_cost: bool = False) -> SlotReservation:
        """Reserve slots for listed chunks that the device is about to lose, or has just lost: for those that are worth one.

        Args:
            keys: the chunks, in the order in which the device loses them.
            at_any_cost: whether all are worth one.
        """
        return self.prepare_stores(())

    def parents(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, OffloadKey | None]:
        """Return the chunk before each of these in its prefix; ``None`` where there is none, or it is not known."""
        return dict.fromkeys(keys)

    def continuations(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that continue one of these, or another that does, as far as that is known. It may take long."""
        return []

    def note_lost(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027  # nothing is listed by default
        """Note that the device holds these chunks no more. Those without a slot are gone."""

    def usage(self) -> Mapping[str, int]:
        """Return the number of slots that each tenant with a quota uses, and ``others``; empty if there are no quotas."""
        return {}

    @property
    @abstractmethod
    def generation(self) -> int:
        """A number that changes whenever an answer of ``lookup`` may have changed: equal numbers mean equal answers."""

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return one byte per key: ``cargohold.blocks.ABSENT``, ``READY`` or ``NOT_YET``. Changes nothing observable.

        A chunk that is still being written is absent: no request waits for a copy that may fail.
        """

    @abstractmethod
    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Like ``lookup``, but ends before the first absent key."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> int:
        """Mark chunks that a request uses as used now, and return how many leading ones are ready. Absent ones are ignored.

        ``keys`` are in prefix order, and the last is the request's last chunk. Called once for each time that a request is
        admitted, and never by a look-up, which may be repeated any number of times.
        """

    def renew(self, ends: Iterable[OffloadKey]) -> None:  # noqa: B027  # it saves chunks that are wanted soon
        """Keep the prefixes that end with these chunks from being evicted soon: a request waits for them.

        That is no use of its own. A chunk costs no more if its prefix is long, so this may be called in every step.
        """

    def end_turn(self, keys: Sequence[OffloadKey], end: TurnEnd) -> None:  # noqa: B027  # it helps to choose victims
        """Note that the request that uses these chunks has ended, and how: what becomes of them depends on that.

        ``keys`` are in prefix order, those of its answer included.
        """

    def drop(self, keys: Sequence[OffloadKey], tenant: str | None = None) -> int:
        """Evict chunks of one prefix that are no longer wanted, from the last on; return how many.

        Stays what is in use, what another chunk continues that stays, and with quotas what is another tenant's.
        """
        return 0

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey]) -> ChunkPins:
        """Pin ready chunks. Raises ``MissingChunkError`` for the first that is not ready, and then pins none."""

    @abstractmethod
    def prepare_stores(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        """Reserve slots for those chunks on offer that are absent and worth one, evicting other chunks if need be.

        Takes many offers, because while many requests generate, most steps complete a chunk of several of them: one call costs
        a fraction of one call per request.

        For each chunk on offer, one of four things holds afterwards:

        * it is there or being written already: nothing to do;
        * it is in the handle's ``keys``;
        * it is in the handle's ``deferred``: there was no slot, but slots that are being written or read will become free. Of
          an offer no more chunks are deferred than there are such slots: a request longer than the tier is not offered for
          ever;
        * none of these: it is not worth a slot, or will never find one. Do not offer it again for this request.

        Slots go to the leading chunks of each offer, because chunks after a hole are worth nothing. In ``keys`` and
        ``deferred`` the chunks of an offer are in order; the offers need not be. A chunk in several offers is stored once.

        Never evicts a chunk that is pinned, being written or on offer. Nor does it evict chunks before those on offer in their
        prefix, as far back as each chunk was there when the next one was stored.
        """

    @final
    def prepare_store(self, keys: Sequence[OffloadKey], parent: OffloadKey | None = None) -> SlotReservation:
        """Call ``prepare_stores`` with one offer."""
        return self.prepare_stores((StoreOffer(keys, parent),))

    @abstractmethod
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Remove ready chunks: they are absent at once, and their slots free as soon as no load reads them.

        Unknown keys are ignored.

        Raises:
            LifecycleError: one is being written; nothing was changed.
        """

    @abstractmethod
    def reset(self) -> bool:
        """Remove all chunks. Return ``False``, and remove none, while a chunk is being written.

        Chunks that are being read keep their slots until they are released, but are not found any more.
        """

    @abstractmethod
    def take_events(self) -> list[ManagerEvent]:
        """Return the events since the last call, in order; empty unless the manager records events."""

    @property
    @abstractmethod
    def num_ready(self) -> int:
        """Number of chunks that can be loaded."""

    @property
    @abstractmethod
    def num_writing(self) -> int:
        """Number of slots reserved by live store handles."""

    @property
    def num_removed(self) -> Mapping[str, int]:
        """Numbers of chunks that have gone since the start, by reason: evicted, damaged or reset. Empty if not counted."""
        return {}

    @property
    def num_leaving(self) -> int:
        """Number of slots of removed chunks that are still being read."""
        return 0

    @property
    @abstractmethod
    def num_pins(self) -> int:
        """Number of chunks pinned by live load handles, counted once per handle."""

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self.capacity - self.num_ready - self.num_writing - self.num_leaving

    @property
    def fill(self) -> tuple[int, int]:
        """How full the tier is: the part that ready chunks take, and all of it, in units of one size."""
        return self.num_ready, self.capacity

    @property
    def num_obtainable(self) -> int:
        """Number of slots that are free, or whose chunks are unused now; or less."""
        return max(0, self.num_free + self.num_ready - self.num_pins)

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``. Walks everything: for tests and idle moments."""


# --- a manager that forwards every call to another --------------------------------------------------------------------


@answered(OffloadManager, passed_on)
class ForwardingManager(OffloadManager):
    """Passes every call on to an inner manager. Subclasses override the methods that they change.

    Args:
        inner: the manager that answers.
    """

    def __init__(self, inner: OffloadManager) -> None:
        self.inner = inner
        self.capacity = inner.capacity


NUM_NAMESPACES: Final = 1 << 24
_GROUP_AT: Final = -4


def offload_key(block_hash: bytes, group: int, namespace: int = 0) -> OffloadKey:
    """Return the key of the chunk whose last block has ``block_hash``, in KV-cache group ``group``, in a namespace."""
    return block_hash + group.to_bytes(1) + namespace.to_bytes(3)


def split_key(key: OffloadKey) -> tuple[bytes, int]:
    """Return the block hash and the group of a key."""
    return key[:_GROUP_AT], key[_GROUP_AT]


def namespace_of_key(key: OffloadKey) -> int:
    """Return the number of a key's namespace."""
    return int.from_bytes(key[_GROUP_AT + 1 :])


class ChunkKeys:
    """One request's offload keys in one KV-cache group, one per full chunk, from its start.

    Args:
        group: the group.
        blocks_per_chunk: blocks of the group that make a chunk.
        hash_block_tokens: tokens per block hash.
        namespace: number of the namespace.
    """

    def __init__(self, group: KVCacheGroup, blocks_per_chunk: int, hash_block_tokens: int, namespace: int = 0) -> None:
        self.group = group
        self.chunk_tokens = group.block_tokens * blocks_per_chunk
        self.keys: list[OffloadKey] = []
        self.hash_tokens = hash_block_tokens
        self._hashes: Sequence[bytes] = ()
        self._hashes_per_chunk = self.chunk_tokens // hash_block_tokens
        self._hashes_per_block = group.block_tokens // hash_block_tokens
        self._suffix = offload_key(b"", group.index, namespace)

    def extend(self, block_hashes: Sequence[bytes]) -> None:
        """Add the keys of chunks that became full. ``block_hashes`` are all block hashes of the request."""
        self._hashes = block_hashes
        per_chunk = self._hashes_per_chunk
        first = (len(self.keys) + 1) * per_chunk - 1
        if first < len(block_hashes):
            suffix = self._suffix
            self.keys += [block_hash + suffix for block_hash in block_hashes[first::per_chunk]]

    @property
    def num_hashed_tokens(self) -> int:
        """Number of leading tokens at whose ends there are hashes."""
        return len(self._hashes) * self.hash_tokens

    def tail(self, num_tokens: int) -> OffloadKey:
        """Return the key of the tail that ends behind so many tokens; see ``tails``. No chunk has it if none ends there."""
        at, inside = divmod(num_tokens, self.hash_tokens)
        return b"" if inside else self._hashes[at - 1] + self._suffix

    def cut(self, num_tokens: int) -> ChunkKeys:
        """Return the keys of a prefix of so many tokens, as if its tail were a whole chunk. No more can be added to them."""
        cut = copy(self)
        cut.keys = [*self.keys[: num_tokens // self.chunk_tokens], self.tail(num_tokens)]
        return cut

    def inner_hashes(self, block_hashes: Sequence[bytes], at: int) -> tuple[bytes, ...]:
        """Return the hashes of the engine blocks of chunk number ``at`` but the last, whose hash is in the chunk's key."""
        start, per_block = at * self._hashes_per_chunk, self._hashes_per_block
        return tuple(block_hashes[start + per_block - 1 : start + self._hashes_per_chunk - 1 : per_block])


def chunk_keys(layout: KVCacheLayout, blocks_per_chunk: int, namespace: int = 0) -> tuple[ChunkKeys, ...]:
    """Return keys per group, of no chunks yet."""
    groups, per_hash = layout.groups, layout.hash_block_tokens
    return tuple(ChunkKeys(group, blocks_per_chunk, per_hash, namespace) for group in groups)


class ChunkStates:
    """Presence of one group's chunks in a tier. Satisfies ``cargohold.blocks.UnitStates``."""

    def __init__(self, manager: OffloadManager, keys: ChunkKeys) -> None:
        self._manager = manager
        self._keys = keys.keys

    def run(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``, up to the first absent one."""
        return self._manager.lookup_run(self._keys[first:end])

    def window(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``."""
        return self._manager.lookup(self._keys[first:end])
