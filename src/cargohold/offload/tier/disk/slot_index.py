"""The index of a shard's slots, in memory: which chunk is in which slot, and in what state. No I/O in here.

::

    free --reserve--> writing --commit--> ready --discard, eviction--> free   (when the last reader has unpinned it)
      ^                  |
      +---- forfeit -----+
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.policy import Offer, ReplacementPolicy
from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Slots


class SlotIndex:
    """Slots of one shard. Not thread-safe: its owner holds a lock.

    Args:
        capacity: maximum number of slots; at first there are none.
        policy: decides what is evicted; made for the same capacity.
    """

    def __init__(self, capacity: int, policy: ReplacementPolicy) -> None:
        self.capacity = capacity
        self._policy = policy
        self._slot_of: dict[OffloadKey, int] = {}
        self._key_at: list[OffloadKey] = []
        self._parent_at: list[OffloadKey] = []
        self._busy: BusyCounts = np.zeros(capacity, dtype=np.int32)
        self._writing: set[int] = set()
        self._leaving: set[int] = set()
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        """Number of slots that there are."""
        return len(self._key_at)

    @property
    def num_ready(self) -> int:
        """Number of chunks that can be loaded."""
        return len(self._slot_of) - len(self._writing)

    @property
    def has_free(self) -> bool:
        """Whether a chunk can be stored without evicting another."""
        return bool(self._free)

    def add_slots(self, count: int) -> None:
        """Add ``count`` free slots. Low ones are used first."""
        first = self.num_slots
        assert first + count <= self.capacity
        self._key_at += [b""] * count
        self._parent_at += [b""] * count
        self._free[:0] = range(first + count - 1, first - 1, -1)

    def contains(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded."""
        slot = self._slot_of.get(key)
        return slot is not None and slot not in self._writing

    def is_known(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded, or is being written."""
        return key in self._slot_of

    def reserve(self, key: OffloadKey, parent: OffloadKey | None) -> int | None:
        """Reserve a slot to write a chunk to, by evicting another chunk if need be.

        Returns ``None`` if all other chunks are busy or worth more.
        """
        assert key not in self._slot_of
        offer = self._offer([key], parent)
        if not self._free:
            self._evict(offer)
        if not self._free:
            return None
        slot = self._free.pop()
        self._policy.add([offer], [np.array([slot], dtype=np.intp)])
        self._place(key, parent, slot)
        self._busy[slot] = 1
        self._writing.add(slot)
        return slot

    def restore(self, keys: Sequence[OffloadKey], slots: Sequence[int], parent: OffloadKey) -> None:
        """Add ready chunks, each the parent of the next, that were found in ``slots``; call ``forget_free`` for them first."""
        self._policy.add([self._offer(keys, parent)], [np.array(slots, dtype=np.intp)])
        for key, slot in zip(keys, slots, strict=True):
            self._place(key, parent, slot)
            parent = key

    def forget_free(self, used: Iterable[int]) -> None:
        """Take slots off the list of free slots, because chunks were found in them."""
        gone = set(used)
        self._free = [slot for slot in self._free if slot not in gone]

    def commit(self, slot: int) -> None:
        """Make a chunk that was written ready: it can be loaded from now on."""
        self._writing.remove(slot)
        self._let_go(slot)

    def forfeit(self, slot: int) -> None:
        """Give back the slot of a chunk that was not written."""
        self._writing.remove(slot)
        self._withdraw(slot)
        self._let_go(slot)

    def pin(self, key: OffloadKey) -> int | None:
        """Pin a chunk for reading; return its slot, which keeps its contents until ``unpin``, or ``None`` if not ready."""
        if not self.contains(key):
            return None
        slot = self._slot_of[key]
        self._busy[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Give back one pin on a slot."""
        self._let_go(slot)

    def discard(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Remove chunks that are ready; return their slots, which are free once nobody reads them any more."""
        slots = [self._slot_of[key] for key in dict.fromkeys(keys) if self.contains(key)]
        for slot in slots:
            self._withdraw(slot)
            if not self._busy[slot]:
                self._leaving.remove(slot)
                self._free.append(slot)
        return slots

    def is_current(self, key: OffloadKey, slot: int) -> bool:
        """Whether a pinned slot is still the one of its chunk: the chunk was not removed since."""
        return self._slot_of.get(key) == slot

    def touch(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Tell the policy that a request uses these chunks, in prefix order; return the slots of those that are ready."""
        slots = [self._slot_of[key] for key in keys if self.contains(key)]
        if slots:
            self._policy.touch(np.array(slots, dtype=np.intp), is_whole=False)
        return slots

    def check(self) -> None:
        """Verify that no slot is lost. Raises ``AssertionError``."""
        used = set(self._slot_of.values())
        free = set(self._free)
        assert len(free) == len(self._free) and len(used) == len(self._slot_of), "a slot is there twice"
        assert not used & free and not self._leaving & free and not self._leaving & used, "in two states"
        assert len(used) + len(free) + len(self._leaving) == self.num_slots, "a slot is lost"
        assert self._writing <= used
        assert all(self._key_at[slot] == key for key, slot in self._slot_of.items())
        self._policy.check(np.array(sorted(used), dtype=np.intp))

    def _offer(self, keys: Sequence[OffloadKey], parent: OffloadKey | None) -> Offer:
        slot = NO_SLOT if parent is None else self._slot_of.get(parent, NO_SLOT)
        return Offer(keys, slot, lambda: self._ancestors(slot))

    def _ancestors(self, slot: int) -> Slots:
        chain: dict[int, None] = {}
        while slot != NO_SLOT and slot not in chain:  # a forged header may name its own descendant as its parent
            chain[slot] = None
            slot = self._slot_of.get(self._parent_at[slot], NO_SLOT)
        return np.array(list(chain)[::-1], dtype=np.intp)

    def _evict(self, offer: Offer) -> None:
        if offer.parent != NO_SLOT:
            self._busy[offer.parent] += 1
        (room,) = self._policy.make_room([offer], [1], self._busy)
        if offer.parent != NO_SLOT:
            self._busy[offer.parent] -= 1
        for slot in room.victims.tolist():
            del self._slot_of[self._key_at[slot]]
            self._free.append(slot)

    def _place(self, key: OffloadKey, parent: OffloadKey | None, slot: int) -> None:
        self._slot_of[key] = slot
        self._key_at[slot] = key
        self._parent_at[slot] = parent or b""

    def _withdraw(self, slot: int) -> None:
        self._policy.drop(np.array([slot], dtype=np.intp))
        del self._slot_of[self._key_at[slot]]
        self._leaving.add(slot)

    def _let_go(self, slot: int) -> None:
        self._busy[slot] -= 1
        if slot in self._leaving and not self._busy[slot]:
            self._leaving.remove(slot)
            self._free.append(slot)
