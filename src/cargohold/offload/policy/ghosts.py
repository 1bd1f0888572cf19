"""The ghosts of ARC: keys of evicted chunks, in two lists, each in the order of eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cargohold.offload.policy.base import Slots
from cargohold.offload.policy.key_map import KeyMap
from cargohold.offload.policy.oldest_first import NO_STAMP, OldestFirst
from cargohold.offload.policy.stamps import new_stamps

_SECOND: Final = 1 << 62


class Ghosts:
    """At most ``capacity`` keys, each in one of two lists.

    Keys are in rows of arrays, as chunks are in slots, and each list is a range of stamps.

    Attributes:
        sizes: number of keys in each list.
    """

    def __init__(self, capacity: int) -> None:
        self.sizes = [0, 0]
        self._capacity = capacity
        self._rows = KeyMap(capacity)
        self._keys = np.full(capacity, None, dtype=object)
        self._stamps = new_stamps(capacity)
        self._lists = (OldestFirst(self._stamps, 0, _SECOND), OldestFirst(self._stamps, _SECOND, NO_STAMP))
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.intp)
        self._now = 0

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the list that each key is in, 0 or 1; ``None`` if in neither."""
        rows = self._rows.get_many(keys)
        if rows.count(None) == len(rows):
            return rows
        return [None if row is None else int(self._stamps[row] >= _SECOND) for row in rows]

    def remember(self, keys: Sequence[bytes], which: int) -> None:
        """Append keys, which must be in neither list, at the young end of a list; the oldest keys are dropped for them.

        The last of ``keys`` is the youngest. If they are more than fit, only the last ones are remembered.
        """
        keys = keys[-self._capacity :]
        num_free = self._capacity - sum(self.sizes)
        for other in (which, 1 - which):
            num_free += self.drop_oldest(other, len(keys) - num_free)
        rows = self._free[num_free - len(keys) : num_free].copy()
        self._rows.add(keys, rows.tolist())
        self._keys[rows] = keys
        self._now += len(keys)
        stamps = np.arange(self._now - 1, self._now - 1 - len(keys), -1) + which * _SECOND
        # The last key is the youngest.
        rows = rows[::-1]
        self._stamps[rows] = stamps
        self._lists[which].note(rows, stamps)
        self.sizes[which] += len(keys)

    def drop_oldest(self, which: int, num_keys: int) -> int:
        """Forget the oldest keys of a list, at most ``num_keys``; return how many were forgotten."""
        if num_keys <= 0 or not self.sizes[which]:
            return 0
        rows = self._lists[which].take(num_keys)
        self._free_rows(rows)
        return len(rows)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove keys from whichever list they are in."""
        self._free_rows(np.array([row for row in self._rows.get_many(keys) if row is not None], dtype=np.intp))

    def check(self) -> None:
        """Verify that sizes, rows and keys agree. Raises ``AssertionError``."""
        used = (self._stamps != NO_STAMP).nonzero()[0]
        num_second = int(np.count_nonzero(self._stamps[used] >= _SECOND))
        assert self.sizes == [len(used) - num_second, num_second], "sizes are wrong"
        assert sorted(self._rows.values()) == used.tolist(), "keys and rows do not match"
        assert sorted([*self._free[: self._capacity - len(used)].tolist(), *used.tolist()]) == list(
            range(self._capacity)
        )

    def _free_rows(self, rows: Slots) -> None:
        if not len(rows):
            return
        self._rows.remove(self._keys[rows].tolist())
        num_free = self._capacity - sum(self.sizes)
        self._free[num_free : num_free + len(rows)] = rows
        num_second = int(np.count_nonzero(self._stamps[rows] >= _SECOND))
        self.sizes[0] -= len(rows) - num_second
        self.sizes[1] -= num_second
        self._stamps[rows] = NO_STAMP
        self._keys[rows] = None
