"""Every manager with every policy against a naive model, under random operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cargohold.blocks import READY
from cargohold.cache import ChunksStored, OffloadManager, StoreOffer, make_manager
from cargohold.cache.chunk_table import ChunkTable
from cargohold.cache.policies import POLICIES
from cargohold.cache.policies.runs import Runs
from cargohold.errors import LifecycleError, MissingChunkError
from tests.cache.common import DEPTH, EVERY_KEY, chain, numbered
from tests.cache.manager.naive_tier import NaiveTier
from tests.effort import examples

MakeManager = Callable[[int], OffloadManager]

MANAGERS: dict[str, MakeManager] = {name: partial(make_manager, name, record_events=True) for name in POLICIES}
paths = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


class TierMachine(RuleBasedStateMachine):
    """Stores, loads, failures and removals in any order."""

    make: MakeManager

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.manager = type(self).make(capacity)
        self.tier = NaiveTier(self.manager)
        self.announced: set[bytes] = set()
        self.answers = (self.manager.generation, self.manager.lookup(EVERY_KEY))

    @rule(path=paths, data=st.data())
    def store(self, path: tuple[int, ...], data: st.DataObject) -> None:
        keys = chain(path)
        first = data.draw(st.sampled_from([len(self.manager.lookup_run(keys)), data.draw(st.integers(0, len(keys)))]))
        self.tier.store(keys[first:], keys[first - 1] if first else None)

    @rule(several=st.lists(st.tuples(paths, st.booleans(), st.integers(0, 1)), min_size=1, max_size=4))
    def store_each(self, several: list[tuple[tuple[int, ...], bool, int]]) -> None:
        """What requests do in a step: each continues its own prefix; some are prompts of more than a chunk, or share them."""
        offers = []
        for path, is_prompt, num_ahead in several:
            keys = chain(path)
            first = min(len(self.manager.lookup_run(keys)) + num_ahead, len(keys) - 1)
            offers.append(
                StoreOffer(keys[first:] if is_prompt else keys[first : first + 1], keys[first - 1] if first else None)
            )
        self.tier.store_each(offers)

    @precondition(lambda self: self.tier.stores)
    @rule(data=st.data(), works=st.booleans())
    def end_store(self, data: st.DataObject, works: bool) -> None:
        store = data.draw(st.sampled_from(self.tier.stores))
        (self.tier.commit if works else self.tier.forfeit)(store)
        for again in (store.commit, store.forfeit):
            with pytest.raises(LifecycleError) as raised:
                again()
            assert raised.value.history == ("prepare_stores", "commit" if works else "forfeit")

    @rule(path=paths)
    def touch(self, path: tuple[int, ...]) -> None:
        keys = chain(path)
        num_leading = next((at for at, key in enumerate(keys) if key not in self.tier.ready), len(keys))
        assert self.manager.touch(keys) == num_leading

    @rule(path=paths, data=st.data())
    def load(self, path: tuple[int, ...], data: st.DataObject) -> None:
        keys = chain(path)[data.draw(st.integers(0, len(path) - 1)) :]
        missing = [key for key in keys if key not in self.tier.ready]
        if missing:
            with pytest.raises(MissingChunkError) as raised:
                self.manager.prepare_load(keys)
            assert raised.value.key == missing[0]
        else:
            self.tier.load(keys)

    @precondition(lambda self: self.tier.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.tier.loads))
        others = [key for key in EVERY_KEY if key not in load.keys]
        with pytest.raises(LifecycleError):
            load.release([others[0]])
        bad = data.draw(st.lists(st.sampled_from(list(load.keys)), unique=True, max_size=2))
        self.tier.release(load, bad)
        with pytest.raises(LifecycleError) as raised:
            load.release()
        assert raised.value.history == ("prepare_load", "release")

    @rule(keys=st.lists(st.sampled_from(EVERY_KEY), max_size=4))
    def remove(self, keys: list[bytes]) -> None:
        written = [key for key in keys if key in self.tier.writing]
        if written:
            with pytest.raises(LifecycleError) as raised:
                self.manager.remove(keys)
            assert written[0].hex() in raised.value.subject and raised.value.history == ("prepare_stores",)
        else:
            self.tier.remove(keys)

    @rule()
    def reset(self) -> None:
        self.tier.reset()

    @rule(path=paths)
    def look_up_a_run(self, path: tuple[int, ...]) -> None:
        keys = chain(path)
        length = next((at for at, key in enumerate(keys) if key not in self.tier.ready), len(keys))
        assert self.manager.lookup_run(keys) == bytes([READY]) * length

    @invariant()
    def agrees(self) -> None:
        self.tier.check()

    @invariant()
    def events_tell_what_is_there(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, ChunksStored):
                assert self.announced.isdisjoint(event.keys)
                self.announced.update(event.keys)
            else:
                assert self.announced.issuperset(event.keys)
                self.announced.difference_update(event.keys)
        assert self.announced == self.tier.ready.keys()

    @invariant()
    def equal_generations_mean_equal_answers(self) -> None:
        generation, answers = self.answers
        self.answers = (self.manager.generation, self.manager.lookup(EVERY_KEY))
        assert self.answers[0] != generation or self.answers[1] == answers

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for store in list(self.tier.stores):
            self.tier.forfeit(store)
        for load in list(self.tier.loads):
            self.tier.release(load)
        self.tier.check()
        self.tier.reset()
        assert self.manager.num_free == self.manager.capacity


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", MANAGERS)
def test_under_random_operations(name: str) -> None:
    machine = type("Machine", (TierMachine,), {"make": staticmethod(MANAGERS[name])})
    run_state_machine_as_test(machine, settings=examples(16, stateful_step_count=40))


@pytest.mark.parametrize("name", MANAGERS)
def test_what_is_offered_does_not_go_to_make_room_for_the_rest_of_the_offer(name: str) -> None:
    tier = NaiveTier(MANAGERS[name](2))
    first, second = chain((0, 0))
    commit(tier, [first, second])
    tier.remove([first])
    commit(tier, chain((1,)))
    again = tier.store([first, second], None)
    assert list(again.keys) == [first]
    assert tier.ready.keys() == {second}, "not the older one, which is on offer, but the other one went"
    tier.commit(again)
    tier.check()


@pytest.mark.parametrize("name", MANAGERS)
def test_what_several_offer_is_stored_or_deferred_once(name: str) -> None:
    tier = NaiveTier(MANAGERS[name](3))
    commit(tier, chain((1,)))
    busy = tier.load(chain((1,)))
    longer = chain((0, 0, 0, 0))
    store = tier.store_each([StoreOffer(longer[:3]), StoreOffer(longer), StoreOffer(longer[:3])])
    assert list(store.keys) == longer[:2] and list(store.deferred) == longer[2:3]
    tier.commit(store)
    tier.release(busy)


@pytest.mark.parametrize("name", MANAGERS)
def test_what_is_placed_later_in_a_call_takes_nothing_from_in_front_of_what_was_placed_first(name: str) -> None:
    """Found by random operations: the last offer is placed after the one that it continues, when the first is done with."""
    tier = NaiveTier(MANAGERS[name](5))
    first, second, third = chain((0, 0, 0))
    begins, goes_on = chain((1, 1))
    commit(tier, [first, second])
    commit(tier, chain((1, 0))[1:])
    tier.commit(tier.store_each([StoreOffer([third], second), StoreOffer([begins]), StoreOffer([goes_on], begins)]))
    assert tier.ready.keys() == {first, second, third, begins, goes_on}


@pytest.mark.parametrize("name", MANAGERS)
@pytest.mark.parametrize("offers", [[], [StoreOffer(())], [StoreOffer(()), StoreOffer(())]])
def test_nothing_on_offer_is_stored_in_no_time(name: str, offers: list[StoreOffer]) -> None:
    tier = NaiveTier(MANAGERS[name](3))
    store = tier.store_each(offers)
    assert not store.keys and not store.deferred
    tier.commit(store)
    tier.check()


@pytest.mark.parametrize("capacity", [10, 200_000])
def test_prompts_that_share_what_nobody_has_are_stored_as_one(capacity: int) -> None:
    """Long ones, in one step: what they share is placed with the first, and the rest of the others behind it."""
    manager = make_manager("lru", capacity)
    trunk, left, right = numbered(*range(3)), numbered(*range(10, 14)), numbered(*range(20, 24))
    handle = manager.prepare_stores([StoreOffer([*trunk, *left]), StoreOffer([*trunk, *right]), StoreOffer(trunk)])
    kept = [*trunk, *left, *right][: min(capacity, 11)]
    assert list(handle.keys) == kept and len(handle.deferred) == 11 - len(kept)
    handle.commit()
    manager.check()
    assert manager.lookup(kept) == bytes([READY]) * len(kept)


@pytest.mark.parametrize("name", MANAGERS)
def test_what_continues_another_offer_of_the_same_call_goes_before_it(name: str) -> None:
    tier = NaiveTier(MANAGERS[name](3))
    first, second, third = chain((0, 0, 0))
    tier.commit(tier.store_each([StoreOffer([first]), StoreOffer([third], second), StoreOffer([second], first)]))
    assert tier.ready.keys() == {first, second, third}
    tier.manager.touch([first, second, third])
    commit(tier, chain((1,)))
    assert third not in tier.ready and {first, second} <= tier.ready.keys()


def commit(tier: NaiveTier, keys: list[bytes]) -> None:
    tier.commit(tier.store(keys, None))


@pytest.mark.parametrize("name", MANAGERS)
def test_nothing_is_placed_behind_what_finds_no_slot_in_the_same_call(name: str) -> None:
    tier = NaiveTier(MANAGERS[name](3))
    first, second, third = chain((0, 0, 0))
    one, other = chain((1,)), chain((2,))
    commit(tier, one)
    commit(tier, other)
    busy = [tier.load(one), tier.load(other)]
    writing = tier.store([first], None)
    store = tier.store_each([StoreOffer([third], second), StoreOffer([second], first)])
    assert not store.keys
    assert list(store.deferred) == [second, third], "others will let go of three slots"
    tier.commit(store)
    for load in busy:
        tier.release(load)
    tier.commit(writing)
    again = tier.store_each([StoreOffer([third], second), StoreOffer([second], first)])
    assert list(again.keys) == [second, third]
    tier.commit(again)


def full_of_prefixes(name: str, num_prefixes: int, length: int) -> tuple[OffloadManager, list[list[bytes]]]:
    """A full tier, and what is in it; each prefix with the chunk that comes next."""
    manager = make_manager(name, num_prefixes * length)
    prefixes = [chain((at, *range(length))) for at in range(num_prefixes)]
    for prefix in prefixes:
        manager.prepare_store(prefix[:-1]).commit()
    return manager, prefixes


@pytest.mark.parametrize("name", POLICIES)
def test_a_tier_in_which_all_is_in_use_is_not_searched_again_for_each_offer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a review: with 64,000 slots and 256 requests that fill them, each step took seconds."""
    manager, prefixes = full_of_prefixes(name, 50, 100)
    searches = []
    evict = Runs.evict

    def searched(self: Runs, *options: Any) -> Any:
        searches.append(self)
        return evict(self, *options)

    monkeypatch.setattr(Runs, "evict", searched)
    store = manager.prepare_stores([StoreOffer(prefix[-1:], prefix[-2]) for prefix in prefixes])
    assert not store.keys and not store.deferred
    assert 0 < len(searches) < 40
    store.commit()


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_dropped_leaves_from_its_end_up_to_what_somebody_needs(name: str) -> None:
    manager = make_manager(name, 20, record_events=True)
    manager.admit_all()
    stem, leaf, other = chain((0, 0, 0)), chain((0, 0, 0, 0, 0))[3:], chain((0, 0, 0, 1))[3:]
    manager.prepare_store(stem + leaf).commit()
    manager.prepare_store(other, stem[-1]).commit()
    manager.take_events()
    load = manager.prepare_load([*stem, leaf[0]])
    assert manager.drop(stem + leaf) == 1, "the others are being read"
    load.release()
    assert manager.drop(stem + leaf) == 1, "the others are continued"
    assert [key for event in manager.take_events() for key in event.keys] == leaf[::-1]
    writing = manager.prepare_store(leaf, stem[-1])
    assert manager.drop(leaf) == 0, "nothing is there yet"
    writing.commit()
    assert manager.drop(leaf + other) == 3
    assert manager.drop(stem) == 3
    assert manager.num_ready == 0
    manager.check()


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_looks_at_all_that_is_before_what_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a review: two requests that completed the same chunk made a step look at every chunk of all requests."""
    manager, prefixes = full_of_prefixes(name, 20, 30)
    offers = [StoreOffer(prefix[-1:], prefix[-2]) for prefix in prefixes[10:]]

    def ancestors(_table: ChunkTable, _slot: int) -> list[int]:
        raise AssertionError("looked at")

    monkeypatch.setattr(ChunkTable, "ancestors", ancestors)
    store = manager.prepare_stores([*offers, offers[0], StoreOffer(prefixes[0][-2:], prefixes[0][-3])])
    assert len(store.keys) == 11
    store.commit()
    assert all(manager.lookup_run(prefix) == bytes([READY]) * len(prefix) for prefix in [*prefixes[10:], prefixes[0]])


@pytest.mark.parametrize("name", POLICIES)
def test_what_has_gone_is_counted_by_reason(name: str) -> None:
    """Found by reading a dashboard: what a reset had dropped was shown as evicted."""
    manager = make_manager(name, 4)
    for number in range(6):
        manager.prepare_store(numbered(number)).commit()
    assert manager.num_removed == {"evicted": 2}
    present = [key for key in numbered(*range(6)) if manager.lookup([key])[0] == READY]
    manager.prepare_load(present[:1]).release(present[:1])
    assert manager.reset()
    assert manager.num_removed == {"evicted": 2, "damaged": 1, "reset": 3}
