"""The index of a tier's chunks, which follows prefixes instead of looking up every key.

Chunks that were stored one behind the other form a *strand*: their keys in a tuple, their slots in an array. A look-up finds
the strand of its first key by hash, and then compares the strand's next keys with its own, at the speed of memory; only where
a strand ends, or the prefix branches off, another key is looked up::

    asked for   k0 k1 k2 k3 k4 k5 k6 | n7 n8
                |                    |
    strand A    k0 k1 k2 k3 k4 k5 k6   k7 k8 k9       found by the hash of k0, verified key by key
    strand B                           n7 n8 n9       found by the hash of n7

So prefix look-ups cost 20 to 30 ns per key whatever the size of the index, where a hash look-up of a million keys costs some
250 ns of cache misses. Keys are always compared in full: no digest of a digest is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np

from cargohold.offload.policy.base import NO_SLOT, Slots, joined
from cargohold.offload.policy.key_map import KeyMap

Keys = tuple[bytes, ...]

_MAX_STRAND: Final = 256
"""Maximum number of chunks in a strand. Positions fit in a byte, and changing a strand's end copies no more than this."""

_POSITIONS: Final = np.arange(_MAX_STRAND, dtype=np.uint8)
_SLACK: Final = 8


class Strand:
    """Chunks one behind the other in a prefix, either all being written or all ready.

    Attributes:
        length: number of its chunks.
        parent: key of the chunk before the first; ``None`` if there is none or it is not known.
        is_ready: whether the chunks can be loaded.
    """

    __slots__ = ("_keys", "_slots", "is_ready", "length", "parent")

    def __init__(self, keys: Keys, slots: Slots, parent: bytes | None, *, is_ready: bool) -> None:
        self.length = len(keys)
        self.parent = parent
        self.is_ready = is_ready
        # May be longer than ``length``: entries behind it are of chunks that are gone.
        self._keys = keys
        self._slots = slots

    @property
    def slots(self) -> Slots:
        """Slots of the chunks, in prefix order."""
        return self._slots[: self.length]

    def key(self, at: int) -> bytes:
        """Return the key of the chunk at one position."""
        return self._keys[at]

    def keys(self, first: int, end: int) -> Keys:
        """Return the keys of the chunks at positions ``[first, end)``, in prefix order."""
        return self._keys[first : min(end, self.length)]

    def extend(self, other: Strand) -> None:
        """Append the chunks of a strand that continues this one."""
        self._keys = self.keys(0, self.length) + other.keys(0, other.length)
        self._slots = np.concatenate((self.slots, other.slots))
        self.length += other.length

    def shorten(self, length: int) -> None:
        """Keep the first ``length`` chunks."""
        self.length = length
        # A copy, because a view would keep the memory of all chunks cut off. Not at every call: prefixes are evicted bit by
        # bit from their ends, and copying keys changes the reference count of each.
        if len(self._keys) > 2 * length + _SLACK:
            self._keys, self._slots = self._keys[:length], self.slots.copy()


class Run:
    """The leading keys of a look-up whose chunks are ready.

    Attributes:
        keys: all keys that were looked up.
        length: how many leading ones are ready.
    """

    def __init__(self, keys: Keys, pieces: list[Slots]) -> None:
        self.keys = keys
        self.length = sum(map(len, pieces))
        self._pieces = pieces

    @property
    def slots(self) -> Slots:
        """Slots of the ``length`` ready chunks."""
        if len(self._pieces) != 1:
            self._pieces = [joined(self._pieces)]
        return self._pieces[0]

    def first(self, keys: Keys) -> Run | None:
        """Return the run of ``keys`` if this look-up was of them, or of more keys that begin with them; else ``None``."""
        if self.keys[: len(keys)] != keys:
            return None
        return self if len(keys) == len(self.keys) else Run(keys, [self.slots[: len(keys)]])


_NO_RUN: Final = Run((), [])


