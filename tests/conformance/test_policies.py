"""Our own policies pass the suite that others inherit; broken ones do not."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar

import pytest

from cargohold.cache.chunk_table import ChunkTable
from cargohold.cache.policies import ReplacementPolicy
from cargohold.cache.policies.arc import ARCPolicy
from cargohold.cache.policies.base import FIFOPolicy, LRUPolicy
from cargohold.cache.policies.reuse_index import ReuseIndexPolicy
from cargohold.lab.conformance import PolicyConformance


class Quick(PolicyConformance):
    """A few random streams; the long tests play more than authors of policies do by default."""

    num_seeds: ClassVar[int] = 2


class TestLRU(Quick):
    def policy(self, table: ChunkTable) -> ReplacementPolicy:
        return LRUPolicy(table)


class TestARC(Quick):
    def policy(self, table: ChunkTable) -> ReplacementPolicy:
        return ARCPolicy(table)


class TestReuseIndex(Quick):
    def policy(self, table: ChunkTable) -> ReplacementPolicy:
        return ReuseIndexPolicy(table)


class TestFIFO(Quick):
    def policy(self, table: ChunkTable) -> ReplacementPolicy:
        return FIFOPolicy(table)


@pytest.mark.long
class TestLRULonger(TestLRU):
    num_seeds: ClassVar[int] = 24


@pytest.mark.long
class TestARCLonger(TestARC):
    num_seeds: ClassVar[int] = 24


@pytest.mark.long
class TestReuseIndexLonger(TestReuseIndex):
    num_seeds: ClassVar[int] = 24


@pytest.mark.long
class TestFIFOLonger(TestFIFO):
    num_seeds: ClassVar[int] = 24


class Ruthless(LRUPolicy):
    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        pins, self.table.pins = self.table.pins, array("i", [0]) * self.table.capacity
        refused = super().make_room(keys, parent, num_slots)
        self.table.pins = pins
        return refused


class Greedy(LRUPolicy):
    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        return super().make_room(keys, parent, num_slots + 1)


class Uprooting(LRUPolicy):
    """Removes the oldest chunk whatever comes behind it."""

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        table, oldest = self.table, self._order.oldest
        if oldest is not None and not table.pins[oldest.entries[0]]:
            slots = oldest.entries[:1]
            self.drop(slots)
            table.evicted += table.keys_at(slots)
            table.remove(slots)
        return False


class Unforgetting(LRUPolicy):
    def drop(self, slots: Sequence[int]) -> None:
        del slots


class Moody(FIFOPolicy):
    moods: ClassVar[list[bool]] = []

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        self.moods.append(True)
        return super().make_room(keys, parent, 1 if len(self.moods) % 2 else num_slots)


class Guessing(LRUPolicy):
    chance: ClassVar[Random] = Random(1)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        return super().make_room(keys, parent, self.chance.randint(1, num_slots))


class Stubborn(LRUPolicy):
    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        return False


class Dismissive(LRUPolicy):
    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        super().make_room(keys, parent, num_slots)
        return True


class Mumbling(LRUPolicy):
    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        super().make_room(keys, parent, num_slots)
        return None  # type: ignore[return-value]  # what a policy without types may do


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Ruthless, "test_any_traffic_keeps_every_rule"),
        (Greedy, "test_any_traffic_keeps_every_rule"),
        (Uprooting, "test_any_traffic_keeps_every_rule"),
        (Uprooting, "test_no_prefix_has_holes"),
        (Unforgetting, "test_any_traffic_keeps_every_rule"),
        (Mumbling, "test_any_traffic_keeps_every_rule"),
        (Moody, "test_the_same_traffic_has_the_same_victims"),
        (Guessing, "test_the_same_traffic_has_the_same_victims"),
        (Stubborn, "test_idle_chunks_make_room_or_are_worth_more"),
        (Dismissive, "test_what_is_busy_has_offers_come_again"),
    ],
)
def test_broken_policies_fail(broken: type[ReplacementPolicy], test: str) -> None:
    class Suite(PolicyConformance):
        __test__ = False

        def policy(self, table: ChunkTable) -> ReplacementPolicy:
            return broken(table)

    suite = Suite()
    calls: dict[str, Callable[[], object]] = {
        "test_any_traffic_keeps_every_rule": lambda: [
            suite.test_any_traffic_keeps_every_rule(capacity) for capacity in (1, 2, 5, 30)
        ],
        "test_what_is_busy_has_offers_come_again": (
            lambda: suite.test_what_is_busy_has_offers_come_again(is_written=True)
        ),
    }
    with pytest.raises(AssertionError):
        calls.get(test, getattr(suite, test))()


def test_what_a_policys_own_check_finds_is_told_as_that() -> None:
    class Suite(PolicyConformance):
        __test__ = False

        def policy(self, table: ChunkTable) -> ReplacementPolicy:
            return Unforgetting(table)

    with pytest.raises(AssertionError, match=r"the policy's own check fails: slots \[.*\] are in use"):
        Suite().test_any_traffic_keeps_every_rule(5)
