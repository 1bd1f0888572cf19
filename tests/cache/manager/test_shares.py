"""Hints and quotas in one tier: who is evicted, and who never is, under random operations and in single cases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cargohold.cache import SlotReservation, StoreOffer, TierManager
from cargohold.cache.chunk_table import READY, ChunkTable
from cargohold.cache.policies import POLICIES, ReplacementPolicy, find_policy
from cargohold.cache.retention import HELD, NORMAL
from cargohold.cache.shares import OTHERS, Limits
from cargohold.errors import ConfigError
from tests.cache.common import DEPTH, EVERY_KEY, EVERY_PATH, chain, numbered
from tests.effort import examples

TENANTS = ("ann", "bob", None)
PATH_OF = dict(zip(EVERY_KEY, EVERY_PATH, strict=True))
paths = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


def stored(manager: TierManager, keys: list[bytes], tenant: str | None = None, *, wanted: bool = False) -> int:
    """Store what is absent of a prefix, and return how many of its leading chunks are there then."""

    num_there = len(manager.lookup_run(keys))
    offer = StoreOffer(keys[num_there:], keys[num_there - 1] if num_there else None, tenant, 80 if wanted else NORMAL)
    manager.prepare_stores([offer]).commit()
    return len(manager.lookup_run(keys))


class SharesMachine(RuleBasedStateMachine):
    """Stores, uses, levels and removals of two tenants with quotas and of all others."""

    policy: str
    with_quotas: bool

    @initialize(capacity=st.integers(4, 14), data=st.data())
    def start(self, capacity: int, data: st.DataObject) -> None:
        self.quotas: dict[str, Limits] = {}
        if type(self).with_quotas:
            for tenant in ("ann", "bob"):
                reserved = data.draw(st.integers(0, capacity // 2))
                soft = data.draw(st.none() | st.integers(reserved, capacity))
                hard = data.draw(st.none() | st.integers(soft or max(reserved, 1), capacity))
                self.quotas[tenant] = Limits(reserved, soft, hard)
        self.manager = TierManager(capacity, find_policy(type(self).policy), quotas=self.quotas)
        self.levels: dict[bytes, int] = {}
        self.owners: dict[bytes, str | None] = {}
        self.writing: list[tuple[SlotReservation, str | None]] = []

    def share(self, tenant: str | None) -> str | None:
        return tenant if tenant in self.quotas else None

    def used(self, tenant: str | None) -> int:
        return sum(owner == tenant for owner in self.owners.values())

    def forget_absent(self) -> list[bytes]:
        """Forget chunks that have left the tier, and return them."""
        written = {key for handle, _ in self.writing for key in handle.keys}
        gone = [key for key in self.owners if key not in written and self.manager.lookup([key]) != bytes([1])]
        for key in gone:
            del self.owners[key]
            self.levels.pop(key, None)
        return gone

    @rule(path=paths, tenant=st.sampled_from(TENANTS), wanted=st.booleans(), at_once=st.booleans())
    def store(self, path: tuple[int, ...], tenant: str | None, *, wanted: bool, at_once: bool) -> None:

        keys = chain(path)
        first = len(self.manager.lookup_run(keys))
        share = self.share(tenant)
        # What a tenant has lowered itself goes first, whatever is reserved for it.
        reserved = {
            name: min(
                sum(owner == name and self.levels.get(key, NORMAL) >= NORMAL for key, owner in self.owners.items()),
                limits.reserved,
            )
            for name, limits in self.quotas.items()
        }
        levels = dict(self.levels)
        parent = keys[first - 1] if first else None
        idle = [key for key in self.idle() if key not in keys]  # what is on offer stays, and what it continues
        handle = self.manager.prepare_stores([StoreOffer(keys[first:], parent, tenant, 80 if wanted else NORMAL)])
        self.owners.update(dict.fromkeys(handle.keys, share))
        self.writing.append((handle, share))
        gone = self.forget_absent()
        assert not any(levels.get(key) == HELD for key in gone), "a held chunk was evicted"
        for name, least in reserved.items():
            assert name == share or self.used(name) >= least, f"{share} has pushed {name} below what is reserved for it"
        self.check_order(gone, [key for key in idle if key not in gone], levels)
        if at_once:
            self.commit()

    def idle(self) -> list[bytes]:
        """Chunks that could be evicted: nobody uses them, and none is behind them."""
        table: ChunkTable = self.manager.table
        before = {PATH_OF[key][:end] for key in self.owners for end in range(len(PATH_OF[key]))}
        return [
            key
            for key in self.owners
            if (slot := table.find(key)) >= 0
            and table.states[slot] == READY
            and PATH_OF[key] not in before
            and not table.pins[slot]
        ]

    def check_order(self, gone: list[bytes], spared: list[bytes], levels: dict[bytes, int]) -> None:
        """What could have been evicted and was not is never of a lower level than what was, except across shares."""
        if not gone or self.quotas:
            return
        worst = max(levels.get(key, NORMAL) for key in gone)
        if worst > NORMAL:  # all normal ones had to go first
            assert all(levels.get(key, NORMAL) >= min(worst, HELD) for key in spared)
        elif worst == NORMAL:
            assert all(levels.get(key, NORMAL) >= NORMAL for key in spared), "a lowered chunk was passed over"

    def fresh(self) -> set[bytes]:
        return {key for handle, _ in self.writing for key in handle.keys}

    @rule()
    def commit(self) -> None:
        if self.writing:
            self.writing.pop(0)[0].commit()

    @rule()
    def forfeit(self) -> None:
        if self.writing:
            handle, _ = self.writing.pop()
            handle.forfeit()
            self.forget_absent()

    @rule(path=paths)
    def touch(self, path: tuple[int, ...]) -> None:
        self.manager.touch(chain(path))

    @rule(path=paths, level=st.sampled_from((0, 20, NORMAL, 80, 100, HELD)), tenant=st.sampled_from(TENANTS))
    def rank(self, path: tuple[int, ...], level: int, tenant: str | None) -> None:
        keys = chain(path)
        own = [
            key
            for key in keys
            if key in self.owners
            and key not in self.fresh()
            and (level == NORMAL or self.owners[key] == self.share(tenant))
        ]
        assert self.manager.rank(keys, level, tenant) == len(own)
        self.levels.update(dict.fromkeys(own, level))

    @rule(key=st.sampled_from(EVERY_KEY))
    def remove(self, key: bytes) -> None:
        if key not in self.fresh():
            self.manager.remove([key])
            self.forget_absent()

    @rule()
    def reset(self) -> None:
        if self.manager.reset():
            self.owners.clear()
            self.levels.clear()
            for handle, _ in self.writing:
                assert not handle.keys
                handle.commit()
            self.writing.clear()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        if self.quotas:
            counted = {OTHERS: self.used(None), "ann": self.used("ann"), "bob": self.used("bob")}
            assert self.manager.usage() == counted
            for name, limits in self.quotas.items():
                assert limits.hard is None or self.used(name) <= limits.hard


@pytest.mark.parametrize("with_quotas", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_levels_and_quotas_hold_under_any_operations(policy: str, with_quotas: bool) -> None:
    machine = type("Machine", (SharesMachine,), {"policy": policy, "with_quotas": with_quotas})
    run_state_machine_as_test(machine, settings=examples(5, stateful_step_count=25))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_branch_that_is_written_keeps_no_other_one_from_being_evicted(policy: str) -> None:
    manager = TierManager(3, find_policy(policy))
    manager.admit_all()
    assert stored(manager, chain((0, 0))) == 2
    branch = manager.prepare_stores([StoreOffer(chain((0, 1))[1:], chain((0,))[0])])
    other = manager.prepare_stores([StoreOffer(numbered(1), None)])
    assert other.keys == numbered(1), "it found a slot"
    assert manager.lookup(chain((0, 0))) == bytes([1, 0])
    branch.commit()
    other.commit()
    manager.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_flood_of_another_tenant_leaves_what_is_reserved(policy: str) -> None:
    manager = TierManager(20, find_policy(policy), quotas={"ann": Limits(reserved=8)})
    own = numbered(*range(8))
    for key in own:
        stored(manager, [key], "ann")
    for number in range(100, 200):
        stored(manager, numbered(number), "eve", wanted=True)
    assert manager.usage() == {OTHERS: 12, "ann": 8}
    assert stored(manager, numbered(300), "ann", wanted=True) == 1, "a tenant may use more than what is reserved for it"
    assert manager.usage()["ann"] in (8, 9)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_above_its_soft_limit_a_tenant_pays_first_and_its_hard_limit_is_never_passed(policy: str) -> None:
    manager = TierManager(20, find_policy(policy), quotas={"ann": Limits(soft=5, hard=10)})
    for number in range(30):
        stored(manager, numbered(number), "ann", wanted=True)
        assert manager.usage()["ann"] <= 10
    assert manager.usage()["ann"] == 10
    for number in range(100, 115):
        stored(manager, numbered(number), "bob", wanted=True)
    assert manager.usage() == {OTHERS: 15, "ann": 5}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_chunks_whose_level_is_over_age_normally(policy: str) -> None:
    manager = TierManager(4, find_policy(policy))
    first, *others = numbered(*range(12))
    stored(manager, [first])
    manager.rank([first], HELD)
    for key in others[:6]:
        stored(manager, [key], wanted=True)
    assert manager.lookup([first]) == bytes([1])
    manager.rank([first], NORMAL)
    for key in others[6:]:
        stored(manager, [key], wanted=True)
    assert manager.lookup([first]) == bytes([0])
    manager.check()


class OwnOrder(ReplacementPolicy):
    """A policy that keeps an order that nobody else knows."""

    name = "own-order"

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None: ...

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        return False

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None: ...

    def drop(self, slots: Sequence[int]) -> None: ...

    def clear(self) -> None: ...

    def check(self) -> None: ...


def test_a_policy_that_keeps_its_own_order_takes_neither_hints_nor_quotas() -> None:
    manager = TierManager(4, OwnOrder)
    stored(manager, numbered(1))
    assert not manager.takes_hints
    assert manager.rank(numbered(1), HELD) == 0
    with pytest.raises(ConfigError, match="own-order"):
        TierManager(4, OwnOrder, quotas={"ann": Limits(reserved=1)})


def test_a_tenant_takes_from_another_until_that_has_no_more_than_itself() -> None:
    manager = TierManager(8, find_policy("lru"), quotas={"ann": Limits(), "bob": Limits()})
    stored(manager, numbered(*range(6)), "ann")
    stored(manager, numbered(100, 101), "bob")
    stored(manager, numbered(*range(200, 206)), "bob")
    assert manager.usage() == {OTHERS: 0, "ann": 2, "bob": 6}, "the rest it takes from itself"