class ChainIndex:
    """The chunks of one tier, by key and by slot.

    Args:
        capacity: slots of the tier.
    """

    def __init__(self, capacity: int) -> None:
        self._slots = KeyMap(capacity)
        # Object arrays, not lists: the garbage collector does not walk through them.
        self._strands = np.full(capacity, None, dtype=object)
        self._positions = np.full(capacity, 0, dtype=np.uint8)
        # The same memory: single elements are read and written three times faster this way.
        self._position_of = self._positions.data
        self._last_run = _NO_RUN

    def __len__(self) -> int:
        return len(self._slots)

    # --- questions ----------------------------------------------------------------------------------------------------

    def slot_of(self, key: bytes | None) -> int:
        """Return the slot of a chunk, ready or not; ``NO_SLOT`` if it is absent or ``key`` is ``None``."""
        slot = None if key is None else self._slots.get(key)
        return NO_SLOT if slot is None else slot

    def slots_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the slot of each chunk, ready or not; ``None`` for absent ones. The keys need not be of one prefix."""
        return self._slots.get_many(keys)

    def find(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return the slots of the chunks that are there, ready or not, by their place in ``keys``. Fast if they are few."""
        return self._slots.find(keys)

    def run(self, keys: Keys) -> Run:
        """Look up the leading keys whose chunks are ready."""
        # A request is looked up, then touched, then loaded: the last answer often serves again.
        run = self._last_run.first(keys) or Run(keys, self._pieces(keys))
        if len(keys) >= len(self._last_run.keys):
            self._last_run = run
        return run

    def ancestors(self, slot: int) -> Slots:
        """Return the slots of the prefix that ends with the chunk in ``slot``, in order, back to its first absent chunk."""
        pieces: dict[int, Slots] = {}
        while slot != NO_SLOT:
            strand: Strand = self._strands[slot]
            if id(strand) in pieces:
                break  # keys that are not digests of prefixes may claim anything of each other
            pieces[id(strand)] = strand.slots[: int(self._positions[slot]) + 1]
            slot = self.slot_of(strand.parent)
        return joined(list(pieces.values())[::-1])

    def keys_at(self, slots: Slots) -> list[bytes]:
        """Return the keys of the chunks in ``slots``, which must be in use."""
        positions = self._positions[slots].tolist()
        return [strand.key(at) for strand, at in zip(self._strands[slots].tolist(), positions, strict=True)]

    def strands(self) -> Iterator[Strand]:
        """Iterate over every strand once. Walks the whole index."""
        return iter({id(strand): strand for strand in self._strands.tolist() if strand is not None}.values())

    # --- changes ------------------------------------------------------------------------------------------------------

    def insert(self, chains: Sequence[Keys], slots: Slots, parents: Sequence[bytes | None]) -> list[Strand]:
        """Add chunks that are being written. Their keys must be absent and different.

        Args:
            chains: keys, consecutive in one prefix within each chain.
            slots: their slots, of all chains in order.
            parents: the chunk before each chain, parallel to ``chains``.

        Returns:
            The new strands.
        """
        strands = []
        at = 0
        for keys, parent in zip(chains, parents, strict=True):
            for first in range(0, len(keys), _MAX_STRAND):
                part = keys[first : first + _MAX_STRAND]
                in_front = keys[first - 1] if first else parent
                strand = Strand(part, slots[at : at + len(part)], in_front, is_ready=False)
                self._place(strand, 0)
                strands.append(strand)
                at += len(part)
        self._slots.add(chains[0] if len(chains) == 1 else list(chain.from_iterable(chains)), slots.tolist())
        return strands

    def publish(self, strand: Strand) -> None:
        """Make a strand's chunks ready, and append it to the strand that it continues, if that is ready and has room.

        Another continuation there becomes a strand of its own: the newest continuation of a prefix is the likeliest to be
        looked up.
        """
        self._last_run = _NO_RUN
        strand.is_ready = True
        before = self.slot_of(strand.parent)
        if before == NO_SLOT:
            return
        head: Strand = self._strands[before]
        length = int(self._positions[before]) + 1
        if head.is_ready and length + strand.length <= _MAX_STRAND:
            self._split(head, length)
            head.extend(strand)
            self._place(head, length)

    def remove(self, slots: Slots) -> list[bytes]:
        """Remove the chunks in ``slots``; return their keys in the same order.

        Fast if the slots of a strand are together, from its end backwards: the order in which prefixes are evicted.
        """
        self._last_run = _NO_RUN
        if len(slots) == 1:
            return [self._remove_one(int(slots[0]))]
        strands: list[Strand] = self._strands[slots].tolist()
        positions: list[int] = self._positions[slots].tolist()
        removed: list[bytes] = []
        elsewhere: dict[Strand, list[int]] = {}
        while len(removed) < len(strands):
            first = len(removed)
            strand = strands[first]
            count = _num_same(strands, first)
            rest = strand.length - count
            chosen = positions[first : first + count]
            if count == 1 and chosen[0] == rest:
                removed.append(strand.key(rest))
                strand.shorten(rest)
            elif chosen == list(range(strand.length - 1, rest - 1, -1)):
                removed += strand.keys(rest, strand.length)[::-1]
                strand.shorten(rest)
            else:
                removed += map(strand.key, chosen)
                elsewhere.setdefault(strand, []).extend(chosen)
        for strand, chosen in elsewhere.items():
            self._cut(strand, chosen)
        self._slots.remove(removed)
        self._strands[slots] = None
        return removed

    def clear(self) -> None:
        """Remove all chunks."""
        self._last_run = _NO_RUN
        self._slots.clear()
        self._strands[:] = None

    def check(self) -> None:
        """Verify that keys, slots and strands agree. Raises ``AssertionError``."""
        used = {slot: strand for slot, strand in enumerate(self._strands.tolist()) if strand is not None}
        assert sorted(self._slots.values()) == sorted(used) and len(self._slots) == len(used), (
            "keys and slots do not match"
        )
        for strand in self.strands():
            keys = strand.keys(0, strand.length)
            assert 0 < len(keys) == len(strand.slots) <= _MAX_STRAND, "a strand of impossible length"
            for at, (key, slot) in enumerate(zip(keys, strand.slots.tolist(), strict=True)):
                assert self._slots.get(key) == slot and used[slot] is strand and self._positions[slot] == at, (
                    f"slot {slot}"
                )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pieces(self, keys: Keys) -> list[Slots]:
        """Return the slots of the leading keys whose chunks are ready, one array per strand."""
        pieces, at = [], 0
        while at < len(keys):
            slot = self._slots.get(keys[at])
            if slot is None:
                break
            strand: Strand = self._strands[slot]
            if not strand.is_ready:
                break
            first = int(self._positions[slot])
            ours, theirs = strand.keys(first, first + len(keys) - at), keys[at : at + strand.length - first]
            length = _common_length(ours, theirs)
            pieces.append(strand.slots[first : first + length])
            at += length
        return pieces

    def _remove_one(self, slot: int) -> bytes:
        strand: Strand = self._strands[slot]
        at = self._position_of[slot]
        key = strand.key(at)
        self._cut(strand, [at])
        self._slots.remove([key])
        self._strands[slot] = None
        return key

    def _place(self, strand: Strand, first: int) -> None:
        """Register the chunks of a strand from position ``first`` on."""
        slots = strand.slots[first:]
        if len(slots) == 1:  # while a request generates, chunks come one by one
            (slot,) = slots.tolist()
            self._strands[slot] = strand
            self._position_of[slot] = first
            return
        self._strands[slots] = strand
        self._positions[slots] = _POSITIONS[first : first + len(slots)]

    def _cut(self, strand: Strand, positions: list[int]) -> None:
        """Take chunks out of a strand; chunks behind a gap become a strand of their own."""
        start, end = min(positions), max(positions) + 1
        self._split(strand, end)
        if end - start > len(positions):
            for at in sorted(positions, reverse=True):
                strand.shorten(end)
                self._split(strand, at + 1)
                end = at
        strand.shorten(start)

    def _split(self, strand: Strand, at: int) -> None:
        """Make the chunks of a strand from position ``at`` on, if there are any, a strand of their own."""
        if at < strand.length:
            keys, slots = strand.keys(at, strand.length), strand.slots[at:].copy()
            tail = Strand(keys, slots, strand.key(at - 1), is_ready=strand.is_ready)
            strand.shorten(at)
            self._place(tail, 0)


def _num_same(strands: list[Strand], first: int) -> int:
    """Return how many entries of ``strands`` from ``first`` on are the same strand, at most its number of chunks."""
    strand = strands[first]
    if first + 1 == len(strands) or strands[first + 1] is not strand:
        return 1
    end = min(len(strands), first + strand.length)
    if strands[end - 1] is strand and strands[first:end].count(strand) == end - first:
        return end - first
    return next(at for at in range(first, end) if strands[at] is not strand) - first


def _common_length(ours: Keys, theirs: Keys) -> int:
    """Return how many leading keys are equal. Both have the same length, and at least the first keys are equal."""
    if ours == theirs:
        return len(ours)
    same, different = 1, len(ours)
    while same < different:
        middle = (same + different + 1) // 2
        if ours[same:middle] == theirs[same:middle]:
            same = middle
        else:
            different = middle - 1
    return same
