"""Our own policies pass the suite that others inherit; broken ones do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest

from cargohold.conformance import PolicyConformance
from cargohold.offload.policy import make_policy
from cargohold.offload.policy.arc import ARCPolicy
from cargohold.offload.policy.base import NO_SLOTS, BusyCounts, Offer, ReplacementPolicy, Room, Slots
from cargohold.offload.policy.fifo import FIFOPolicy
from cargohold.offload.policy.lru import LRUPolicy
from cargohold.offload.policy.reuse_index import ReuseIndexPolicy


class TestLRU(PolicyConformance):
    def policy(self, capacity: int) -> ReplacementPolicy:
        return LRUPolicy(capacity)


class TestARC(PolicyConformance):
    keeps_prefixes_whole: ClassVar[bool] = False

    def policy(self, capacity: int) -> ReplacementPolicy:
        return ARCPolicy(capacity)


class TestReuseIndex(PolicyConformance):
    def policy(self, capacity: int) -> ReplacementPolicy:
        return ReuseIndexPolicy(capacity)


class TestFIFO(PolicyConformance):
    keeps_prefixes_whole: ClassVar[bool] = False

    def policy(self, capacity: int) -> ReplacementPolicy:
        return make_policy("fifo", capacity)


class Ruthless(LRUPolicy):
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        return super().make_room_for(offer, num_slots, np.zeros_like(busy))


class Greedy(LRUPolicy):
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        return super().make_room_for(offer, num_slots + 1, busy)


class RuthlessToOthers(LRUPolicy):
    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:
        return [
            self.make_room_for(offer, missing, busy) if missing else Room(NO_SLOTS, refused=False)
            for offer, missing in zip(offers, num_slots, strict=True)
        ]


class Speechless(LRUPolicy):
    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:
        return super().make_room(offers, num_slots, busy)[:1]


class Unforgetting(LRUPolicy):
    def drop(self, slots: Slots) -> None:
        del slots


class Moody(FIFOPolicy):
    moods: ClassVar[list[bool]] = []

    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        self.moods.append(True)
        return super().make_room_for(offer, 1 if len(self.moods) % 2 else num_slots, busy)


class Guessing(LRUPolicy):
    chance: ClassVar[np.random.Generator] = np.random.default_rng(1)

    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        super().touch(self.chance.permutation(slots), is_whole=is_whole)


class Stubborn(LRUPolicy):
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        return Room(super().make_room_for(offer, num_slots, busy).victims[:0], refused=False)


class Dismissive(LRUPolicy):
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        return super().make_room_for(offer, num_slots, busy)._replace(refused=True)


class Boastful(FIFOPolicy):
    evicts_ends_alone: ClassVar[bool] = True


class Listing(LRUPolicy):
    def make_room_for(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:
        room = super().make_room_for(offer, num_slots, busy)
        return room._replace(victims=room.victims.astype(np.float64))


class MostRecent(LRUPolicy):
    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        super().touch(slots[::-1], is_whole=is_whole)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Ruthless, "test_any_traffic_keeps_every_rule"),
        (Greedy, "test_any_traffic_keeps_every_rule"),
        (RuthlessToOthers, "test_any_traffic_keeps_every_rule"),
        (RuthlessToOthers, "test_offers_that_come_together_spare_each_others_prefixes"),
        (Speechless, "test_any_traffic_keeps_every_rule"),
        (Unforgetting, "test_any_traffic_keeps_every_rule"),
        (Boastful, "test_any_traffic_keeps_every_rule"),
        (Listing, "test_any_traffic_keeps_every_rule"),
        (Moody, "test_the_same_traffic_has_the_same_victims"),
        (Guessing, "test_the_same_traffic_has_the_same_victims"),
        (Stubborn, "test_idle_chunks_make_room_or_are_worth_more"),
        (Dismissive, "test_what_is_busy_has_offers_come_again"),
        (MostRecent, "test_no_prefix_has_holes"),
    ],
)
def test_broken_policies_fail(broken: type[ReplacementPolicy], test: str) -> None:
    class Suite(PolicyConformance):
        __test__ = False

        def policy(self, capacity: int) -> ReplacementPolicy:
            return broken(capacity)

    suite = Suite()
    calls: dict[str, Callable[[], None]] = {
        "test_any_traffic_keeps_every_rule": lambda: suite.test_any_traffic_keeps_every_rule(5),
        "test_offers_that_come_together_spare_each_others_prefixes": (
            lambda: suite.test_offers_that_come_together_spare_each_others_prefixes(5)
        ),
        "test_what_is_busy_has_offers_come_again": (
            lambda: suite.test_what_is_busy_has_offers_come_again(is_written=True)
        ),
    }
    with pytest.raises(AssertionError):
        calls.get(test, getattr(suite, test))()


def test_what_a_policys_own_check_finds_is_told_as_that() -> None:
    class Suite(PolicyConformance):
        __test__ = False

        def policy(self, capacity: int) -> ReplacementPolicy:
            return Unforgetting(capacity)

    with pytest.raises(AssertionError, match=r"the policy's own check fails: slots \[.*\] are in use"):
        Suite().test_any_traffic_keeps_every_rule(5)
