"""The default policy: never a hole, never a flush, and worth learned as its definition says."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cargohold.blocks import READY
from cargohold.offload.manager import StoreOffer, TierManager, make_manager
from cargohold.offload.policy import DEFAULT_POLICY, leaf_queue
from cargohold.offload.policy.absent_chunks import AbsentChunks
from cargohold.offload.policy.base import NO_SLOT, NO_SLOTS, Offer
from cargohold.offload.policy.key_hash import KeyHash
from cargohold.offload.policy.leaf_queue import NEVER, LeafQueue
from cargohold.offload.policy.prefix_tree import PrefixTree
from cargohold.offload.policy.reuse_index import ReuseIndexPolicy
from cargohold.offload.policy.reuse_model import NUM_AGES, ReuseModel, _reuse_index, age_buckets
from tests.offload.common import DEPTH, EVERY_PATH, chain, key, numbered
from tests.offload.manager.naive_tier import NaiveTier

paths = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


class NoHoles(RuleBasedStateMachine):
    """Stores and loads of any parts of prefixes: whatever is evicted, what stays can be used."""

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.tier = NaiveTier(make_manager("reuse-index", capacity))

    @rule(path=paths)
    def use(self, path: tuple[int, ...]) -> None:
        keys = chain(path)
        self.tier.manager.touch(keys)
        known = {**self.tier.ready, **self.tier.writing}
        first = next((at for at, name in enumerate(keys) if name not in known), len(keys))
        self.tier.store(keys[first:], keys[first - 1] if first else None)

    @rule(path=paths)
    def grow(self, path: tuple[int, ...]) -> None:
        """A request that generates stores behind its prefix, and touches nothing."""
        keys = chain(path)
        known = {**self.tier.ready, **self.tier.writing}
        first = next((at for at, name in enumerate(keys) if name not in known), len(keys))
        self.tier.store(keys[first : first + 1], keys[first - 1] if first else None)

    @precondition(lambda self: self.tier.stores)
    @rule()
    def commit_the_oldest(self) -> None:
        self.tier.commit(self.tier.stores[0])

    @rule(path=paths)
    def read_the_end(self, path: tuple[int, ...]) -> None:
        if key(path) in self.tier.ready:
            self.tier.load([key(path)])

    @precondition(lambda self: self.tier.loads)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tier.release(data.draw(st.sampled_from(self.tier.loads)))

    @invariant()
    def no_chunk_is_behind_a_hole(self) -> None:
        known = {**self.tier.ready, **self.tier.writing}
        for path in EVERY_PATH:
            assert len(path) == 1 or key(path) not in known or key(path[:-1]) in known
        self.tier.check()


TestNoHoles = NoHoles.TestCase
TestNoHoles.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 10), requests=st.lists(paths, max_size=40))
def test_lru_leaves_no_hole_either_where_nothing_is_pinned(capacity: int, requests: list[tuple[int, ...]]) -> None:
    tier = NaiveTier(make_manager("lru", capacity))
    for path in requests:
        use(tier, chain(path))
        for other in EVERY_PATH:
            assert len(other) == 1 or key(other) not in tier.ready or key(other[:-1]) in tier.ready


def test_is_the_default() -> None:
    assert DEFAULT_POLICY == "reuse-index"


@pytest.mark.parametrize(("policy", "is_flushed"), [("lru", True), ("reuse-index", False)])
def test_a_stream_of_one_shot_prompts_flushes_only_a_policy_that_stores_all(policy: str, is_flushed: bool) -> None:
    manager = make_manager(policy, 64)
    system = numbered(*range(8))
    num_hits = num_written = 0
    for number in range(400):
        num_hits += len(manager.lookup_run(system))
        request(manager, system)
        for part in range(4):
            start = 10_000 + 80 * number + 20 * part
            num_written += request(manager, numbered(*range(start, start + 20)))
    if is_flushed:
        assert num_hits == 0 and num_written == 400 * 80
    else:
        assert num_hits > 0.9 * 400 * 8
        assert num_written < 0.5 * 400 * 80, "most of what will never be seen again is not even written"


def test_above_other_tiers_everything_gets_in_and_what_is_worth_most_still_stays_longest() -> None:
    """What is refused would reach no tier below, and what these have could not be brought up."""
    manager = make_manager("reuse-index", 64)
    manager.admit_all()
    system = numbered(*range(8))
    num_hits = 0
    for number in range(400):
        num_hits += len(manager.lookup_run(system))
        request(manager, system)
        one_shot = numbered(*range(10_000 + 30 * number, 10_030 + 30 * number))
        assert request(manager, one_shot) == 30
        assert manager.lookup(one_shot) == bytes([READY]) * 30
    assert num_hits > 0.9 * 400 * 8


@pytest.mark.parametrize("admits_all", [False, True])
def test_chunks_of_several_prefixes_count_as_if_they_had_come_one_by_one(admits_all: bool) -> None:
    """Requests that generate side by side, some of whose answers come back: either way the same chunks are known alike."""
    together, apart = (ReuseIndexPolicy(40) for _ in range(2))
    managers = TierManager(40, together), TierManager(40, apart)
    if admits_all:
        for manager in managers:
            manager.admit_all()
    for turn in range(30):
        prefixes = [numbered(*range(1000 * (turn // 2 + line), 1000 * (turn // 2 + line) + 8)) for line in range(3)]
        offers = [StoreOffer(keys[at : at + 1], keys[at - 1] if at else None) for at in range(8) for keys in prefixes]
        for step in range(8):
            some = offers[3 * step : 3 * step + 3]
            managers[0].prepare_stores(some).commit()
            for offer in some:
                handle = managers[1].prepare_store(offer.keys, offer.parent)
                handle.commit()
        for manager in managers:
            manager.check()
            for keys in prefixes:
                manager.touch(keys[: len(manager.lookup_run(keys))])
    for left, right in ((together._uses, apart._uses), (together._classes, apart._classes)):
        assert np.bincount(left).tolist() == np.bincount(right).tolist()
    assert together._now == apart._now


def test_until_it_has_learned_something_it_evicts_the_oldest_leaf() -> None:
    manager = make_manager("reuse-index", 4, record_events=True)
    for first in (1, 2):
        request(manager, chain((first, first)))
    manager.touch(chain((1, 1)))
    request(manager, chain((3,)))
    assert manager.lookup([key((1, 1)), key((2,)), key((2, 2)), key((3,))]) == bytes([READY, READY, 0, READY])


def test_learning_survives_a_reset() -> None:
    manager = make_manager("reuse-index", 16)
    for number in range(300):
        request(manager, [*numbered(*range(4)), *numbered(number + 1_000)])
        request(manager, numbered(*range(10_000 + 4 * number, 10_004 + 4 * number)))
    assert isinstance(manager, TierManager)
    before = manager.policy._model.index.copy()  # type: ignore[attr-defined]  # the policy is a ReuseIndexPolicy
    assert manager.reset()
    assert np.array_equal(manager.policy._model.index, before)  # type: ignore[attr-defined]
    assert manager.num_free == 16


def test_the_same_requests_end_in_the_same_choice() -> None:
    def run() -> list[bytes]:
        manager = make_manager("reuse-index", 40)
        generator = np.random.default_rng(7)
        answers = []
        for _ in range(500):
            keys = numbered(*(int(generator.zipf(1.3)) % 50 * 100 + at for at in range(1 + int(generator.integers(9)))))
            answers.append(manager.lookup(keys))
            request(manager, keys)
        return answers

    assert run() == run()


# --- the parts ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(risks=st.lists(st.floats(0, 0.5), min_size=NUM_AGES, max_size=NUM_AGES))
def test_the_index_is_the_best_ratio_of_reuse_to_time_over_all_horizons(risks: list[float]) -> None:
    edges = [0.0, *(2.0**age for age in range(1, NUM_AGES + 1))]
    hazards = [risk / (end - start) for risk, start, end in zip(risks, edges, edges[1:], strict=False)]
    index = _reuse_index(np.array([hazards]))[0]
    for age in (0, 1, 5, 20, NUM_AGES - 1):
        alive, spent, best = 1.0, 0.0, 0.0
        for bucket in range(age, NUM_AGES):
            width, rate = edges[bucket + 1] - edges[bucket], hazards[bucket]
            survive = np.exp(-rate * width)
            spent += alive * (width if rate * width < 1e-9 else (1 - survive) / rate)
            alive *= survive
            best = max(best, (1 - alive) / spent)
        assert index[age] == pytest.approx(best, rel=1e-4, abs=1e-13)


def test_what_comes_back_soon_is_worth_more_than_what_comes_back_late_or_never() -> None:
    model = ReuseModel(num_classes=4, family_size=1, capacity=100)
    now = 0
    for turn in range(2_000):
        tags = np.array([turn % 4, 1_000 + turn % 100, 2_000 + turn], dtype=np.uint32)
        model.observe(tags, np.arange(3, dtype=np.uint8), now)
        now += 3
    assert model.fit(now)
    soon, late, never, unknown = model.index[:, 0]
    assert soon > 5 * late > 25 * never
    assert never < unknown < soon, "a class without chunks is believed to be like all of them"
    assert not model.fit(now), "nothing new to learn yet"


def test_a_sample_that_is_full_gets_thinner_and_then_forgets_the_oldest() -> None:
    model = ReuseModel(num_classes=1, family_size=1, capacity=1)
    generator = np.random.default_rng(0)
    ends = [model.sample_end]
    for now in range(0, 1 << 20, 8):
        tags = generator.integers(0, 1 << 32, 8, dtype=np.uint32)
        sampled = tags[tags < model.sample_end]
        model.observe(sampled, np.zeros(len(sampled), dtype=np.uint8), now)
        ends.append(model.sample_end)
    assert ends[0] > ends[-1] and ends == sorted(ends, reverse=True)
    assert model._num_records <= 16_384
    assert (1 << 20) - model._starts[0] < (1 << 20), "the oldest records are gone"


@pytest.mark.parametrize(("age", "bucket"), [(1, 0), (2, 1), (3, 1), (4, 2), (1 << 39, 39), ((1 << 39) + 1, 39)])
def test_ages_are_told_apart_by_powers_of_two(age: int, bucket: int) -> None:
    assert age_buckets(np.array([age]))[0] == bucket


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_tree_counts_children(data: st.DataObject) -> None:
    tree = PrefixTree(12)
    parent_of: dict[int, int] = {}
    for _ in range(data.draw(st.integers(0, 20))):
        free = [slot for slot in range(12) if slot not in parent_of]
        grows = data.draw(st.booleans())
        if free and grows:
            slots = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            parent = data.draw(st.sampled_from([NO_SLOT, *parent_of]))
            tree.link(np.array(slots), parent)
            parent_of.update(zip(slots, [parent, *slots], strict=False))
        elif parent_of:
            gone = data.draw(st.lists(st.sampled_from(list(parent_of)), unique=True))
            leaves = parent_of.keys() - parent_of.values()
            if len(gone) == 1 and gone[0] in leaves:
                parent = parent_of[gone[0]]
                siblings = [slot for slot, above in parent_of.items() if above == parent]
                assert tree.cut_leaf(gone[0]) == (parent if len(siblings) == 1 else NO_SLOT)
            else:
                tree.cut(np.array(gone, dtype=np.intp))
            parent_of = {
                slot: NO_SLOT if parent in gone else parent for slot, parent in parent_of.items() if slot not in gone
            }
        counts = Counter(parent_of.values())
        assert tree.num_children.tolist() == [counts[slot] for slot in range(12)]
        tree.check(np.array(list(parent_of), dtype=np.intp))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_leaves_go_in_the_order_of_their_worth(data: st.DataObject) -> None:
    """The leaf that is worth least is taken, again and again, until a newcomer is worth less."""
    capacity = data.draw(st.integers(1, 24))
    worth_of = data.draw(st.lists(st.sampled_from([0.1, 0.2, 0.4, 0.8]), min_size=4, max_size=4))
    classes, last_uses, tree, busy = drawn_leaves(data, capacity)
    parents, alive = tree._parents.copy(), set(range(capacity))
    queue = LeafQueue(last_uses, classes, tree, np.tile(np.array([worth_of]).T, (1, NUM_AGES)))
    newcomers = data.draw(st.lists(st.sampled_from([0.1, 0.3, 1.0]), min_size=1, max_size=capacity))
    (room,), _, used = queue.take(np.array(newcomers), [slice(None)], now=capacity, busy=busy)

    def lowest() -> float | None:
        idle = [slot for slot in alive if not busy[slot] and not any(parents[other] == slot for other in alive)]
        return min((worth_of[classes[slot]] for slot in idle), default=None)

    for newcomer, slot in zip(newcomers, room.victims.tolist(), strict=False):
        assert slot in alive and not busy[slot] and not any(parents[other] == slot for other in alive)
        assert lowest() == worth_of[classes[slot]] <= newcomer
        alive.remove(slot)
    assert used.tolist() == room.victims.tolist(), "slots were used in their order"
    assert (last_uses[room.victims] == NEVER).all()
    if len(room.victims) < len(newcomers):
        left = lowest()
        assert room.refused == (left is not None)
        assert left is None or left > newcomers[len(room.victims)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whole_lines_go_as_one_chunk_after_the_other_does(data: st.DataObject) -> None:
    """Prefixes in neighbouring slots, which branch, and some of whose chunks were used apart or are busy."""
    capacity = 40
    links, free = [], list(range(capacity))
    while free:
        length = data.draw(st.integers(1, len(free)))
        links.append((free[:length], data.draw(st.sampled_from([NO_SLOT, *range(free[0])]))))
        free = free[length:]
    oddities = st.lists(st.integers(0, capacity - 1), max_size=4)
    used_later, of_other_class, busy_slots = data.draw(oddities), data.draw(oddities), data.draw(oddities)
    worth = np.array(data.draw(st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=1, max_size=capacity)))

    def victims(shortest_line: int) -> tuple[list[int], list[int], bool]:
        last_uses, classes = np.zeros(capacity, dtype=np.int64), np.zeros(capacity, dtype=np.uint8)
        busy = np.zeros(capacity, dtype=np.int32)
        last_uses[used_later], classes[of_other_class], busy[busy_slots] = 1, 1, 1
        tree = PrefixTree(capacity)
        for slots, parent in links:
            tree.link(np.array(slots), parent)
        queue = LeafQueue(last_uses, classes, tree, np.tile([[0.2], [0.6]], (1, NUM_AGES)))
        with patch.object(leaf_queue, "_MIN_LINE", shortest_line):
            (room,), _, used = queue.take(worth, [slice(None)], now=2, busy=busy)
        tree.check((last_uses != NEVER).nonzero()[0])
        return room.victims.tolist(), used.tolist(), room.refused

    assert victims(1) == victims(capacity + 1)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_of_several_newcomers_each_is_weighed_against_the_leaf_that_is_worth_least(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 16))
    worth_of = [0.1, 0.2, 0.4, 0.8]
    classes, last_uses, tree, busy = drawn_leaves(data, capacity)
    parents, alive = tree._parents.copy(), set(range(capacity))
    queue = LeafQueue(last_uses, classes, tree, np.tile(np.array([worth_of]).T, (1, NUM_AGES)))
    chains = data.draw(st.lists(st.lists(st.sampled_from([0.1, 0.3, 1.0]), max_size=3), min_size=1, max_size=capacity))
    newcomers = np.array([worth for newcomers in chains for worth in newcomers])
    ends = accumulate(map(len, chains))
    parts = [slice(end - len(newcomers), end) for end, newcomers in zip(ends, chains, strict=True)]
    rooms, gone, victims_used = queue.take(newcomers, parts, now=capacity, busy=busy)
    for wanted, room in zip(chains, rooms, strict=True):
        victims = room.victims.tolist()
        assert len(victims) <= len(wanted)
        for at, newcomer in enumerate(wanted[: len(victims) + 1]):
            idle = [slot for slot in alive if not busy[slot] and not any(parents[other] == slot for other in alive)]
            least = min((worth_of[classes[slot]] for slot in idle), default=None)
            if at == len(victims):
                assert room.refused == (least is not None) and (least is None or newcomer < least)
            else:
                assert victims[at] in idle and worth_of[classes[victims[at]]] == least is not None and newcomer >= least
                alive.remove(victims[at])
    assert gone.tolist() == [slot for room in rooms for slot in room.victims.tolist()]
    assert victims_used.tolist() == gone.tolist(), "slots were used in their order"
    tree.check(np.array(sorted(alive), dtype=np.intp))
    everything = np.full(capacity, np.inf)
    (rest,), *_ = queue.take(everything, [slice(None)], now=capacity, busy=np.zeros(capacity, dtype=np.int32))
    assert sorted(rest.victims.tolist()) == sorted(alive), "who was passed over is still queued"


def test_a_queued_leaf_that_was_continued_is_a_leaf_no_more() -> None:
    last_uses, busy = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int32)
    tree = PrefixTree(2)
    tree.link(np.array([0, 1]), NO_SLOT)
    queue = LeafQueue(last_uses, np.zeros(2, dtype=np.uint8), tree, np.ones((1, NUM_AGES)))
    assert queue.take(np.ones(1), [slice(None)], now=1, busy=busy).rooms[0].victims.tolist() == [1], (
        "and slot 0 is queued"
    )
    last_uses[1] = 1
    tree.link(np.array([1]), 0)
    assert queue.take(np.ones(1), [slice(None)], now=2, busy=busy).rooms[0].victims.tolist() == [1]


def test_what_is_known_of_absent_chunks_is_found_by_their_tags() -> None:
    absent = AbsentChunks(16)
    tags = KeyHash(seed=0)(numbered(1, 2, 3))
    absent.remember(tags[:2], np.array([3, 5], dtype=np.uint8), np.array([100, 200]))
    places, uses, ages = absent.recall(tags, now=1_000)
    assert (places.tolist(), uses.tolist(), ages.tolist()) == ([0, 1], [3, 5], [900, 800])
    assert absent.recall_one(int(tags[2]), 1_000)[0] == 0
    absent.remember(tags[2:], np.array([255], dtype=np.uint8), np.array([1 << 32]))
    places, uses, ages = absent.recall(tags, now=(1 << 32) + 7)
    assert (places.tolist(), uses.tolist(), ages[2]) == ([0, 1, 2], [3, 5, 255], 7)
    absent.remember(tags[:0], np.array([], dtype=np.uint8), np.array([]))
    one_by_one = [absent.recall_one(tag, (1 << 32) + 7) for tag in tags.tolist()]
    assert one_by_one == list(zip(uses.tolist(), ages.tolist(), strict=True))
    every_place = np.arange(1 << 16, dtype=np.uint32)
    assert not len(AbsentChunks(16).recall(every_place, now=0)[0]), "something is known before anything was remembered"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_few_chunks_are_met_as_many_are(data: st.DataObject) -> None:
    policy = ReuseIndexPolicy(8)
    manager = TierManager(8, policy)
    names = numbered(*range(12))
    for _ in range(data.draw(st.integers(0, 12))):
        first = data.draw(st.integers(0, len(names) - 1))
        request(manager, names[first : first + data.draw(st.integers(1, 3))])
    offers = [Offer([name], parent, lambda: NO_SLOTS) for name in names for parent in (NO_SLOT, *range(8))]
    together = policy._meet_many(offers)
    ones = [policy._meet_few(offers[first : first + 3]) for first in range(0, len(offers), 3)]
    assert together.tags.tolist() == [tag for one in ones for tag in one.tags.tolist()]
    assert together.uses.tolist() == [uses for one in ones for uses in one.uses.tolist()]
    assert together.classes.tolist() == [chunk_class for one in ones for chunk_class in one.classes.tolist()]


def drawn_leaves(
    data: st.DataObject, capacity: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], PrefixTree, npt.NDArray[np.int32]]:
    """Chunks of four classes in any tree, used in the order of their slots, some of them busy."""
    classes = np.array(data.draw(st.lists(st.integers(0, 3), min_size=capacity, max_size=capacity)), dtype=np.uint8)
    tree = PrefixTree(capacity)
    for slot in range(capacity):
        tree.link(np.array([slot]), data.draw(st.sampled_from([NO_SLOT, *range(slot)])))
    busy = np.array(data.draw(st.lists(st.integers(0, 1), min_size=capacity, max_size=capacity)), dtype=np.int32)
    return classes, np.arange(capacity, dtype=np.int64), tree, busy


def use(tier: NaiveTier, keys: list[bytes]) -> None:
    length = len(tier.manager.lookup_run(keys))
    tier.manager.touch(keys)
    tier.commit(tier.store(keys[length:], keys[length - 1] if length else None))


def request(manager: TierManager, keys: list[bytes]) -> int:
    """Serve a request; how many chunks were stored."""
    length = len(manager.lookup_run(keys))
    manager.touch(keys)
    handle = manager.prepare_store(keys[length:], keys[length - 1] if length else None)
    handle.commit()
    return len(handle.keys)
