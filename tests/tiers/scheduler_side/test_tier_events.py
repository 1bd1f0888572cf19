"""Events: what is known of lower tiers."""

from __future__ import annotations

from cargohold.blocks import ABSENT, READY
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import TransferOutcome, metrics
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side import UNKNOWN, Chain, Fetch, TieringConfig, TierOptions
from cargohold.tiers.scheduler_side.tier_state import TierState
from tests.tiers.scheduler_side.world import KEYS, World, fail_loads, follow, written


def test_events_say_what_is_known_of_a_tier() -> None:
    world = World()
    world.learn(KEYS[:3])
    world.keep(KEYS[3:5])
    (store,) = world.step()
    world.end(store, [True, False])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    (load,) = world.step()
    world.end(load, [True, False])
    assert isinstance(fetch, Fetch)
    fetch.release()
    assert follow(world, set()) == {KEYS[0], KEYS[2], KEYS[3]}


def test_no_event_is_kept_where_events_are_off() -> None:
    tier = TierState(TierOptions(name="tier"), 8, VirtualClock(), TieringConfig())
    tier.note_presence(KEYS[:4], [True] * 4)
    tier.note_presence(KEYS[:4], [False] * 4)
    assert tier.take_events() == []


def test_events_follow_what_is_known_of_a_tier_and_end_with_a_reset() -> None:
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [True, False])
    stats = world.lower.take_stats()
    assert (stats[metrics.STORED.of("tier0")], stats[metrics.NOT_STORED.of("tier0")]) == (1, 1)
    known = follow(world, set())
    assert known == {KEYS[0]}
    for is_there in (False, True):
        world.lower.tiers[0].note_presence(KEYS[:1], [is_there])
        known = follow(world, known)
        assert known == ({KEYS[0]} if is_there else set())
    assert world.manager.reset()
    assert follow(world, known) == set()


def test_chunks_of_a_suspended_tier_are_announced_as_gone_and_again_when_found() -> None:
    world = World(capacity=16)
    written(world, KEYS[:4])
    known = follow(world, set())
    assert known == set(KEYS[:4])
    for at in range(3):
        assert known == set(KEYS[:4]), "a failure is not the end"
        world.lower.probe([KEYS[5 + at]])
        (probe,) = world.step()
        world.end(probe, [False], TransferOutcome.FAILED)
        known = follow(world, known)
    assert known == set(), "nobody can load anything from it"
    for cooldown in (11, 120):  # it stays away
        world.wait(cooldown)
        world.lower.probe(KEYS[:2])
        (probe,) = world.step()
        world.end(probe, [False] * 2, TransferOutcome.ABANDONED)
        known = follow(world, known)
        assert known == set()
    world.wait(120)
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    world.end(probe, [True, False])
    known = follow(world, known)
    assert known == {KEYS[0]}
    written(world, KEYS[8:9])
    known.add(KEYS[8])
    world.manager.touch(KEYS[:4])
    (touch,) = (command for command in world.step() if command.kind is JobKind.TOUCH)
    world.end(touch, [key in {KEYS[0], KEYS[3]} for key in touch.keys])
    assert follow(world, known) == {KEYS[0], KEYS[3], KEYS[8]}, "of what is asked for, what is there"


def test_chunks_written_while_loads_are_suspended_are_announced_when_they_can_be_loaded() -> None:
    world = World(capacity=16)
    fail_loads(world)
    known = follow(world, set())
    written(world, KEYS[4:6])
    known = follow(world, known)
    assert known == set(), "nobody can load it"
    world.wait(1.0)
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:1], None)], ())
    (trial,) = world.step()
    world.end(trial, [True])
    assert fetch is not None
    fetch.release()
    assert follow(world, known) == {KEYS[0]}
    world.clock.advance(11.0)
    world.manager.touch(KEYS[4:6])
    (touch,) = world.step()
    world.end(touch, [True, True])
    assert follow(world, {KEYS[0]}) == {KEYS[0], KEYS[4], KEYS[5]}, "they were found"


def test_a_chunk_that_one_worker_loses_before_another_has_stored_it_is_not_announced_for_good() -> None:
    world = World(num_workers=2)
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.lower.note_report({store.job_id: (bytes([1, 1]), 1)}, {})
    world.lower.note_lost(0, KEYS[:1])
    world.lower.note_report({store.job_id: (bytes([1, 1]), 1)}, {})
    assert world.lower.end(store.job_id, TransferOutcome.DONE)
    assert follow(world, set()) == {KEYS[1]}
    assert world.lower.lookup(KEYS[:1]) == bytes([ABSENT])


def test_a_chunk_that_is_lost_before_the_end_of_its_job_is_told_is_not_announced_for_good() -> None:
    # Answers come with a worker's message of one step, and the end of their job may come with that of a later one.
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.lower.note_report({store.job_id: (bytes([1, 1]), 1)}, {})
    world.lower.note_lost(0, KEYS[:1])
    assert world.lower.end(store.job_id, TransferOutcome.DONE)
    assert follow(world, set()) == {KEYS[1]}
    assert world.lower.lookup(KEYS[:1]) == bytes([ABSENT])


def test_a_tier_that_loses_everything_before_the_end_of_a_job_is_told_is_not_believed_to_have_its_chunks() -> None:
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.lower.note_report({store.job_id: (bytes([1, 1]), 1)}, {})
    world.lower.note_emptied([0])
    assert world.lower.end(store.job_id, TransferOutcome.DONE)
    assert follow(world, set()) == set()
    assert READY not in world.lower.lookup(KEYS[:2])


def test_a_chunk_that_is_lost_and_written_again_before_another_worker_has_answered_is_announced() -> None:
    world = World(num_workers=2)
    world.lower.probe(KEYS[:1])
    (probe,) = world.step()
    world.lower.note_report({probe.job_id: (bytes([1]), 1)}, {})
    world.lower.note_lost(0, KEYS[:1])
    world.keep(KEYS[:1])
    (store,) = world.step()
    world.end(store, [True])
    known = follow(world, set())
    assert known == {KEYS[0]}
    world.lower.note_report({probe.job_id: (bytes([1]), 1)}, {})
    assert world.lower.end(probe.job_id, TransferOutcome.DONE)
    assert follow(world, known) == {KEYS[0]}
    assert world.lower.lookup(KEYS[:1]) == bytes([READY])


def test_what_a_tier_has_lost_is_not_looked_for_there() -> None:
    world = World()
    world.learn(KEYS[:3])
    known = follow(world, set())
    world.lower.note_lost(0, [KEYS[1], KEYS[7]])
    assert follow(world, known) == {KEYS[0], KEYS[2]}
    assert world.lower.lookup(KEYS[:3]) == bytes([READY, ABSENT, READY])
    assert world.lower.lookup([KEYS[7]]) == bytes([UNKNOWN]), "nothing was known of it"


def test_a_tier_that_has_lost_everything_has_what_was_stored_since() -> None:
    world = World()
    written(world, KEYS[:2])
    known = follow(world, set())
    world.keep(KEYS[2:3])
    (store,) = world.step()
    world.lower.note_emptied([0])
    world.end(store, [True])
    assert follow(world, known) == {KEYS[2]}
