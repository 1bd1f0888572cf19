"""Grants: what hints have led to in one tier: the chunks that each covers, their budgets and their ends.

A grant gives chunks a level (see ``cargohold.cache.retention``) until its time is over. Chunks that are not there yet get it
when they come. Where grants meet on a chunk, a lease counts most, then the newest. A grant that finds its budget used up takes
chunks from older ones, except from leases. The ends are in a heap, so a step looks at the first one only, and at nothing
without hints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from math import inf
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.cache.retention import HELD, NO_RETENTION, NO_TENANT, NORMAL, Budget, Budgets, Ends, Retention
from cargohold.protocol import Clock, Hint

MAX_GRANTS: Final = 4096
"""Maximum number of grants in force; one tenant may have half of them."""


@dataclass(slots=True, eq=False)
class Grant:
    """What a hint has led to.

    Attributes:
        hint: the hint.
        tenant: the sender.
        level: the level that its chunks get.
        ends_at: when it ends.
        ttl_s: by how long a use renews it, if it is a lease.
        number: in the order of hints.
        keys: the chunks that it covers, in the tier or not.
        num_tokens: number of leading tokens whose chunks it covers.
        alone: itself: what most of its chunks have.
        is_dropping: whether its chunks are worth nothing from now on: they leave host memory as soon as nothing needs them.
        is_told: whether its end was reported.
        is_over: whether it has ended.
        told_until: until when it lasts as far as lower tiers know.
    """

    hint: Hint
    tenant: str | None
    level: int
    ends_at: float
    ttl_s: float
    number: int
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    num_tokens: int = 0
    alone: tuple[Grant, ...] = field(init=False)
    is_dropping: bool = False
    is_told: bool = False
    is_over: bool = False
    told_until: float = field(init=False)

    def __post_init__(self) -> None:
        self.alone = (self,)
        self.told_until = self.ends_at

    @property
    def is_lease(self) -> bool:
        """Whether it is a lease."""
        return self.level == HELD

    @property
    def budget(self) -> Budget:
        """What it takes from others."""
        return Budget.of(self.level)

    def __lt__(self, other: Grant) -> bool:
        return self.number < other.number


class Grants:
    """The grants in force in one tier. An iteration yields them; it is not disturbed by grants that begin or end meanwhile.

    Args:
        manager: the manager of the tier; its chunks' levels are changed.
        budgets: how many chunks grants may cover.
        clock: monotonic time in seconds.

    Attributes:
        budgets: how many chunks grants may cover.
        on_retained: called with chunks for which hints ask something else now, for lower tiers.
        on_displaced: called with a grant that newer ones have left no chunk; it must end the grant.
        coming: returns which chunks are on their way into the tier.
        in_force: the grants, by number.
        covered: by chunk, the grants that cover it, the oldest first.
    """

    def __init__(self, manager: OffloadManager, budgets: Budgets[str | None], clock: Clock) -> None:
        self._manager = manager
        self.budgets = budgets
        self._clock = clock
        self._numbers = count(1)
        self.in_force: dict[int, Grant] = {}
        self._num_of: Counter[str | None] = Counter()
        self._ends = Ends[Grant]()
        self._leases: dict[tuple[str | None, str], Grant] = {}
        self.covered: dict[OffloadKey, tuple[Grant, ...]] = {}
        self.on_retained: Callable[[Iterable[OffloadKey]], None] = lambda _: None
        self.on_displaced: Callable[[Grant], None] = lambda _: None
        self.coming: Callable[[Sequence[OffloadKey]], AbstractSet[OffloadKey]] = lambda _: frozenset()

    def __len__(self) -> int:
        return len(self.in_force)

    def __iter__(self) -> Iterator[Grant]:
        return iter(list(self.in_force.values()))

    def of(self, key: OffloadKey) -> tuple[Grant, ...]:
        """Return the grants that cover a chunk, the oldest first."""
        return self.covered.get(key, ())

    def on(self, keys: Iterable[OffloadKey]) -> list[Grant]:
        """Return the grants that cover some of these chunks, each once."""
        return list(dict.fromkeys(grant for key in keys for grant in self.of(key)))

    def lease(self, tenant: str | None, name: str | None) -> Grant | None:
        return None if name is None else self._leases.get((tenant, name))

    def level_of(self, key: OffloadKey) -> int:
        """Return the level that a chunk has, or gets when it comes."""
        grants = self.covered.get(key)
        return NORMAL if grants is None else counting(grants).level

    def retention_of(self, key: OffloadKey) -> Retention:
        """Return what lower tiers are asked for a chunk. To give back a place in host memory is nothing to them."""
        grants = [grant for grant in self.of(key) if grant.hint.to != "lower"]
        if not grants or (grant := counting(grants)).level == NORMAL:
            return NO_RETENTION
        ends_s = grant.ends_at - self._clock() if grant.level > NORMAL else inf
        return Retention(grant.level, ends_s, _digest_of(grant.tenant))

    # --- a grant's life -----------------------------------------------------------------------------------------------

    def has_room_for(self, tenant: str | None) -> bool:
        """Whether another grant of a tenant may begin. If there are too many, an older one ends, unless all are leases."""
        is_own = self._num_of[tenant] >= MAX_GRANTS // 2
        if not is_own and len(self.in_force) < MAX_GRANTS:
            return True
        oldest = next((one for one in self if not one.is_lease and (one.tenant == tenant or not is_own)), None)
        if oldest is not None:
            self.on_displaced(oldest)
        return oldest is not None

    def make(self, hint: Hint, tenant: str | None, level: int, now_s: float, ttl_s: float) -> Grant:
        """Return a grant that covers nothing and has not begun."""
        return Grant(hint, tenant, level, now_s + ttl_s, ttl_s, next(self._numbers))

    def begin(self, grant: Grant) -> None:
        """Let a grant be in force until its time is over."""
        self.in_force[grant.number] = grant
        self._num_of[grant.tenant] += 1
        self._ends.set(grant, grant.ends_at)
        if grant.hint.lease is not None:
            self._leases[grant.tenant, grant.hint.lease] = grant

    def renew(self, grant: Grant, now_s: float) -> None:
        """Let a grant last its time from now on. Lower tiers are notified when half of what they know is over."""
        grant.ends_at = now_s + grant.ttl_s
        self._ends.set(grant, grant.ends_at)
        if grant.told_until - now_s < grant.ttl_s / 2:
            grant.told_until = grant.ends_at
            self.on_retained(grant.keys)

    def end(self, grant: Grant) -> list[OffloadKey]:
        """Let a grant be in force no more. Return the chunks that it has covered."""
        grant.is_over = True
        self._ends.forget(grant)
        del self.in_force[grant.number]
        self._num_of[grant.tenant] -= 1
        if not self._num_of[grant.tenant]:
            del self._num_of[grant.tenant]
        if grant.hint.lease is not None:
            del self._leases[grant.tenant, grant.hint.lease]
        keys = list(grant.keys)
        for key in keys:
            self.uncover(grant, key)
        self.rank(keys)
        return keys

    def take_ended(self) -> list[Grant]:
        """Return the grants whose time is over. To be ended by the caller."""
        return self._ends.take_ended(self._clock())

    # --- what it covers -----------------------------------------------------------------------------------------------

    def cover(self, grant: Grant, keys: Sequence[OffloadKey], *, only_present: bool = False) -> int:
        """Let a grant cover chunks, as far as its budget goes; return how many it cannot cover.

        Chunks that are not there get the level when they come. With ``only_present``, those are left out that are not on their
        way. Chunks that count for another tenant are not covered. Older grants make room; see ``_replace`` and ``_make_room``.
        """
        others = set(self._manager.others(keys, grant.tenant))
        new = [key for key in keys if key not in grant.keys and key not in others]
        if only_present:
            states = self._manager.lookup(new)
            coming = frozenset() if states.count(READY) == len(new) else self.coming(new)
            new = [key for key, state in zip(new, states, strict=True) if state == READY or key in coming]
        self._replace(grant, new)
        self._make_room(grant, len(new))
        covered = new[: self.budgets.room(grant.tenant, grant.budget)]
        self.budgets.take(grant.tenant, grant.budget, len(covered))
        grant.keys.update(dict.fromkeys(covered))
        for key in covered:
            before = self.covered.get(key)
            self.covered[key] = grant.alone if before is None else (*before, grant)
        self.rank(covered)
        self.on_retained(covered)
        return len(new) - len(covered)

    def _replace(self, grant: Grant, keys: Iterable[OffloadKey]) -> None:
        """Let a grant's chunks count once: older ones without a name that ask the same, and end sooner, let go of them."""
        same = (grant.tenant, grant.level, None)
        for key in keys if grant.budget is not Budget.PINNED else ():
            for older in self.of(key):
                if (older.tenant, older.level, older.hint.lease) == same and older.ends_at <= grant.ends_at:
                    self._displace(older, [key])

    def _make_room(self, grant: Grant, num_chunks: int) -> None:
        """Take chunks from older grants until there is room for so many, or nothing that may be taken.

        A tenant that has less than an equal part of the budget takes them from whichever has most, and otherwise from its own
        grants that ask for no more. Leases keep theirs until they end.
        """
        budget = grant.budget
        while budget is not Budget.PINNED and (lacking := num_chunks - self.budgets.room(grant.tenant, budget)) > 0:
            whose, most = self.budgets.next_to_yield(grant.tenant, budget)
            oldest = next((one for one in self if self._may_take(grant, one, whose)), None)
            if oldest is None or most < 1:
                return
            self._displace(oldest, list(oldest.keys)[-min(lacking, most) :])

    def _may_take(self, grant: Grant, older: Grant, whose: str | None) -> bool:
        if older is grant or not older.keys or older.budget is not grant.budget or older.tenant != whose:
            return False
        return whose != grant.tenant or abs(older.level - NORMAL) <= abs(grant.level - NORMAL)

    def _displace(self, older: Grant, keys: Sequence[OffloadKey]) -> None:
        """Take chunks from a grant in favour of a newer one."""
        for key in keys:
            self.uncover(older, key)
        self.rank(keys)
        self.on_retained(keys)
        if not older.keys:
            self.on_displaced(older)

    def uncover(self, grant: Grant, key: OffloadKey) -> None:
        """Let a grant cover a chunk no more; the caller ranks the chunk."""
        del grant.keys[key]
        self.budgets.take(grant.tenant, grant.budget, -1)
        left = tuple(other for other in self.covered[key] if other is not grant)
        if left:
            self.covered[key] = left
        else:
            del self.covered[key]

    def rank(self, keys: Iterable[OffloadKey]) -> None:
        """Give chunks the levels that follow from their grants."""
        by_level: dict[tuple[int, str | None], list[OffloadKey]] = {}
        for key in keys:
            grants = self.covered.get(key)
            if grants is None:
                by_level.setdefault((NORMAL, None), []).append(key)
            else:
                grant = counting(grants)
                by_level.setdefault((grant.level, grant.tenant), []).append(key)
        for (level, tenant), same in by_level.items():
            self._manager.rank(same, level, tenant)

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        assert all(not grant.is_over for grant in self), "a grant that is over is in force"
        for budget in Budget:
            grants = [grant for grant in self if grant.budget is budget]
            num_used = sum(len(grant.keys) for grant in grants)
            assert num_used == self.budgets.num_used(budget), "a budget is counted wrongly"
            for tenant in {grant.tenant for grant in grants}:
                own = sum(len(grant.keys) for grant in grants if grant.tenant == tenant)
                assert own <= self.budgets.limit_of(tenant, budget), f"{tenant} has more than its part of a budget"
        covered: dict[OffloadKey, set[Grant]] = {}
        for grant in self:
            for key in grant.keys:
                covered.setdefault(key, set()).add(grant)
        assert covered == {key: set(grants) for key, grants in self.covered.items()}, (
            "a chunk has grants that are not in force"
        )


def counting(grants: Sequence[Grant]) -> Grant:
    """Return the grant that counts where several meet: a lease, or else the newest."""
    return next((grant for grant in grants if grant.is_lease), grants[-1])


def _digest_of(tenant: str | None) -> bytes:
    """Return the 8 bytes that stand for a tenant in lower tiers."""
    return NO_TENANT if tenant is None else blake2b(tenant.encode(), digest_size=len(NO_TENANT)).digest()
