"""Use of chunks, of which lower tiers are told."""

from __future__ import annotations

import pytest

from cargohold.blocks import READY
from cargohold.protocol import TransferOutcome
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side import UNKNOWN, WriteMode
from tests.tiers.scheduler_side.world import KEYS, World, follow, written


@pytest.mark.parametrize(
    ("outcome", "is_reset", "state"),
    [
        (TransferOutcome.DONE, False, READY),
        (TransferOutcome.FAILED, False, UNKNOWN),
        (TransferOutcome.DONE, True, UNKNOWN),
    ],
)
def test_answers_to_touches_count_unless_they_failed_or_came_after_a_reset(
    outcome: TransferOutcome, *, is_reset: bool, state: int
) -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.clock.advance(11)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    assert touch.kind is JobKind.TOUCH
    assert not is_reset or world.manager.reset()
    world.end(touch, [True, True], outcome)
    assert list(world.lower.lookup(KEYS[:2])) == [state] * 2


def test_chunks_in_use_are_touched_in_the_tier() -> None:
    """A tier sees nothing of chunks that host memory gives back, so it evicts them; a restart would not find them."""
    world = World(capacity=16)
    world.keep(KEYS[:4])
    world.manager.touch(KEYS[:4])
    (store,) = world.step()
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it is on its way there"
    world.end(store, [True] * 4)
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it was there a moment ago"
    world.clock.advance(601)
    world.manager.touch(KEYS[:6])
    (touch,) = world.step()
    assert (touch.kind, touch.keys) == (JobKind.TOUCH, tuple(KEYS[:4])), "what host memory has, and no more"
    world.manager.touch(KEYS[:6])
    assert world.step() == [], "it is being asked"
    world.end(touch, [True, True, False, False])
    (store,) = world.step()
    assert (store.kind, store.keys, store.parents) == (JobKind.STORE, tuple(KEYS[2:4]), tuple(KEYS[1:3]))
    world.end(store, [True, True])
    world.manager.touch(KEYS[:4])
    assert world.step() == []


def test_a_tier_that_does_not_answer_touches_is_not_written_to() -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.clock.advance(601)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    world.end(touch, [False, False], TransferOutcome.FAILED)
    assert world.step() == []


def test_a_hit_in_host_memory_is_a_touch_of_the_tier() -> None:
    world = World(capacity=16)
    written(world, KEYS[:4])
    world.manager.touch(KEYS[:3])
    assert world.step() == [], "it had them a moment ago"
    world.clock.advance(11)
    world.manager.touch(KEYS[:5])
    (touch,) = world.step()
    assert (touch.kind, touch.keys) == (JobKind.TOUCH, tuple(KEYS[:4])), "what both have, in prefix order"
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it is being told"
    assert world.lower.is_idle, "nobody waits for that"
    world.end(touch, [True] * 4)
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it was told"
    world.clock.advance(11)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    assert touch.keys == tuple(KEYS[:2])


@pytest.mark.parametrize("after_s", [11, 601])
def test_a_prefix_too_long_for_one_touch_is_touched_from_its_end(after_s: float) -> None:
    """Found by reading: workers refused it all, which was held against their medium."""
    world = World(capacity=32, max_asked_chunks=3)
    written(world, KEYS[:8])
    world.clock.advance(after_s)
    world.manager.touch(KEYS[:8])
    told = []
    while commands := world.step():
        for command in commands:
            told.append((command.kind, command.keys))
            world.end(command, [True] * len(command.keys))
    assert told == [(JobKind.TOUCH, tuple(keys)) for keys in (KEYS[6:8], KEYS[3:6], KEYS[:3])]


def test_a_tier_without_batches_is_touched_a_few_chunks_at_a_time() -> None:
    """Found by a review: a probe of all chunks of a long prompt came too late, and a healthy store was left alone for that."""
    world = World(capacity=32, has_index=False, num_asked_at_once=3)
    written(world, KEYS[:8])
    world.clock.advance(601)
    asked = []
    for _ in range(4):
        for _ in range(2):
            world.manager.touch(KEYS[:8])
        for touch in world.step():
            asked.append(touch.keys)
            world.end(touch, [True] * len(touch.keys))
        if len(asked) == 1:  # a request wants to know of some of them meanwhile
            world.lower.probe(KEYS[5:7])
            (probe,) = world.step()
            world.end(probe, [True] * 2)
    assert asked == [tuple(KEYS[:3]), (*KEYS[3:5], KEYS[7])]


@pytest.mark.parametrize("outcome", [TransferOutcome.FAILED, TransferOutcome.ABANDONED])
def test_a_touch_without_answer_does_not_count_chunks_as_gone(outcome: TransferOutcome) -> None:
    world = World(capacity=32, has_index=False, num_asked_at_once=3)
    written(world, KEYS[:8])
    world.lower.tiers[0].take_events()
    world.clock.advance(601)
    world.manager.touch(KEYS[:8])
    (touch,) = world.step()
    world.end(touch, [False] * 3, outcome)
    assert world.step() == [], "the others are not asked for either"
    assert world.lower.tiers[0].take_events() == []
    world.manager.touch(KEYS[:8])
    (touch,) = world.step()
    assert touch.keys == tuple(KEYS[:3]), "but at the next use"


def in_use_after(world: World, after_s: float) -> list[JobKind]:
    """What a tier is asked to do when chunks that it has are used so much later."""
    world.keep(KEYS[:8])
    while stores := world.step():
        for store in stores:
            world.end(store, [True] * len(store.keys))
    world.clock.advance(after_s)
    world.manager.touch(KEYS[:8])
    return [command.kind for command in world.step()]


def test_a_tier_without_index_is_asked_seldom_and_never_for_write_back() -> None:
    assert in_use_after(World(), 11) == [JobKind.TOUCH]
    assert in_use_after(World(has_index=False), 11) == []
    assert in_use_after(World(has_index=False), 601) == [JobKind.TOUCH]
    assert in_use_after(World(write_mode=WriteMode.BACK), 601) == [JobKind.TOUCH]
    assert in_use_after(World(write_mode=WriteMode.BACK, has_index=False), 601) == []


def test_a_touch_of_the_end_of_a_prefix_touches_its_start() -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.clock.advance(8)
    world.manager.touch(KEYS[:2])
    world.keep(KEYS[2:4], KEYS[1])
    (store,) = world.step()
    world.end(store, [True] * 2)
    world.clock.advance(4)
    world.manager.touch(KEYS[:4])
    (touch,) = world.step()
    assert touch.keys == tuple(KEYS[:4])


def test_a_chunk_that_a_touch_finds_gone_is_written_again_in_its_turn() -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.lower.tiers[0].take_events()
    world.clock.advance(11)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    world.end(touch, [True, False])
    assert follow(world, set(KEYS[:2])) == {KEYS[0]}, "who listens hears of it"
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    assert touch.kind is JobKind.TOUCH
    world.end(touch, [True, False])
    assert world.step() == [], "a full disk is not written to all the time"
    world.clock.advance(590)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    assert touch.kind is JobKind.TOUCH
    world.end(touch, [key == KEYS[0] for key in touch.keys])
    (store,) = world.step()
    assert (store.kind, store.keys) == (JobKind.STORE, (KEYS[1],))
