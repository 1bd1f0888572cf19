"""The default policy: never a hole, never a flush, and worth learned as its definition says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cargohold.blocks import READY
from cargohold.cache import StoreOffer, TierManager, make_manager
from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.chunk_table import READY as READY_SLOT
from cargohold.cache.policies import DEFAULT_POLICY, reuse_model
from cargohold.cache.policies.reuse_index import ReuseIndexPolicy
from cargohold.cache.policies.reuse_model import (
    ADDED_BY_END,
    DETAILS,
    NEW,
    NUM_AGES,
    NUM_CLASSES,
    AbsentChunks,
    ReuseModel,
    _reuse_index,
    age_bucket,
)
from cargohold.protocol import TurnEnd
from tests.cache.common import DEPTH, EVERY_PATH, chain, key, numbered
from tests.cache.manager.naive_tier import NaiveTier
from tests.effort import examples

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

    @rule(path=paths, end=st.sampled_from(TurnEnd))
    def end(self, path: tuple[int, ...], end: TurnEnd) -> None:
        self.tier.manager.end_turn(chain(path), end)

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
TestNoHoles.settings = examples(10, stateful_step_count=40)


@examples(25)
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
    managers = TierManager(40, ReuseIndexPolicy), TierManager(40, ReuseIndexPolicy)
    together, apart = (manager.policy for manager in managers)
    assert isinstance(together, ReuseIndexPolicy) and isinstance(apart, ReuseIndexPolicy)
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
    left, right = (Counter(run.kind for run in policy.runs.run_of if run is not None) for policy in (together, apart))
    assert left == right
    assert together._now == apart._now


def test_until_it_has_learned_something_it_evicts_the_oldest_leaf() -> None:
    manager = make_manager("reuse-index", 4, record_events=True)
    for first in (1, 2):
        request(manager, chain((first, first)))
    manager.touch(chain((1, 1)))
    request(manager, chain((3,)))
    assert manager.lookup([key((1, 1)), key((2,)), key((2, 2)), key((3,))]) == bytes([READY, READY, 0, READY])


def test_it_finds_nearly_what_lru_does_where_prompts_longer_than_the_tier_come_back_at_once_or_never() -> None:
    random, managers = Random(1), (make_manager("lru", 145), make_manager("reuse-index", 145))
    found, agent = [0, 0], 0
    for _ in range(400):
        prompt = numbered(*range(200 * agent, 200 * agent + 200))
        for at, manager in enumerate(managers):
            found[at] += len(manager.lookup_run(prompt))
            request(manager, prompt)
        agent += random.random() < 0.5
    assert found[1] > 0.9 * found[0] > 0


def test_learning_survives_a_reset() -> None:
    manager = make_manager("reuse-index", 16)
    for number in range(300):
        request(manager, [*numbered(*range(4)), *numbered(number + 1_000)])
        request(manager, numbered(*range(10_000 + 4 * number, 10_004 + 4 * number)))
    assert isinstance(manager, TierManager)
    before = manager.policy._model.index  # type: ignore[attr-defined]  # the policy is a ReuseIndexPolicy
    assert before[0] != TierManager(16, ReuseIndexPolicy).policy._model.index[0]  # type: ignore[attr-defined]
    assert manager.reset()
    assert manager.policy._model.index is before  # type: ignore[attr-defined]
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


@given(risks=st.lists(st.floats(0, 0.5), min_size=NUM_AGES, max_size=NUM_AGES), length=st.sampled_from([0.0, 3.0, 1e4]))
def test_the_index_is_the_best_ratio_of_reuse_to_time_over_all_horizons(risks: list[float], length: float) -> None:
    edges = [0.0, *(2.0**age for age in range(1, NUM_AGES + 1))]
    hazards = [risk / (end - start) for risk, start, end in zip(risks, edges, edges[1:], strict=False)]
    index = _reuse_index(np.array([hazards]), length)[0]
    for age in (0, 1, 5, 20, NUM_AGES - 1):
        alive, spent, best = 1.0, 0.0, 0.0
        for bucket in range(age, NUM_AGES):
            width, rate = edges[bucket + 1] - edges[bucket], hazards[bucket]
            survive = np.exp(-rate * width)
            spent += alive * (width if rate * width < 1e-9 else (1 - survive) / rate)
            alive *= survive
            best = max(best, (1 - alive) / (spent + length))
        assert index[age] == pytest.approx(best, rel=1e-4, abs=1e-13)


def test_what_comes_back_soon_is_worth_more_than_what_comes_back_late_or_never() -> None:
    model = ReuseModel(num_classes=4, family_size=1, capacity=100)
    now = 0
    for turn in range(2_000):
        for chunk_class, tag in enumerate([turn % 4, 1_000 + turn % 100, 2_000 + turn]):
            model.observe_each([tag], [chunk_class], now, now)
        now += 3
        model.num_requests += 1
    while not model.fit(now, set):
        pass
    soon, late, never, unknown = (model.index[chunk_class][0] for chunk_class in range(4))
    assert soon > 5 * late > 25 * never
    assert never < unknown < soon, "a class without chunks is believed to be like all of them"
    assert not model.fit(now, set), "nothing new to learn yet"


def test_a_sample_that_is_full_gets_thinner_and_then_forgets_the_oldest() -> None:
    model = ReuseModel(num_classes=1, family_size=1, capacity=1)
    generator = np.random.default_rng(0)
    ends = [model.sample_end]
    for now in range(0, 1 << 20, 8):
        for tag in generator.integers(0, 1 << 32, 8).tolist():
            if tag < model.sample_end:
                model.observe_each([tag], [0], now, now)
        ends.append(model.sample_end)
    assert ends[0] > ends[-1] and ends == sorted(ends, reverse=True)
    assert len(model._open) <= 16_384
    assert min(model._starts) > 1 << 18, "the oldest records are gone"
    assert len(np.unique(model._starts)) > 8_000, "records are of different times"


@pytest.mark.parametrize(("age", "bucket"), [(1, 0), (2, 1), (3, 1), (4, 2), (1 << 39, 39), ((1 << 39) + 1, 39)])
def test_ages_are_told_apart_by_powers_of_two(age: int, bucket: int) -> None:
    assert age_bucket(age) == bucket


@examples(40)
@given(data=st.data())
def test_the_leaf_that_is_worth_least_goes_until_a_newcomer_is_worth_less(data: st.DataObject) -> None:
    """Prefixes that branch, of classes of any worth, some of whose chunks are in use."""
    capacity = data.draw(st.integers(1, 24))
    table = ChunkTable(capacity)
    policy = ReuseIndexPolicy(table)
    worth_of = data.draw(st.lists(st.sampled_from([0.1, 0.2, 0.4, 0.8]), min_size=80, max_size=80))
    policy._model.index.update({number: [worth] * NUM_AGES for number, worth in enumerate(worth_of)})
    policy._model.next_fit = 1 << 40
    policy._use_index()
    for number in range(capacity):
        slots, parent = table.take(1), data.draw(st.sampled_from([NO_SLOT, *range(number)]))
        table.place(numbered(number), slots, parent)
        policy.add(numbered(number), parent, slots)
        table.publish(slots)
        if data.draw(st.booleans()):
            policy.touch(table.ancestors(slots[0]), is_whole=data.draw(st.booleans()))
    table.pin(data.draw(st.lists(st.integers(0, capacity - 1), max_size=4)))
    worth = data.draw(st.sampled_from([0.1, 0.3, 1.0]))

    def leaves() -> dict[int, float]:
        idle = [slot for slot in table.slots_in(READY_SLOT) if not table.children[slot] and not table.pins[slot]]
        return {slot: worth_of[run.kind & 255] for slot in idle if (run := policy.runs.run_of[slot]) is not None}

    for _ in range(capacity):
        before = leaves()
        num_evicted, is_refused = policy._evict(1, worth)
        if num_evicted:
            (gone,) = (slot for slot in before if table.keys[slot] is None)
            assert before[gone] == min(before.values()) <= worth
        else:
            assert all(left > worth for left in before.values()) and (is_refused or not before)
        table.evicted.clear()
        table.check()
        policy.check()


@pytest.mark.parametrize("num_others", [0, 100])  # one by one, and as arrays
def test_what_is_known_of_absent_chunks_is_found_by_their_tags(num_others: int) -> None:
    absent = AbsentChunks(16)
    others = [number << 16 | number for number in range(1, 1 + num_others)]
    first, second, third = tags = [0x12345678, 0x23456789, 0x3456789A]
    absent.remember_each([first, second, *others], [3, 5, *([1] * num_others)], [100, 200, *([300] * num_others)])
    found = dict(absent.recall([*tags, *others], 1_000))
    assert {at: kind for at, kind in found.items() if at < len(tags)} == {0: 4 * NEW + 40 + 5, 1: 6 * NEW + 40 + 5}
    assert len(found) == 2 + num_others
    absent.remember_each([third], [255], [1 << 32])
    assert list(absent.recall([third], (1 << 32) + 70)) == [(0, 16 * NEW + 60 + 4)], "of many uses, it knows 15"
    absent.remember_each([*others, third, third], [*([1] * num_others), 2, 3], [*([300] * num_others), 1, 1 << 32])
    assert dict(absent.recall([third], (1 << 32) + 70)) == {0: 4 * NEW + 40 + 4}, "the last one counts"
    every_place = list(range(1 << 16))
    assert not list(AbsentChunks(16).recall(every_place, 0)), "something is known before anything was told"


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


def serve_agents(*, told: bool, last: TurnEnd = TurnEnd.ANSWER) -> int:
    """Agents, every second of which comes back once; return how many chunks were found.

    Nothing but the end of its turn tells which ones do.
    """
    manager = make_manager("reuse-index", 24)
    manager.admit_all()
    num_found = 0
    for number in range(400):
        turns = [(number, number % 2 == 0), *([(number - 16, False)] if number % 2 == 0 and number >= 16 else [])]
        for agent, goes_on in turns:
            prompt = numbered(*range(4 * agent, 4 * agent + 4))
            found = manager.touch(prompt)
            num_found += found
            manager.prepare_store(prompt[found:], prompt[found - 1] if found else None).commit()
            manager.end_turn(prompt, (TurnEnd.TOOL_CALL if goes_on else last) if told else TurnEnd.UNKNOWN)
    manager.check()
    return num_found


@pytest.mark.parametrize("last", [TurnEnd.ANSWER, TurnEnd.LENGTH])
def test_how_turns_end_decides_what_stays_whatever_the_ends_mean(last: TurnEnd) -> None:
    assert serve_agents(told=True, last=last) > 1.4 * serve_agents(told=False)


def test_each_call_learns_a_bounded_part_and_meanwhile_there_may_be_other_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, random, in_use = ReuseModel(NUM_CLASSES, DETAILS, 1000, len(ADDED_BY_END)), Random(5), set(range(3, 180, 2))
    for now in range(0, 600_000, 100):
        tags = [
            random.randrange(1 << 32) if at % 2 else at << 12 for at in range(now // 100 % 50, now // 100 % 50 + 20)
        ]
        model.observe_each(tags, [random.randrange(NUM_CLASSES) for _ in tags], now, now)
        model.note_end(tags, now // 100 % 3)
    work: list[int] = []
    for name in ("_ages", "_hazards", "_factors"):
        monkeypatch.setattr(model, name, counted(getattr(model, name), work, lambda *_: 16))
    monkeypatch.setattr(reuse_model, "_reuse_index", counted(_reuse_index, work, lambda hazards, _: len(hazards)))
    expected = list(model._fit(600_000, lambda: in_use))[-1]
    assert expected is not None and sum(work) == 3 * 16 + len(in_use)
    model.next_fit = 0
    calls: list[int] = []
    is_done = False
    while not is_done:
        work.clear()
        is_done = model.fit(600_000 + len(calls), lambda: in_use)
        calls.append(sum(work))
        if len(calls) == 1:
            model.observe_each(list(range(9000)), [0] * 9000, 600_000, 600_000)
    assert max(calls) == 16, "one walk over the records, or so many rows"
    assert calls[-1] == 0, "the call that replaces the index does nothing else"
    assert model.index == expected
    assert not model.fit(600_001, set), "it learns anew only when it is time to"


def test_a_step_of_many_prompts_learns_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(ReuseModel, "fit", counted(ReuseModel.fit, calls, lambda *_: 1))
    manager = TierManager(1 << 15, ReuseIndexPolicy)
    for step in range(20):
        calls.clear()
        offers = [StoreOffer(numbered(*range(step << 10 | at << 4, (step << 10 | at << 4) + 9))) for at in range(60)]
        manager.prepare_stores(offers).commit()
        assert len(calls) <= 1 + 540 // 256


def counted(function: Callable[..., Any], work: list[int], amount: Callable[..., int]) -> Callable[..., Any]:
    """The function, which notes how much it was given to do."""

    def call(*arguments: Any) -> Any:
        work.append(amount(*arguments))
        return function(*arguments)

    return call
