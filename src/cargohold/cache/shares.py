"""Shares: what hints and quotas add to the policy of one tier.

Chunks of levels other than ``NORMAL`` (see ``retention``) are set aside (see ``runs``), so the policy never meets them among
its victims, and a tier without hints pays nothing.

A tenant with a quota has a *share*: a policy of its own, over the same table, for the chunks that it has stored. Everybody else
has the first share. Who needs a slot takes it

1. from chunks that their own tenant has lowered, whosever they are;
2. from the share that is furthest above its soft limit;
3. from the share that uses most beyond what is reserved for it; if that is the newcomer's own, its policy may refuse instead.

So a share that uses no more than what is reserved for it loses nothing to others, and unused reservations are not wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Final

from cargohold.cache.chunk_table import NO_SLOT
from cargohold.cache.policies import ReplacementPolicy, RunsPolicy
from cargohold.cache.policies.runs import Aside
from cargohold.cache.retention import HELD, NORMAL
from cargohold.protocol import TurnEnd

OTHERS: Final = "others"
"""Name, in reports, of the share of tenants without a quota."""
MAX_SHARES: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """The quota of a tenant in one tier, in chunks.

    Attributes:
        reserved: no other tenant can push it below this many.
        soft: above this many, its own chunks go first; ``None`` for no such limit.
        hard: it never has more than this many; ``None`` for no such limit.
    """

    reserved: int = 0
    soft: int | None = None
    hard: int | None = None


class Share:
    """The chunks of one tenant, or of all tenants without a quota, in one tier.

    Args:
        policy: decides among them.
        number: number of the share, which is what the table calls their owner.
        limits: how many they may be.
    """

    def __init__(self, policy: RunsPolicy, number: int = 0, limits: Limits = Limits()) -> None:  # frozen
        self.policy = policy
        self.number = policy.number = number
        self.limits = limits
        self.aside: dict[int, Aside] = {}

    def rank(self, slots: Sequence[int], level: int) -> None:
        """Give chunks a level. Mutates the runs."""
        if level == NORMAL:
            self.policy.runs.bring_back(slots, self.policy.home)
        else:
            self.policy.runs.set_aside(slots, self.aside.setdefault(level, Aside()))

    def give_up(self, num_chunks: int) -> int:
        """Evict up to so many, those of the lowest levels first; return how many."""
        num_left = num_chunks - self.give_up_aside(num_chunks, 0, NORMAL)
        if num_left:
            evicted = self.policy.table.evicted
            num_before = len(evicted)
            self.policy.give_up(num_left)
            num_left -= len(evicted) - num_before
        return num_chunks - num_left + self.give_up_aside(num_left, NORMAL + 1, HELD)

    def give_up_aside(self, num_chunks: int, first: int, end: int) -> int:
        """Evict up to so many chunks of the levels in ``[first, end)``, the lowest first; return how many."""
        num_left = num_chunks
        for level in sorted(self.aside) if num_left and self.aside else ():
            if num_left and first <= level < end:
                victims = self.policy.runs.evict(self.aside[level], num_left)
                self.policy.note_evicted(victims)
                num_left -= sum(len(slots) for _, slots in victims)
        return num_chunks - num_left


class Shares(ReplacementPolicy):
    """The policy of a tier with hints or quotas: lets the share of each chunk decide.

    Args:
        policy: decides among the chunks of tenants without a quota. It may have chunks already.
        quotas: the limits of tenants that have one, by tenant.
        make_policy: makes the policies of these tenants' shares; its class is that of ``policy``.

    Attributes:
        tenant: number of the share that the chunks on offer belong to; see ``turn_to``.
        level: level of the chunks on offer; see ``turn_to``. Above ``NORMAL``, the policy does not refuse them. They displace
            no chunk of a higher level, unless that is what soft limits and reservations of tenants ask for.
        has_hard_limits: whether some tenant may not take every free slot.
    """

    name: ClassVar[str] = "shares"

    def __init__(
        self,
        policy: RunsPolicy,
        quotas: Mapping[str, Limits] | None = None,
        make_policy: Callable[..., RunsPolicy] | None = None,
    ) -> None:
        super().__init__(policy.table)
        quotas = quotas or {}
        assert len(quotas) < MAX_SHARES, "more shares than there may be"
        self.tenant = 0
        self.level = NORMAL
        self._shares = [Share(policy)]
        self._number_of: dict[str | None, int] = {}
        for number, (tenant, limits) in enumerate(quotas.items(), 1):
            assert make_policy is not None
            self._number_of[tenant] = number
            self._shares.append(Share(make_policy(policy.table, policy.runs), number, limits))
        self.has_hard_limits = any(limits.hard is not None for limits in quotas.values())
        if quotas:
            policy.table.count_owners(len(self._shares))

    def turn_to(self, tenant: str | None, level: int) -> int:
        """Learn whose chunks are on offer from now on, and their level; return the number of their share."""
        self.tenant, self.level = self.share_of(tenant), level
        return self.tenant

    @property
    def num_aside(self) -> int:
        """Number of chunks whose level is not ``NORMAL``."""
        return len(self._shares[0].policy.runs.aside)

    def share_of(self, tenant: str | None) -> int:
        """Return the number of a tenant's share."""
        return self._number_of.get(tenant, 0)

    def usage(self) -> dict[str, int]:
        """Return the number of chunks per tenant with a quota, and of all ``OTHERS``, those being written included."""
        table = self.table
        names = [OTHERS, *map(str, self._number_of)]
        return dict(zip(names, table.used or [table.num_ready + table.num_writing], strict=True))

    def level_of(self, slot: int) -> int:
        """Return a chunk's level."""
        aside = self._shares[0].policy.runs.aside.get(slot)
        levels = (level for share in self._shares for level, order in share.aside.items() if order is aside)
        return NORMAL if aside is None else next(levels)

    def make_room_to_save(self, num_chunks: int, num_missing: int, worth: float, owner: int) -> int:
        """Evict at most ``num_missing`` chunks, and more of a share that is at its limit, for others of it.

        Args:
            num_chunks: number of the others.
            num_missing: how many of them have no slot yet.
            worth: what each of them is worth.
            owner: their share.

        Returns:
            How many of them the share may have. Mutates the table.
        """
        evicted, self.tenant = self.table.evicted, owner
        own, goal = self._shares[owner], len(evicted) + num_missing
        hard = own.limits.hard
        if hard is not None and (num_over := self._used(own) + num_chunks - hard) > 0:
            own.policy.give_up(num_over, worth)
        for share in self._shares:
            share.give_up_aside(goal - len(evicted), 0, NORMAL)
        spent: set[int] = set()
        while (num_left := goal - len(evicted)) > 0:
            payer, num_to_pay = self._payer(spent)
            if payer is None:
                break
            num_before, num_to_pay = len(evicted), min(num_left, num_to_pay)
            if payer is own:
                payer.policy.give_up(num_to_pay, worth)
            else:
                payer.give_up(num_to_pay)
            if len(evicted) == num_before:
                spent.add(payer.number)
        return self.num_left(owner, num_chunks)

    def num_left(self, owner: int, num_chunks: int) -> int:
        """Return how many of so many chunks a share may have beside those that it has."""
        hard = self._shares[owner].limits.hard
        return num_chunks if hard is None else max(0, min(num_chunks, hard - self._used(self._shares[owner])))

    def rank(self, slots: Sequence[int], level: int) -> None:
        """Give chunks a level: a priority from 0 to 100, or ``HELD``. Mutates the runs."""
        for share, part in self._by_share(slots):
            share.rank(part, level)

    def owned_by(self, slots: Sequence[int], number: int) -> list[int]:
        """Return those of the chunks that belong to a share."""
        owners = self.table.owners
        return list(slots) if owners is None else [slot for slot in slots if owners[slot] == number]

    def num_allowed(self, keys: Sequence[bytes], parent: int) -> int:
        """Return how many of the chunks on offer the hard limit of their tenant allows, after its own have made room."""
        share = self._shares[self.tenant]
        hard = share.limits.hard
        if hard is None:
            return len(keys)
        num_more = self._used(share) + len(keys) - hard
        if num_more > 0:
            self._make_own_room(share, keys, parent, min(num_more, len(keys)))
        return max(0, min(len(keys), hard - self._used(share)))

    # --- the policy ---------------------------------------------------------------------------------------------------

    def admit_all(self) -> None:
        for share in self._shares:
            share.policy.admit_all()

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        last = slots[-1] if slots else NO_SLOT
        for share, part in self._by_share(slots):
            share.policy.touch(part, is_whole=is_whole and part[-1] == last)

    def renew(self, slot: int) -> None:
        for share, (own,) in self._by_share([slot]):
            share.policy.renew(own)

    def end_turn(self, keys: Sequence[bytes], slot: int, end: TurnEnd) -> None:
        owners = self.table.owners
        self._shares[0 if owners is None or slot == NO_SLOT else owners[slot]].policy.end_turn(keys, slot, end)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        own, evicted = self._shares[self.tenant], self.table.evicted
        goal = len(evicted) + num_slots
        for share in self._shares:
            share.give_up_aside(goal - len(evicted), 0, NORMAL)
        spent: set[int] = set()
        while (num_missing := goal - len(evicted)) > 0:
            payer, num_chunks = self._payer(spent)
            if payer is own:
                is_refused = self._make_own_room(own, keys, parent, num_missing)
                if is_refused or goal == len(evicted):
                    return is_refused
                spent.add(own.number)
            elif payer is None:
                break
            elif not payer.give_up(min(num_missing, num_chunks)):
                spent.add(payer.number)
        return False

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        self._shares[self.tenant].policy.add(keys, self._own_parent(parent), slots)

    def drop(self, slots: Sequence[int]) -> None:
        for share, part in self._by_share(slots):
            share.policy.drop(part)

    def worth_of(self, slots: Sequence[int]) -> Sequence[float]:
        return [worth for share, part in self._by_share(slots) for worth in share.policy.worth_of(part)]

    def note_saved(self, slots: Sequence[int]) -> None:
        self._shares[0].policy.note_saved(slots)  # all share the runs

    def lose(self, slots: Sequence[int]) -> None:
        for share, part in self._by_share(slots):
            share.policy.lose(part)

    def clear(self) -> None:
        for share in self._shares:
            share.policy.clear()
            share.aside.clear()

    def check(self) -> None:
        for share in self._shares:
            share.policy.check()
            hard = share.limits.hard
            assert hard is None or self._used(share) <= hard, "a tenant is above its hard limit"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _used(self, share: Share) -> int:
        used = self.table.used
        return used[share.number] if used else self.table.num_ready + self.table.num_writing

    def _payer(self, spent: set[int]) -> tuple[Share | None, int]:
        """Return the share that gives up chunks now, and how many at most; ``None`` if no share has any to give."""
        left = [share for share in self._shares if share.number not in spent]
        own = self._shares[self.tenant]
        over_soft = [(self._used(share) - share.limits.soft, share) for share in left if share.limits.soft is not None]
        num_over, payer = max(over_soft, key=lambda over: over[0], default=(0, own))
        if num_over > 0:
            return payer, num_over
        beyond = [(self._used(share) - share.limits.reserved, share) for share in left if share is not own]
        num_beyond, payer = max(beyond, key=lambda over: over[0], default=(0, own))
        num_own = self._used(own) - own.limits.reserved
        if own in left and num_own >= num_beyond:
            return own, num_own
        if num_beyond > 0:
            # Down to what the newcomer has: two shares that both want more take turns.
            return payer, max(1, num_beyond - max(0, num_own))
        return (own, num_own) if own in left else (None, 0)

    def _make_own_room(self, own: Share, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        """Evict chunks of the newcomer's own share; see ``make_room``."""
        evicted = self.table.evicted
        goal = len(evicted) + num_slots
        own.give_up_aside(num_slots, 0, NORMAL)
        is_refused = False
        if len(evicted) < goal:
            is_refused = own.policy.make_room(keys, self._own_parent(parent), goal - len(evicted))
        if is_refused and self.level > NORMAL:
            own.policy.give_up(goal - len(evicted))
        if self.level > NORMAL:
            own.give_up_aside(goal - len(evicted), NORMAL + 1, min(self.level + 1, HELD))
        return len(evicted) < goal and (is_refused or any(level > self.level for level in own.aside))

    def _own_parent(self, parent: int) -> int:
        """Return the parent if it belongs to the share of the chunks on offer: policies know only chunks of their own."""
        owners = self.table.owners
        is_own = parent == NO_SLOT or owners is None or owners[parent] == self.tenant
        return parent if is_own else NO_SLOT

    def _by_share(self, slots: Sequence[int]) -> Iterator[tuple[Share, Sequence[int]]]:
        """Yield the share of each stretch of chunks, with their slots."""
        owners = self.table.owners
        if owners is None:
            if slots:
                yield self._shares[0], slots
            return
        for number, same in groupby(slots, key=owners.__getitem__):
            yield self._shares[number], list(same)
