"""Which chunks of a shard hints have raised, lowered or leased, and until when.

A lease or a raised priority ends with its time; the ends are in a heap, so a store looks at the first one only. Leases cover at
most a quarter of the slots, and raised priorities half: what is beyond that counts as normal. A lowered chunk is normal again
when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.manager import OffloadKey
from cargohold.cache.policies import RunsPolicy
from cargohold.cache.shares import HELD, NORMAL, Shares
from cargohold.tiers.chunk_format import Terms

LEASED_PART: Final = 4
RAISED_PART: Final = 2


class Levels:
    """The levels of a shard's chunks that are not normal. Not thread-safe: its owner holds a lock.

    Args:
        table: the chunks.
        policy: decides among chunks of one level.

    Attributes:
        shares: the policy with levels.
    """

    def __init__(self, table: ChunkTable, policy: RunsPolicy) -> None:
        self.shares = Shares(policy)
        self._table = table
        self._levels: dict[OffloadKey, int] = {}
        # By chunk, the end of its level in seconds since 1970, if it has one; and all ends that there were, the earliest first.
        self._ends: dict[OffloadKey, int] = {}
        self._heap: list[tuple[int, OffloadKey]] = []
        self._num_leased = self._num_raised = 0

    def __len__(self) -> int:
        return len(self._levels)

    def set(self, key: OffloadKey, terms: Terms, now_s: float) -> None:
        """Give a chunk that is ready the level that follows from its terms now."""
        self.forget([key])
        level = self._level_of(terms, now_s)
        if level != NORMAL:
            self._levels[key] = level
            self._count(level, 1)
        if level > NORMAL:
            self._ends[key] = terms.lease_ends_s
            heappush(self._heap, (terms.lease_ends_s, key))
            if len(self._heap) > 2 * len(self._ends) + 64:
                self._heap = sorted((ends, key) for key, ends in self._ends.items())
        self._rank([key], level)

    def expire(self, now_s: float) -> None:
        """Make chunks normal whose time is over. To be called before others are evicted."""
        while self._heap and self._heap[0][0] <= now_s:
            ends, key = heappop(self._heap)
            if self._ends.get(key) == ends:
                self.forget([key])
                self._rank([key], NORMAL)

    def note_used(self, keys: Sequence[OffloadKey]) -> None:
        """Make lowered chunks normal that are used."""
        lowered = [key for key in keys if self._levels.get(key, NORMAL) < NORMAL]
        if lowered:
            self.forget(lowered)
            self._rank(lowered, NORMAL)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the levels of chunks, because they are gone or get others."""
        for key in keys:
            level = self._levels.pop(key, NORMAL)
            self._ends.pop(key, None)
            self._count(level, -1)

    def _level_of(self, terms: Terms, now_s: float) -> int:
        if terms.priority is not None and terms.priority < NORMAL:
            return terms.priority
        if terms.lease_ends_s <= now_s:
            return NORMAL
        if terms.priority is None:
            return HELD if self._num_leased < self._table.capacity // LEASED_PART else NORMAL
        return terms.priority if self._num_raised < self._table.capacity // RAISED_PART else NORMAL

    def _count(self, level: int, change: int) -> None:
        self._num_leased += change * (level == HELD)
        self._num_raised += change * (NORMAL < level < HELD)

    def _rank(self, keys: Iterable[OffloadKey], level: int) -> None:
        slots = [slot for key in keys if (slot := self._table.find(key)) != NO_SLOT]
        self.shares.rank(slots, level)
