"""Look-ups in lower tiers: what is asked, what is remembered, what is answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import Locality, TransferOutcome
from cargohold.tiers import JobKind, TierHealth
from cargohold.tiers.scheduler_side import UNKNOWN, Chain, Fetch, TieringConfig, TierOptions
from cargohold.tiers.scheduler_side.tier_state import MIN_ANSWERS, TierState
from tests.tiers.scheduler_side.world import KEYS, NUM_CHUNKS, World, key_of, written


def test_a_look_up_says_what_is_known_of_each_chunk() -> None:
    world = World(num_tiers=2)
    assert world.lower.lookup([KEYS[0]])[0] == UNKNOWN
    world.lower.probe(KEYS[:2])
    assert world.lower.lookup([KEYS[0]])[0] == NOT_YET
    (probe,) = world.step()
    assert (probe.kind, probe.tier, probe.keys) == (JobKind.PROBE, 0, tuple(KEYS[:2]))
    world.end(probe, [True, False])
    assert list(world.lower.lookup(KEYS[:2])) == [READY, UNKNOWN], "the next tier was not asked yet"
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    assert (probe.tier, probe.keys) == (1, (KEYS[1],))
    world.end(probe, [False])
    assert list(world.lower.lookup(KEYS[:2])) == [READY, ABSENT]


def test_a_probe_is_not_repeated_while_it_runs() -> None:
    world = World()
    world.lower.probe(KEYS[:2])
    world.lower.probe(KEYS[:3])
    assert [command.keys for command in world.step()] == [tuple(KEYS[:2]), (KEYS[2],)]
    assert world.step() == []


def test_a_look_up_of_more_chunks_than_a_tier_takes_at_a_time_becomes_several_probes() -> None:
    world = World(max_asked_chunks=5)
    world.keep([key_of(1, at) for at in range(8)])
    while commands := world.step():
        for command in commands:
            world.end(command, [True] * len(command.keys))
    probes = world.lower.probe(KEYS)
    asked = []
    while commands := world.step():
        assert len(commands) == 1, "what is written does not count, and what is asked for does"
        for command in commands:
            asked.append(command.keys)
            world.end(command, [True] * len(command.keys))
    assert asked == [tuple(KEYS[:5]), tuple(KEYS[5:10]), tuple(KEYS[10:])]
    assert all(probe.has_ended for probe in probes)
    assert list(world.lower.lookup(KEYS)) == [READY] * NUM_CHUNKS


def test_jobs_for_a_full_tier_keep_their_order_and_no_job_is_too_large_for_an_idle_tier() -> None:
    world = World(max_asked_chunks=5)
    world.lower.probe(KEYS[:4])
    (first,) = world.step()
    world.lower.probe(KEYS[4:9])
    world.lower.probe(KEYS[9:10])
    assert world.step() == [], "the last would have room"
    world.end(first, [True] * 4)
    (second,) = world.step()
    assert second.keys == tuple(KEYS[4:9])
    world.end(second, [True] * 5)
    (third,) = world.step()
    world.end(third, [True])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:6], None)], ())
    (load,) = world.step()
    assert load.keys == tuple(KEYS[:6])
    world.end(load, [True] * 6)
    assert isinstance(fetch, Fetch)
    fetch.release()


def test_answers_of_too_few_workers_are_ignored() -> None:
    world = World(num_workers=2)
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    world.lower.note_report({probe.job_id: (bytes([1, 1]), 1)}, {})
    world.lower.end(probe.job_id, TransferOutcome.DONE)
    assert world.lower.lookup([KEYS[0]])[0] == ABSENT


def test_answers_of_a_job_that_is_not_in_flight_are_ignored() -> None:
    world = World()
    world.learn(KEYS[:1])
    known = world.lower.lookup(KEYS[:2])
    world.lower.note_report({10**9: (b"\1", 1)}, {})
    assert not world.lower.end(10**9, TransferOutcome.DONE)
    assert world.lower.lookup(KEYS[:2]) == known


def test_a_chunk_is_present_when_all_workers_say_so() -> None:
    world = World(num_workers=3)
    world.lower.probe(KEYS[:4])
    (probe,) = world.step()
    for answers, num_workers in ((b"\1\1\0\1", 1), (b"\1\0\1\1", 2)):
        world.lower.note_report({probe.job_id: (answers, num_workers)}, {})
    assert world.lower.end(probe.job_id, TransferOutcome.DONE)
    assert list(world.lower.lookup(KEYS[:4])) == [READY, ABSENT, ABSENT, READY]


def test_a_touch_reaches_host_memory_and_changes_of_either_level_are_seen() -> None:
    world = World(capacity=2)
    generations = [world.manager.generation]
    written(world, KEYS[:1])
    generations.append(world.manager.generation)
    world.keep(KEYS[1:2])
    generations.append(world.manager.generation)
    assert sorted(set(generations)) == generations
    world.manager.touch(KEYS[:1])
    world.keep(KEYS[2:3])
    assert list(world.manager.lookup(KEYS[:3])) == [READY, ABSENT, READY], "what was used last stays"


def test_jobs_that_wait_for_a_tier_that_is_off_are_refused() -> None:
    world = World()
    probes = world.lower.probe(KEYS[:2])
    world.lower.note_report({}, {(0, 0): TierHealth(is_off=True)})
    assert world.step() == [] and all(probe.has_ended for probe in probes)
    assert list(world.lower.lookup(KEYS[:2])) == [ABSENT, ABSENT]


def test_the_number_of_remembered_answers_depends_on_the_size_of_host_memory() -> None:
    for num_slots, most in ((10, MIN_ANSWERS), (2**30, 2**18)):
        presence = TierState(TierOptions(name="tier"), num_slots, VirtualClock(), TieringConfig()).lookup_cache
        for at in range(2 * most):
            presence.note([at.to_bytes(36)], [True])
        assert most // 2 <= len(presence) <= most


def test_the_hit_rate_of_look_ups_is_averaged_and_one_success_counts_for_a_while() -> None:
    world = World(has_index=False)
    gain = world.lower.tiers[0].look_up_gain
    assert gain.expected == 1.0, "before anything is known"
    for at in range(60):
        world.lower.probe([key_of(at, 0), key_of(at, 1)])
        (probe,) = world.step()
        world.end(probe, [at == 40, False])
    assert 0.03 < gain.expected < 0.07, "half of what one of sixty asked for, and what is left of the beginning"
    world.lower.probe([key_of(99, 0)])
    (probe,) = world.step()
    world.end(probe, [True])
    assert gain.expected > 0.5


def test_the_hit_rate_counts_a_look_up_in_several_rounds_once() -> None:
    in_rounds, at_once = World(has_index=False, num_asked_at_once=2), World(has_index=False)
    for found in (0, 1, 2, 5, 7, 3):
        keys = [key_of(found, at) for at in range(NUM_CHUNKS)]
        at_once.lower.probe(keys)
        (probe,) = at_once.step()
        at_once.end(probe, [at < found for at in range(len(keys))])
        num_asked = num_found = 0
        while UNKNOWN in in_rounds.lower.lookup(keys).partition(bytes([ABSENT]))[0]:
            (task,) = in_rounds.lower.probe(keys, num_found={0: num_found})
            (probe,) = in_rounds.step()
            assert list(probe.keys) == keys[num_asked : num_asked + len(probe.keys)]
            in_rounds.end(probe, [num_asked + at < found for at in range(len(probe.keys))])
            num_asked += len(probe.keys)
            num_found += task.num_found
        assert num_found == found
        assert num_asked <= max(2, 5 * found)
        gain, expected = (world.lower.tiers[0].look_up_gain.expected for world in (in_rounds, at_once))
        assert gain == pytest.approx(expected)


def test_the_expected_time_of_a_look_up_is_that_of_its_first_probe_and_a_part_of_the_rest() -> None:
    tier = World(has_index=False, num_asked_at_once=2).lower.tiers[0]
    assert tier.look_up_s(10, 0, 0.5) is None, "before anything is known"
    for num_chunks in (2, 10):
        tier.look_up_pace.note(num_chunks, 0.1 * num_chunks)
    assert tier.look_up_s(10, 0, 0.0) == pytest.approx(0.2)
    assert tier.look_up_s(10, 0, 0.5) == pytest.approx(0.6)
    assert tier.look_up_s(10, 0, 1.0) == pytest.approx(1.0)
    assert tier.look_up_s(10, 2, 0.0) == pytest.approx(0.8), "four times as many as before"
    assert tier.look_up_s(1, 0, 0.0) == pytest.approx(0.1)


def test_a_skipped_tier_is_not_probed_and_has_what_it_is_known_to_have() -> None:
    world = World(num_tiers=2, has_index=False)
    world.learn(KEYS[:1], tier=1)
    assert list(world.lower.lookup(KEYS[:2], skipped={1})) == [READY, UNKNOWN]
    (probe,) = world.lower.probe(KEYS[:2], skipped={1})
    assert (probe.tier, list(probe.keys)) == (0, KEYS[1:2])
    assert list(world.lower.lookup(KEYS[:2], skipped={0, 1})) == [READY, ABSENT]


def test_a_tier_is_probed_for_chunks_that_another_could_not_load() -> None:
    """A chunk that turns out to be gone is looked for further down the next time."""
    world = World(num_tiers=2)
    world.learn(KEYS[:1])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:1], None)], ())
    (load,) = world.step()
    world.end(load, [False])
    assert isinstance(fetch, Fetch) and not fetch.sources
    assert world.lower.lookup([KEYS[0]])[0] == UNKNOWN
    world.lower.probe(KEYS[:1])
    (probe,) = world.step()
    assert probe.tier == 1


def test_an_answer_may_expire_between_two_look_ups() -> None:
    world = World()
    world.learn(KEYS[:2])
    world.clock.advance(10.5)
    assert world.lower.tiers_of(KEYS[:2]) == [-1, -1]


@pytest.mark.parametrize(("locality", "state"), [("LOCAL", ABSENT), ("REMOTE", UNKNOWN), (None, UNKNOWN)])
def test_only_a_tier_that_others_share_is_asked_again_for_what_they_announce(
    locality: Locality | None, state: int
) -> None:
    world = World()
    tier = world.lower.tiers[0]
    tier.options = replace(tier.options, locality=locality)
    world.lower.probe(KEYS[:1])
    (probe,) = world.step()
    world.end(probe, [False])
    world.lower.forget_absent(KEYS[:1])
    assert world.lower.lookup(KEYS[:1]) == bytes([state])
