"""The table of a tier's chunks: which chunk is in which slot, what comes before it, and what keeps it there.

The life of a slot::

    FREE --place--> WRITING --publish--> READY --remove--> LEAVING --last pin given back--> FREE
      ^                |                   |
      +---- remove ----+                   +-- evict; remove, if it is not read --> FREE

Where the device pool is part of the cache (see ``pooled``), a chunk that the device holds may be listed without a place.

One list per property, by slot, so that a chunk costs no object of its own, which the garbage collector would visit. A look-up
finds the first chunk of a prefix by its hash. Chunks that were stored together mostly lie in neighbouring slots, so their keys
are then compared as a slice: 20 ns per key, where a hash look-up in a million keys costs 500 ns of cache misses.

When a ``dict`` has used up its table, by growing or by mere turnover, it copies all of it at once: 80 ms at a million keys. So
the keys of a large table are spread over 256 dicts, by their first byte; keys are digests, as good as random.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import eq
from typing import Any, Final

import numpy as np

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2
LEAVING: Final = 3
ON_DEVICE: Final = 4
NO_SLOT: Final = -1

_MAX_ONE_DICT: Final = 1 << 16
_NUM_DICTS: Final = 256
_STRETCH: Final = 128
"""Maximum number of neighbours that are compared at once: in a prefix that is scattered over the tier, more are useless."""


def spread_dicts(capacity: int) -> list[dict[bytes, Any]]:
    """Make dicts for so many keys: by the first byte of a key, the dict that it is in."""
    num_dicts = 1 if capacity <= _MAX_ONE_DICT else _NUM_DICTS
    dicts: list[dict[bytes, Any]] = [{} for _ in range(num_dicts)]
    return dicts * (_NUM_DICTS // num_dicts)


class ChunkTable:
    """The chunks of one tier. Callers make only legal moves; here they are checked by assertions at most.

    The columns are read by the manager and by policies, and changed only here, except ``pins``.

    Args:
        capacity: maximum number of slots.
        num_slots: number of slots that there are at first; by default all. See ``add_slots``.

    Attributes:
        keys: by slot, the key of its chunk, or ``None``. There is one entry more, always ``None``.
        parents: by slot, the slot of the chunk before it in its prefix; ``NO_SLOT`` if that was not there when it was stored,
            or is gone.
        children: by slot, the number of chunks in the tier whose parent it is. Only a chunk without any is evicted, so a prefix
            is lost from its end.
        pins: by slot, the number of reasons besides not to evict its chunk now: it is being written, read, or continued.
        states: by slot, its state.
        num_writing: number of slots being written.
        num_ready: number of chunks that can be loaded.
        num_leaving: number of slots of removed chunks that are still being read.
        evicted: keys of chunks evicted since their owner emptied the list.
        owners: by slot, the number of the share that its chunk belongs to; ``None`` unless owners are counted.
        used: by share, the number of its chunks; empty unless owners are counted.
    """

    def __init__(self, capacity: int, num_slots: int | None = None) -> None:
        self.capacity = capacity
        self.keys: list[bytes | None] = [None] * (capacity + 1)
        self.parents = array("i", [NO_SLOT]) * capacity
        self.children = array("i", [0]) * capacity
        self.pins = array("i", [0]) * capacity
        self.states = bytearray(capacity)
        self.num_writing = self.num_ready = self.num_leaving = 0
        self.evicted: list[bytes] = []
        self.owners: bytearray | None = None
        self.used: list[int] = []
        # Each slot's number, so that there is one object for it, and slices of neighbours need not be counted up.
        self._numbers = list(range(capacity))
        self.num_slots = 0
        self._free: list[int] = []
        self._dict_of: list[dict[bytes, int]] = spread_dicts(capacity)
        self._is_one_dict = self._dict_of[0] is self._dict_of[-1]
        self._get_of = [part.get for part in self._dict_of]
        self.add_slots(capacity if num_slots is None else num_slots)

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def find(self, key: bytes | None) -> int:
        """Return the slot of a chunk, ready or not; ``NO_SLOT`` if it is absent or ``key`` is ``None``."""
        return NO_SLOT if key is None else self._get_of[key[0]](key, NO_SLOT)

    def find_each(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the slot of each chunk, ready or not; ``None`` for absent ones. The keys need not be of one prefix."""
        if self._is_one_dict and self._dict_of[0].keys().isdisjoint(keys):
            return [None] * len(keys)  # of most new prompts, in a third of the time
        get_of = self._get_of
        return [get_of[key[0]](key) for key in keys]

    def are_absent(self, keys: Sequence[bytes]) -> bool:
        """Return whether none of the chunks is in the tier, ready or not."""
        if self._is_one_dict:
            return self._dict_of[0].keys().isdisjoint(keys)
        get_of = self._get_of
        return [get_of[key[0]](key) for key in keys].count(None) == len(keys)

    def find_run(self, keys: list[bytes]) -> list[int]:
        """Return the slots of the leading chunks that are ready."""
        found: list[int] = []
        at, get_of, column, states = 0, self._get_of, self.keys, self.states
        while at < len(keys):
            key = keys[at]
            slot = get_of[key[0]](key)
            if slot is None or states[slot] != READY:
                break
            if at + 1 == len(keys) or column[slot + 1] != keys[at + 1]:
                found.append(slot)
                at += 1
                continue
            ours = keys[at : at + _STRETCH]
            theirs = column[slot : slot + len(ours)]
            length = len(ours) if ours == theirs else [*map(eq, ours, theirs), False].index(False)
            num_ready = states.count(READY, slot, slot + length)
            if num_ready < length:
                num_ready = next(at for at in range(length) if states[slot + at] != READY)
            found += self._numbers[slot : slot + num_ready]
            at += num_ready
            if num_ready < length:
                break
        return found

    def ancestors(self, slot: int) -> list[int]:
        """Return the slots of the prefix that ends with the chunk in ``slot``, in order, back to its first absent chunk.

        If owners are counted, back to the first chunk of another owner.
        """
        path: dict[int, None] = {}
        if self.owners is not None:
            owners, owner = self.owners, self.owners[slot]
            while slot != NO_SLOT and slot not in path and owners[slot] == owner:
                path[slot] = None
                slot = self.parents[slot]
            return list(path)[::-1]
        while slot != NO_SLOT and slot not in path:  # keys that are no digests may claim to be before each other
            path[slot] = None
            slot = self.parents[slot]
        return list(path)[::-1]

    def keys_at(self, slots: Iterable[int]) -> list[bytes]:
        """Return the keys of the chunks in ``slots``, which must be in use."""
        keys = self.keys
        return [key for slot in slots if (key := keys[slot]) is not None]

    def slots_in(self, *states: int) -> list[int]:
        """Return all slots in one of these states. Walks the whole table."""
        return [slot for slot, state in enumerate(self.states[: self.num_slots]) if state in states]

    # --- moves --------------------------------------------------------------------------------------------------------

    def count_owners(self, num_owners: int) -> None:
        """Count chunks by owner from now on. There must be none yet."""
        assert not self.num_ready + self.num_writing, "owners of these chunks are not known"
        self.owners, self.used = bytearray(self.capacity), [0] * num_owners

    def add_slots(self, count: int) -> None:
        """Add ``count`` free slots after those that there are. Low ones are used first."""
        first, self.num_slots = self.num_slots, self.num_slots + count
        assert self.num_slots <= self.capacity, "more slots than the table was made for"
        self._free[:0] = self._numbers[first : self.num_slots][::-1]

    def take(self, num_slots: int) -> list[int]:
        """Return free slots to place chunks in, in ascending order, because neighbours are found and copied together."""
        if num_slots == 1:
            return [self._free.pop()]
        start = len(self._free) - num_slots
        slots = self._free[start:]
        del self._free[start:]
        slots.sort()
        return slots

    def take_these(self, slots: Iterable[int]) -> None:
        """Take certain free slots, because chunks were found in them."""
        gone = set(slots)
        self._free = [slot for slot in self._free if slot not in gone]

    def place(self, keys: Sequence[bytes], slots: Sequence[int], parent: int, owner: int = 0) -> None:
        """Put absent chunks, each the parent of the next, into taken slots; they are being written now, and pinned by that."""
        if self.owners is not None:
            self.used[owner] += len(slots)
            for slot in slots:
                self.owners[slot] = owner
        column, parents, children = self.keys, self.parents, self.children
        pins, states, dict_of = self.pins, self.states, self._dict_of
        before = parent
        for key, slot in zip(keys, slots, strict=True):
            dict_of[key[0]][key] = slot
            column[slot] = key
            parents[slot] = before
            children[slot] = 1
            pins[slot] = 1
            states[slot] = WRITING
            before = slot
        children[before] = 0
        if parent != NO_SLOT:
            children[parent] += 1
        self.num_writing += len(slots)

    def publish(self, slots: Sequence[int]) -> None:
        """Make written chunks ready, and give back the writer's pins."""
        pins, states = self.pins, self.states
        for slot in slots:
            states[slot] = READY
            pins[slot] = 0
        self.num_writing -= len(slots)
        self.num_ready += len(slots)

    def pin(self, slots: Iterable[int]) -> None:
        """Take a pin on each slot; two on a slot given twice."""
        pins = self.pins
        for slot in slots:
            pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Give back a pin on each slot; leaving slots without pins become free."""
        pins = self.pins
        for slot in slots:
            pins[slot] -= 1
        if self.num_leaving:
            for slot in slots:
                if self.states[slot] == LEAVING and not pins[slot]:
                    self.num_leaving -= 1
                    self._free_again(slot)

    def evict(self, slot: int) -> None:
        """Take a ready chunk without children and pins out of the tier; its slot is free."""
        victims, _ = self.evict_end([slot], 1)
        assert victims, "an evicted chunk is absent or in use"

    def evict_end(self, slots: list[int], num_chunks: int) -> tuple[list[int], list[int]]:
        """Evict at most ``num_chunks`` ready chunks from the end of a list, up to the first with children or pins.

        Mutates ``slots``: evicted ones are taken off.

        Returns:
            The evicted ones, the last one first; and the slots of other chunks than the next in ``slots`` that have no
            children any more.
        """
        children, pins, parents = self.children, self.pins, self.parents
        exposed: list[int] = []
        at, end = len(slots), max(0, len(slots) - num_chunks)
        parent = NO_SLOT
        while at > end:
            last = slots[at - 1]
            if children[last] or pins[last]:
                break
            if parent not in (last, NO_SLOT) and not children[parent]:
                exposed.append(parent)
            at, parent = at - 1, parents[last]
            if parent != NO_SLOT:
                children[parent] -= 1
        victims = slots[at:]
        if parent != NO_SLOT and not children[parent]:
            exposed.append(parent)
        del slots[at:]
        victims.reverse()
        self._erase(victims)
        self._free += victims
        self.num_ready -= len(victims)
        return victims, exposed

    def remove(self, slots: Sequence[int]) -> None:
        """Take chunks out of the tier, children or not, ready or being written. Slots that are being read are leaving.

        Children that stay have no parent from now on.
        """
        for slot in slots:
            key, parent = self.keys[slot], self.parents[slot]
            assert key is not None
            del self._dict_of[key[0]][key]
            self.keys[slot] = None
            if parent != NO_SLOT:
                self.children[parent] -= 1
                self.parents[slot] = NO_SLOT
        self._abandon([slot for slot in slots if self.children[slot] > (self.states[slot] == ON_DEVICE)])
        for slot in reversed(slots):  # so that the first one is used again first
            self.children[slot] = 0
            if self.owners is not None and self.states[slot] != ON_DEVICE:
                self.used[self.owners[slot]] -= 1
            if self.states[slot] == WRITING:
                self.num_writing -= 1
                self.pins[slot] -= 1
            elif self.states[slot] == READY:
                self.num_ready -= 1
            if self.pins[slot]:
                self.states[slot] = LEAVING
                self.num_leaving += 1
            else:
                self._free_again(slot)

    def clear(self) -> None:
        """Take all chunks, which are ready, out of the tier. Slots that are being read are leaving."""
        listed, ready = self.slots_in(ON_DEVICE), self.slots_in(READY)
        for part in self._dict_of:
            part.clear()
        self.keys = [None] * len(self.keys)
        self.parents = array("i", [NO_SLOT]) * self.capacity
        self.children = array("i", [0]) * self.capacity
        self.used = [0] * len(self.used)
        for slot in listed:
            self._free_again(slot)
        for slot in ready:
            if self.pins[slot]:
                self.states[slot] = LEAVING
                self.num_leaving += 1
            else:
                self._free_again(slot)
        self.num_ready = 0

    def check(self) -> None:
        """Verify that every slot is accounted for once. Raises ``AssertionError``. Walks everything."""
        counts = [len(self.slots_in(state)) for state in (FREE, WRITING, READY, LEAVING)]
        expected = [counts[FREE], self.num_writing, self.num_ready, self.num_leaving]
        assert counts == expected, f"{counts} slots are free, written, ready and leaving, by count {expected}"
        assert sorted(self._free) == self.slots_in(FREE), "the free slots are not free"
        used = self.slots_in(WRITING, READY, ON_DEVICE)
        parts = self._dict_of[:1] if self._is_one_dict else self._dict_of
        found = {key: slot for part in parts for key, slot in part.items()}
        assert found == {self.keys[slot]: slot for slot in used}, "keys and slots do not match"
        assert {slot for slot, key in enumerate(self.keys) if key is not None} == set(used), "a free slot has a key"
        children = [int(state == ON_DEVICE) for state in self.states]  # the device counts as one that goes on
        for slot in used:
            if self.parents[slot] != NO_SLOT:
                children[self.parents[slot]] += 1
        assert all(children[slot] == self.children[slot] for slot in used), "children are counted wrongly"
        assert sum(children) == sum(children[slot] for slot in used), "a parent is not in the tier"
        if self.owners is not None:
            placed = self.slots_in(WRITING, READY)
            owned = [sum(self.owners[slot] == owner for slot in placed) for owner in range(len(self.used))]
            assert owned == self.used, "chunks are counted wrongly by owner"
        assert min(self.pins, default=0) >= 0, "a pin was given back that was not taken"
        assert not any(self.pins[slot] for slot in self.slots_in(FREE)), "a free slot is pinned"
        assert all(self.pins[slot] for slot in self.slots_in(WRITING, LEAVING)), (
            "nobody uses a slot that should be free"
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _erase(self, slots: list[int]) -> None:
        """Take ready chunks, the last one of a prefix first, out of all columns."""
        column, states, evicted, dict_of = self.keys, self.states, self.evicted, self._dict_of
        for slot in slots:
            key = column[slot]
            assert key is not None
            del dict_of[key[0]][key]
            evicted.append(key)
            column[slot] = None
            states[slot] = FREE
        if self.owners is not None:
            for slot in slots:
                self.used[self.owners[slot]] -= 1

    def _free_again(self, slot: int) -> None:
        self.states[slot] = FREE
        self._free.append(slot)

    def _abandon(self, parents: Sequence[int]) -> None:
        """Make the children of chunks have no parent. Rare, so there is no list of them: all slots are looked through."""
        if parents:
            is_abandoned = np.zeros(self.capacity + 1, dtype=np.bool_)  # the last one stands for ``NO_SLOT``
            is_abandoned[list(parents)] = True
            for slot in is_abandoned[np.frombuffer(self.parents, dtype=np.intc)].nonzero()[0].tolist():
                self.parents[slot] = NO_SLOT
