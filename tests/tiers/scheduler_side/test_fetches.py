"""Fetches: chunks on their way from lower tiers to host memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.cache import SlotReservation, StoreOffer
from cargohold.protocol import TransferOutcome, metrics
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side import UNKNOWN, Chain, Fetch
from tests.tiers.scheduler_side.world import KEYS, World, key_of


def test_a_fetch_is_not_ready_before_all_workers_are_done() -> None:
    world = World(num_workers=3)
    world.learn(KEYS[:4])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    assert list(world.lower.lookup(KEYS[:4])) == [NOT_YET] * 4
    world.lower.note_report({load.job_id: (bytes([1, 1, 0, 1]), 2)}, {})
    world.lower.note_report({load.job_id: (bytes([1, 1, 1, 1]), 1)}, {})
    assert world.manager.num_ready == 0
    assert world.lower.end(load.job_id, TransferOutcome.DONE)
    assert list(world.manager.lookup(KEYS[:4])) == [READY, READY, ABSENT, READY]
    assert list(fetch.sources) == [KEYS[0], KEYS[1], KEYS[3]]
    assert world.manager.num_pins == 3
    world.manager.check()
    fetch.release()
    assert world.manager.num_pins == 0


def test_a_fetch_that_finds_no_slot_holds_nothing() -> None:
    world = World(capacity=4)
    world.learn(KEYS)
    busy = world.manager.prepare_store([key_of(1, at) for at in range(4)])
    assert world.lower.fetches.begin([Chain(0, KEYS, None)], ()) is None
    assert world.step() == [] and world.lower.is_idle
    before = world.manager.generation
    busy.forfeit()
    fetch = world.lower.fetches.begin([Chain(0, KEYS, None)], ())
    assert isinstance(fetch, Fetch) and world.manager.num_writing == 4
    assert world.manager.generation >= before


def test_a_fetch_that_found_slots_for_one_of_its_chains_goes_on_with_that() -> None:
    world = World(capacity=4)
    others = [key_of(1, at) for at in range(3)]
    world.learn([*KEYS[:4], *others])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None), Chain(0, others, None)], ())
    assert isinstance(fetch, Fetch) and not fetch.is_released
    (load,) = world.step()
    world.end(load, [True] * 4)
    assert list(world.manager.lookup(KEYS[:4])) == [READY] * 4 and world.manager.num_pins == 4
    fetch.release()


def test_a_long_chain_is_fetched_in_several_jobs_as_far_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(capacity=300)
    keys = [at.to_bytes(32, "big") + bytes(4) for at in range(400)]
    world.learn(keys)
    prepare_stores = world.host.prepare_stores
    parents: list[bytes | None] = []

    def noted(offers: Sequence[StoreOffer]) -> SlotReservation:
        parents.extend(offer.parent for offer in offers)
        return prepare_stores(offers)

    monkeypatch.setattr(world.host, "prepare_stores", noted)
    fetch = world.lower.fetches.begin([Chain(0, keys, None)], ())
    assert isinstance(fetch, Fetch) and fetch.num_running == 3
    loads = world.step()
    assert [load.keys for load in loads] == [tuple(keys[:128]), tuple(keys[128:256]), tuple(keys[256:300])]
    assert parents == [None, keys[127], keys[255]]
    for load in loads:
        world.end(load, [True] * len(load.keys))
    assert fetch.num_running == 0 and list(world.manager.lookup(keys[:301])) == [*[READY] * 300, ABSENT]
    fetch.release()


def test_a_chunk_that_is_being_fetched_is_not_fetched_again() -> None:
    world = World()
    world.learn(KEYS[:2])
    first = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    second = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    assert isinstance(first, Fetch) and isinstance(second, Fetch)
    assert (first.num_running, second.num_running) == (1, 0)
    (load,) = world.step()
    world.end(load, [True, True])
    first.release()
    second.release()
    assert world.manager.num_pins == 0 and world.lower.is_idle


def test_a_fetch_does_not_evict_what_is_pinned_for_it() -> None:
    world = World(capacity=4)
    world.keep(KEYS[:2])
    world.learn(KEYS[2:6])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[2:6], KEYS[1])], KEYS[:2])
    assert isinstance(fetch, Fetch)
    loads = [command for command in world.step() if command.kind is JobKind.LOAD]
    assert [command.keys for command in loads] == [tuple(KEYS[2:4])]
    assert list(world.manager.lookup(KEYS[:2])) == [READY, READY]


def test_a_released_fetch_is_cancelled_and_its_slots_are_free() -> None:
    world = World(capacity=4)
    world.learn(KEYS[:4])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    fetch.release()
    assert world.cancelled() == [load.job_id]
    assert world.cancelled() == []
    assert world.manager.num_writing == 4, "until the workers have let go of them"
    world.end(load, [False] * 4, TransferOutcome.ABANDONED)
    assert (world.manager.num_writing, world.manager.num_free) == (0, 4)
    assert list(world.lower.lookup(KEYS[:4])) == [READY] * 4, "the tier still has them"
    assert world.lower.tiers[0].stats[metrics.TIER_FAILURES.of("tier0")] == 0, "and is not to blame"


def test_chunks_that_arrive_for_a_released_fetch_are_ready_and_unpinned() -> None:
    world = World()
    world.learn(KEYS[:4])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    fetch.release()
    world.end(load, [True] * 4)
    assert list(world.manager.lookup(KEYS[:4])) == [READY] * 4
    assert world.manager.num_pins == 0


def test_a_fetch_that_is_released_before_its_job_is_sent_is_forgotten() -> None:
    world = World()
    world.learn(KEYS[:4])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    fetch.release()
    assert world.step() == []
    assert world.lower.is_idle and world.manager.num_free == 8


def test_a_fetch_released_before_its_job_is_sent_stays_released_when_others_are_released() -> None:
    world = World()
    world.learn(KEYS[:4])
    fetches = [world.lower.fetches.begin([Chain(0, [key], None)], ()) for key in KEYS[:4]]
    for fetch in fetches:
        assert isinstance(fetch, Fetch)
        fetch.release()
    assert world.step() == []
    assert world.lower.is_idle and world.manager.num_free == 8


def test_workers_are_told_once_of_a_cancelled_job_and_never_of_an_ended_one() -> None:
    world = World(capacity=16)
    world.keep(KEYS[:2])
    (store,) = world.step()
    assert world.manager.reset()
    assert world.cancelled() == [store.job_id]
    world.keep(KEYS[:2])
    (other,) = world.step()
    assert world.manager.reset()
    assert world.cancelled() == [other.job_id], "of the first they know"
    for job in (store, other):
        world.end(job, [False] * 2, TransferOutcome.ABANDONED)
    world.keep(KEYS[:2])
    (ended,) = world.step()
    assert world.manager.reset()
    world.end(ended, [True] * 2)
    assert world.cancelled() == []


def test_a_fetch_expires() -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    (load,) = world.step()
    world.end(load, [True, True])
    assert world.manager.num_pins == 2
    world.clock.advance(3.9)
    world.step()
    assert world.manager.num_pins == 2, "after the time to wait there is as much to be admitted"
    world.clock.advance(0.2)
    world.step()
    assert isinstance(fetch, Fetch) and fetch.is_released
    assert world.manager.num_pins == 0


def test_slots_of_a_job_stay_reserved_until_it_is_reported() -> None:
    world = World(num_workers=2)
    world.learn(KEYS[:2])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    (load,) = world.step()
    world.lower.note_report({load.job_id: (bytes([1, 1]), 1)}, {})
    for _ in range(9):
        world.clock.advance(9.0)
        world.step()
    assert fetch.is_released, "nobody waits any more"
    assert load.job_id in world.cancelled()
    assert world.manager.num_writing == 2 and not world.manager.num_pins
    world.jobs.clear()
    assert world.lower.end(load.job_id, TransferOutcome.FAILED)
    assert world.manager.num_writing == 0


def test_an_idle_tier_has_no_job_and_no_pin() -> None:
    world = World()
    seen = []

    def note() -> None:
        seen.append((world.lower.is_idle, world.lower.is_fetching))

    world.lower.probe(KEYS[:2])
    note()
    world.learn(KEYS[:2])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    note()
    (load,) = world.step()
    world.end(load, [True, False])
    note()
    fetch.release()
    note()
    world.keep(KEYS[2:3])
    world.step()
    note()
    assert seen == [(True, False), (False, True), (False, True), (True, False), (False, False)]
    stats = world.lower.take_stats()
    assert (stats[metrics.OTHER.of("tier0_loaded_chunks")], stats[metrics.NOT_LOADED.of("tier0")]) == (1, 1)
    assert not world.lower.take_stats(), "since the last time"


def test_a_load_of_a_released_fetch_still_counts_as_being_fetched() -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    (load,) = world.step()
    fetch.release()
    before = (world.lower.is_fetching, world.lower.is_settling, world.manager.reset())
    world.end(load, [False, False], TransferOutcome.ABANDONED)
    assert before == (True, True, False)
    assert (world.lower.is_fetching, world.manager.reset()) == (False, True)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_chunks_of_a_failed_load_are_probed_again_unless_it_was_cancelled(*, is_cancelled: bool) -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    (load,) = world.step()
    if is_cancelled:
        fetch.release()
    world.end(load, [True, False], TransferOutcome.FAILED)
    assert list(world.lower.lookup(KEYS[:2])) == [READY if is_cancelled else UNKNOWN] * 2


def test_chunks_loaded_from_a_farther_tier_are_written_to_nearer_ones() -> None:
    world = World(num_tiers=2)
    world.learn(KEYS[:3], tier=1)
    world.lower.fetches.begin([Chain(1, KEYS[:3], None)], ())
    (load,) = world.step()
    world.end(load, [True, False, True])
    assert [(job.tier, job.keys, job.parents) for job in world.step()] == [(0, (KEYS[0], KEYS[2]), (None, KEYS[1]))]


def test_one_of_several_fetches_is_cancelled_when_released_and_counted_once() -> None:
    world = World(capacity=16)
    world.learn(KEYS[:4])
    fetches = [world.lower.fetches.begin([Chain(0, KEYS[at : at + 2], None)], ()) for at in (0, 2)]
    loads = world.step()
    for _ in range(2):
        if fetches[0] is not None:
            fetches[0].release()
    assert world.cancelled() == [loads[0].job_id]
    world.end(loads[1], [True, False])
    world.end(loads[0], [False, False], TransferOutcome.ABANDONED)
    assert (world.manager.num_pins, world.manager.num_removed.total()) == (1, 0), "what did not arrive was never there"


def test_a_fetch_is_released_once() -> None:
    world = World()
    world.keep(KEYS[:2])
    fetch = world.lower.fetches.begin([], KEYS[:2])
    assert isinstance(fetch, Fetch)
    assert world.manager.num_pins == 2
    fetch.release()
    fetch.release()
    assert world.manager.num_pins == 0
