"""Our managers pass the suite, the example does, and those that break a promise do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from cargohold import ConfigError, OffloadConfig
from cargohold.blocks import READY
from cargohold.cache import ChunkPins, ForwardingManager, OffloadManager, SlotReservation, StoreOffer, make_manager
from cargohold.cache.policies import POLICIES
from cargohold.lab.conformance import ManagerConformance
from examples.own_manager.least_recent import LeastRecent


class Ours(ManagerConformance):
    num_seeds: ClassVar[int] = 4
    policy: ClassVar[str]

    def manager(self, capacity: int, *, record_events: bool) -> OffloadManager:
        return make_manager(self.policy, capacity, record_events=record_events)


class TestReuseIndex(Ours):
    policy = "reuse-index"


class TestLRU(Ours):
    policy = "lru"


class TestARC(Ours):
    policy = "arc"


class TestFIFO(Ours):
    policy = "fifo"


def test_all_policies_are_here() -> None:
    assert {suite.policy for suite in Ours.__subclasses__()} == set(POLICIES)


class TestLeastRecent(ManagerConformance):
    def manager(self, capacity: int, *, record_events: bool) -> OffloadManager:
        return LeastRecent(capacity, record_events=record_events)


class FindsWhatIsBeingWritten(ForwardingManager):
    def prepare_stores(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        handle = super().prepare_stores(offers)
        handle.commit()
        again: SlotReservation = super().prepare_stores(())
        again.keys, again.slots = handle.keys, handle.slots
        return again


class GivesSlotsAwayTwice(ForwardingManager):
    def prepare_load(self, keys: Sequence[bytes]) -> ChunkPins:
        handle = super().prepare_load(keys)
        slots = tuple(handle.slots)
        handle.release()
        unpinned: ChunkPins = super().prepare_load(())
        unpinned.keys, unpinned.slots = keys, slots
        return unpinned


class ForgetsItsGeneration(ForwardingManager):
    @property
    def generation(self) -> int:
        return 7


class MissesItsLast(ForwardingManager):
    def lookup(self, keys: Sequence[bytes]) -> bytes:
        found = super().lookup(keys)
        return found.replace(bytes([READY]), bytes([0])) if self.inner.num_ready == 1 else found


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (FindsWhatIsBeingWritten, "test_what_is_stored_is_found_only_once_it_is_written"),
        (GivesSlotsAwayTwice, "test_every_slot_holds_its_chunk_under_any_traffic"),
        (ForgetsItsGeneration, "test_equal_generations_mean_equal_answers"),
        (MissesItsLast, "test_every_slot_holds_its_chunk_under_any_traffic"),
    ],
)
def test_one_that_breaks_a_promise_is_found(wrong: type[ForwardingManager], test: str) -> None:
    class Suite(ManagerConformance):
        __test__ = False

        def manager(self, capacity: int, *, record_events: bool) -> OffloadManager:
            return wrong(make_manager("lru", capacity, record_events=record_events))

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


@pytest.mark.parametrize("key", ["manager", "transfer"])
@pytest.mark.parametrize(
    ("name", "said"), [("mine", "MODULE:FACTORY"), ("no_such:Thing", "cannot be imported"), ("sys:path", "called")]
)
def test_an_option_that_names_no_factory_is_refused_by_name(key: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*{said}"):
        OffloadConfig(host_bytes="1MiB", **{key: name})  # type: ignore[arg-type]  # either is a name
