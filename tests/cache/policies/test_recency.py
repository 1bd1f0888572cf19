"""LRU and FIFO make exactly the choices of models too plain to be wrong."""

from __future__ import annotations

from collections.abc import Callable

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

from cargohold.cache import ChunkPins, ChunksRemoved, SlotReservation, TierManager, make_manager
from cargohold.cache.chunk_table import ChunkTable
from cargohold.cache.policies import ReplacementPolicy
from cargohold.cache.policies.base import FIFOPolicy, LRUPolicy
from tests.cache.common import DEPTH, chain
from tests.cache.policies.naive_policies import NaiveFIFO, NaiveLRU
from tests.effort import examples

MakePolicy = Callable[[ChunkTable], ReplacementPolicy]

TWINS: dict[str, tuple[MakePolicy, MakePolicy]] = {"lru": (LRUPolicy, NaiveLRU), "fifo": (FIFOPolicy, NaiveFIFO)}
paths = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


class Twins:
    """Two managers that must never differ, one with the real policy and one with the model."""

    def __init__(self, capacity: int, policies: tuple[MakePolicy, MakePolicy]) -> None:
        self.managers = [TierManager(capacity, make, record_events=True) for make in policies]
        self.stores: list[list[SlotReservation]] = []
        self.loads: list[list[ChunkPins]] = []

    def store(self, keys: list[bytes], parent: bytes | None) -> None:
        real, naive = (manager.prepare_store(keys, parent) for manager in self.managers)
        assert (real.keys, real.slots, real.deferred) == (naive.keys, naive.slots, naive.deferred)
        self.stores.append([real, naive])

    def compare(self) -> None:
        for manager in self.managers:
            manager.check()
        real, naive = (manager.take_events() for manager in self.managers)
        assert real == naive


class TwinMachine(RuleBasedStateMachine):
    """Any operations, in any order."""

    policies: tuple[MakePolicy, MakePolicy]

    @initialize(capacity=st.integers(1, 20))
    def start(self, capacity: int) -> None:
        self.twins = Twins(capacity, type(self).policies)

    @rule(path=paths, first=st.integers(0, DEPTH))
    def store(self, path: tuple[int, ...], first: int) -> None:
        keys = chain(path)
        first = min(first, len(keys))
        self.twins.store(keys[first:], keys[first - 1] if first else None)

    @precondition(lambda self: self.twins.stores)
    @rule(data=st.data(), works=st.booleans())
    def end_store(self, data: st.DataObject, works: bool) -> None:
        for store in self.twins.stores.pop(data.draw(st.integers(0, len(self.twins.stores) - 1))):
            (store.commit if works else store.forfeit)()

    @rule(path=paths)
    def touch(self, path: tuple[int, ...]) -> None:
        for manager in self.twins.managers:
            manager.touch(chain(path))

    @rule(path=paths)
    def load(self, path: tuple[int, ...]) -> None:
        keys = chain(path)
        keys = keys[: len(self.twins.managers[0].lookup_run(keys))]
        self.twins.loads.append([manager.prepare_load(keys) for manager in self.twins.managers])

    @precondition(lambda self: self.twins.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        for load in self.twins.loads.pop(data.draw(st.integers(0, len(self.twins.loads) - 1))):
            load.release()

    @rule(path=paths)
    def renew(self, path: tuple[int, ...]) -> None:
        for manager in self.twins.managers:
            manager.renew(chain(path)[-1:])

    @rule(path=paths, first=st.integers(0, DEPTH))
    def drop(self, path: tuple[int, ...], first: int) -> None:
        real, naive = (manager.drop(chain(path)[first:]) for manager in self.twins.managers)
        assert real == naive

    @rule(path=paths)
    def remove_the_first_ones(self, path: tuple[int, ...]) -> None:
        ready = len(self.twins.managers[0].lookup_run(chain(path)))
        for manager in self.twins.managers:
            manager.remove(chain(path)[: min(2, ready)])

    @invariant()
    def are_the_same(self) -> None:
        self.twins.compare()


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", TWINS)
def test_evicts_what_the_model_evicts_and_in_its_order(name: str) -> None:
    machine = type("Machine", (TwinMachine,), {"policies": TWINS[name]})
    run_state_machine_as_test(machine, settings=examples(10, stateful_step_count=50))


@pytest.mark.parametrize("name", TWINS)
def test_a_long_history_of_a_large_tier_is_evicted_in_the_order_of_the_model(name: str) -> None:
    """Long enough that the oldest are picked out in several passes."""
    capacity = 400
    twins = Twins(capacity, TWINS[name])
    for at in range(100):
        path = chain_of_numbers(at % 97, 40 + at % 31)
        for manager in twins.managers:
            manager.touch(path)
        length = len(twins.managers[0].lookup_run(path))
        twins.store(path[length:], path[length - 1] if length else None)
        for store in twins.stores.pop():
            store.commit()
    twins.compare()
    assert twins.managers[0].num_ready == capacity


def chain_of_numbers(seed: int, length: int) -> list[bytes]:
    """A long path; the first eight chunks are shared by every third one."""
    return chain((seed % 3,) * 8 + (seed,) * (length * 3))


def test_lru_evicts_the_end_of_the_oldest_prefix_first() -> None:
    manager = make_manager("lru", 6, record_events=True)
    for path in ((0, 0, 0), (1, 1, 1)):
        store(manager, path)
    manager.touch(chain((0, 0, 0)))
    manager.take_events()
    store(manager, (2, 2, 2))
    assert evicted(manager) == chain((1, 1, 1))[::-1]
    store(manager, (3,))
    assert evicted(manager) == chain((0, 0, 0))[2:]


def test_fifo_does_not_care_for_use() -> None:
    manager = make_manager("fifo", 6, record_events=True)
    for path in ((0, 0, 0), (1, 1, 1)):
        store(manager, path)
    manager.touch(chain((0, 0, 0)))
    manager.take_events()
    store(manager, (2, 2))
    assert evicted(manager) == chain((0, 0, 0))[:0:-1]


def test_lru_uses_a_prefix_again_that_still_grows_after_many_others_were_used() -> None:
    manager = make_manager("lru", 16, record_events=True)
    store(manager, (0, 0))
    for other in range(1, 8):
        store(manager, (other, other))
    store(manager, (0, 0, 0, 0))
    manager.take_events()
    store(manager, (9, 9))
    assert evicted(manager) == chain((2, 2))[::-1], "the growing prefix is not the oldest any more"


def store(manager: TierManager, path: tuple[int, ...]) -> None:
    keys = chain(path)
    length = len(manager.lookup_run(keys))
    handle = manager.prepare_store(keys[length:], keys[length - 1] if length else None)
    assert len(handle.keys) == len(keys) - length
    handle.commit()


def evicted(manager: TierManager) -> list[bytes]:
    return [key for event in manager.take_events() if isinstance(event, ChunksRemoved) for key in event.keys]
