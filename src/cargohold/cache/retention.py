"""Retention: what hints ask for chunks; one form, from a hint to the header on a disk.

A *level* says when a chunk is evicted. Those below ``NORMAL`` go before all others, the lowest first; those above go only when
no other chunk can be evicted, again the lowest first; ``HELD`` ones are not evicted at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, Generic, Self, TypeVar

Thing = TypeVar("Thing")
Tenant = TypeVar("Tenant")

NORMAL: Final = 50
"""The level of chunks without hints."""
HELD: Final = 101
"""The level of chunks that are not evicted; those of priorities are 0 to 100."""
NO_TENANT: Final = bytes(8)


@dataclass(frozen=True, slots=True)
class Retention:
    """What hints ask for a chunk.

    Attributes:
        level: its level: a priority from 0 to 100, or ``HELD`` for a lease.
        ends_s: when it is normal again, in seconds of the clock of its holder; in a message, from now on. A level below
            ``NORMAL`` has no end.
        tenant: 8 bytes that stand for the tenant that asks; zeros if that has no name.
    """

    level: int = NORMAL
    ends_s: float = inf
    tenant: bytes = NO_TENANT

    @property
    def until_s(self) -> float:
        """Until when the chunk is worth more than others; 0 if it is not."""
        return self.ends_s if self.level > NORMAL else 0.0

    def level_at(self, now_s: float) -> int:
        """Return the level that a chunk has at some time."""
        return self.level if now_s < self.ends_s else NORMAL

    def on_clock(self, now_s: float) -> Self:
        """Return what a message asks for, which comes at ``now_s``. Whole seconds, because headers keep no others."""
        return self if self.ends_s == inf else replace(self, ends_s=float(int(now_s + self.ends_s)))


NO_RETENTION: Final = Retention()


class Budget(Enum):
    """What a level takes from others."""

    PINNED = "pin_fraction"
    RAISED = "retain_fraction"
    LOWERED = "the number of chunks"

    @classmethod
    def of(cls, level: int) -> Budget:
        if level == HELD:
            return cls.PINNED
        return cls.RAISED if level > NORMAL else cls.LOWERED


class Budgets(Generic[Tenant]):
    """How many chunks of one tier may have levels that are not normal, over all tenants and for one tenant.

    Args:
        limits: over all tenants.
    """

    def __init__(self, limits: Mapping[Budget, int]) -> None:
        self._limits = dict(limits)
        self._used: Counter[Budget] = Counter()
        self._used_by: Counter[tuple[Budget, Tenant]] = Counter()

    def limit_of(self, tenant: Tenant, budget: Budget) -> int:
        """Return how many chunks a tenant may have: without a name all of the budget, with one half of it."""
        limit = self._limits[budget]
        return limit if tenant is None else limit - limit // 2

    def room(self, tenant: Tenant, budget: Budget) -> int:
        """Return how many more chunks a tenant may have."""
        own = self.limit_of(tenant, budget) - self._used_by[budget, tenant]
        return max(0, min(own, self._limits[budget] - self._used[budget]))

    def next_to_yield(self, tenant: Tenant, budget: Budget) -> tuple[Tenant, int]:
        """Return which tenant loses chunks so that ``tenant`` can have more, and how many at most.

        While ``tenant`` has less than an equal part of the budget, the one that has most loses what it has beyond such a part.
        Otherwise ``tenant`` loses its own.
        """
        used = {whose: number for (of, whose), number in self._used_by.items() if of is budget}
        own, num_free = used.pop(tenant, 0), self._limits[budget] - self._used[budget]
        part = self._limits[budget] // (len(used) + 1)
        if not used or own + num_free >= part:
            return tenant, own
        most = max(used, key=used.__getitem__)
        return most, min(used[most] - part, part - own - num_free)

    def take(self, tenant: Tenant, budget: Budget, num_chunks: int) -> None:
        """Count chunks of a tenant from now on; a negative number gives them back."""
        self._used[budget] += num_chunks
        self._used_by[budget, tenant] += num_chunks
        if not self._used_by[budget, tenant]:
            del self._used_by[budget, tenant]

    def num_used(self, budget: Budget) -> int:
        """Return how many chunks are counted."""
        return self._used[budget]


class Ends(Generic[Thing]):
    """When things end. A look at the first is enough, however many there are."""

    def __init__(self) -> None:
        self._ends: dict[Thing, float] = {}
        self._heap: list[tuple[float, Thing]] = []

    def set(self, thing: Thing, ends_s: float) -> None:
        """Let a thing end then, and not when it would have ended otherwise."""
        before = self._ends.get(thing, inf)
        self._ends[thing] = ends_s
        if ends_s < before:  # a later end is put into the heap when the earlier one has come
            heappush(self._heap, (ends_s, thing))
        if len(self._heap) > 2 * len(self._ends) + 64:
            self._heap = [(ends, left) for left, ends in self._ends.items()]
            heapify(self._heap)

    def forget(self, thing: Thing) -> None:
        self._ends.pop(thing, None)

    def take_ended(self, now_s: float) -> list[Thing]:
        """Return what has ended by now, the earliest first, and forget it."""
        ended: list[Thing] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, thing = heappop(self._heap)
            ends_s = self._ends.get(thing, inf)
            if ends_s <= now_s:
                del self._ends[thing]
                ended.append(thing)
            elif ends_s < inf:
                heappush(self._heap, (ends_s, thing))
        return ended
