"""The index of a shard's slots, in memory: a table of chunks with a policy, one chunk at a time. No I/O in here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cargohold.cache.chunk_table import NO_SLOT, READY, ChunkTable
from cargohold.cache.policies import ReplacementPolicy
from cargohold.offload.manager.base import OffloadKey


class SlotIndex:
    """Slots of one shard. Not thread-safe: its owner holds a lock.

    Args:
        capacity: maximum number of slots; at first there are none.
        policy: makes the policy that decides what is evicted, for a table.
    """

    def __init__(self, capacity: int, policy: Callable[[ChunkTable], ReplacementPolicy]) -> None:
        self.capacity = capacity
        self._table = ChunkTable(capacity, num_slots=0)
        self._policy = policy(self._table)

    @property
    def num_slots(self) -> int:
        """Number of slots that there are."""
        return self._table.num_slots

    @property
    def num_ready(self) -> int:
        """Number of chunks that can be loaded."""
        return self._table.num_ready

    @property
    def has_free(self) -> bool:
        """Whether a chunk can be stored without evicting another."""
        return self._table.num_free > 0

    def add_slots(self, count: int) -> None:
        """Add ``count`` free slots. Low ones are used first."""
        self._table.add_slots(count)

    def contains(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded."""
        slot = self._table.find(key)
        return slot != NO_SLOT and self._table.states[slot] == READY

    def is_known(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded, or is being written."""
        return self._table.find(key) != NO_SLOT

    def reserve(self, key: OffloadKey, parent: OffloadKey | None) -> int | None:
        """Reserve a slot to write a chunk to, by evicting another chunk if need be.

        Returns ``None`` if all other chunks are busy or worth more.
        """
        table, before, keys = self._table, self._table.find(parent), [key]
        assert not self.is_known(key)
        if not table.num_free:
            around = [] if before == NO_SLOT else [before]
            table.pin(around)
            self._policy.make_room(keys, before, 1)
            table.unpin(around)
            table.evicted.clear()
        if not table.num_free:
            return None
        slots = table.take(1)
        table.place(keys, slots, before)
        self._policy.add(keys, before, slots)
        return slots[0]

    def restore(self, keys: Sequence[OffloadKey], slots: Sequence[int], parent: OffloadKey) -> None:
        """Add ready chunks, each the parent of the next, that were found in ``slots``; call ``forget_free`` for them first."""
        before = self._table.find(parent) if parent else NO_SLOT
        self._table.place(keys, slots, before)
        self._policy.add(keys, before, slots)
        self._table.publish(slots)

    def forget_free(self, used: Iterable[int]) -> None:
        """Take slots off the list of free slots, because chunks were found in them."""
        self._table.take_these(used)

    def commit(self, slot: int) -> None:
        """Make a chunk that was written ready: it can be loaded from now on."""
        self._table.publish([slot])

    def forfeit(self, slot: int) -> None:
        """Give back the slot of a chunk that was not written."""
        self._withdraw([slot])

    def pin(self, key: OffloadKey) -> int | None:
        """Pin a chunk for reading; return its slot, which keeps its contents until ``unpin``, or ``None`` if not ready."""
        if not self.contains(key):
            return None
        slot = self._table.find(key)
        self._table.pin([slot])
        return slot

    def unpin(self, slot: int) -> None:
        """Give back one pin on a slot."""
        self._table.unpin([slot])

    def discard(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Remove chunks that are ready; return their slots, which are free once nobody reads them any more."""
        slots = [self._table.find(key) for key in dict.fromkeys(keys) if self.contains(key)]
        self._withdraw(slots)
        return slots

    def is_current(self, key: OffloadKey, slot: int) -> bool:
        """Whether a pinned slot is still the one of its chunk: the chunk was not removed since."""
        return self._table.find(key) == slot

    def touch(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Tell the policy that a request uses these chunks, in prefix order; return the slots of those that are ready."""
        slots = [self._table.find(key) for key in keys if self.contains(key)]
        if slots:
            self._policy.touch(slots, is_whole=False)
        return slots

    def check(self) -> None:
        """Verify that no slot is lost. Raises ``AssertionError``."""
        self._table.check()
        self._policy.check()

    def _withdraw(self, slots: Sequence[int]) -> None:
        self._policy.drop(slots)
        self._table.remove(slots)
