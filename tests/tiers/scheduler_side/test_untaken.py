"""Chunks that a tier does not take for now are offered to it again, within bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cargohold.cache import OffloadKey
from cargohold.protocol import TransferOutcome
from cargohold.tiers import JobKind, StoreOutcome
from cargohold.tiers.scheduler_side import UNKNOWN
from cargohold.tiers.scheduler_side.writing import MAX_TRIES, Backlog, RetryQueue
from tests.tiers.scheduler_side.world import KEYS, World

STORED, REFUSED, LATER, FAILED = StoreOutcome.STORED, StoreOutcome.REFUSED, StoreOutcome.LATER, StoreOutcome.FAILED


def writes(world: World) -> list[tuple[OffloadKey, ...]]:
    """What is written now; a tier that is only told of uses answers nothing."""
    return [command.keys for command in world.step() if command.kind is JobKind.STORE]


def offered(world: World, answer: StoreOutcome, seconds: float, *, is_used: bool) -> list[float]:
    """When one chunk is offered to a tier that always answers the same, while it is used in every step or never."""
    times = []
    start = world.clock()
    while world.clock() < start + seconds:
        if is_used:
            world.manager.touch(KEYS[:1])
        for command in world.step():
            if command.kind is JobKind.STORE:
                times.append(world.clock() - start)
                world.end(command, [answer])
        world.wait(0.05)
    return times


@pytest.mark.parametrize("answer", [LATER, FAILED])
def test_what_a_tier_puts_off_or_fails_to_write_is_offered_again_by_itself(answer: StoreOutcome) -> None:
    """Found by use: a write that failed once left a hole for ten minutes, however often the prompt was used."""
    world = World(capacity=16)
    world.keep(KEYS[:3])
    (store,) = world.step()
    world.end(store, [STORED, answer, STORED])
    assert world.lower.is_settling, "an idle engine steps on for it"
    (again,) = world.step()
    assert (again.keys, again.parents) == ((KEYS[1],), (KEYS[0],))
    world.end(again, [STORED])
    assert writes(world) == [] and not world.lower.is_settling


@pytest.mark.parametrize("outcome", [TransferOutcome.FAILED, TransferOutcome.ABANDONED])
def test_a_job_that_fails_costs_only_what_it_did_not_write(outcome: TransferOutcome) -> None:
    """Found by use: one failed chunk cost the other nine of its job."""
    world = World(capacity=16, has_index=False)
    world.keep(KEYS[:4])
    (store,) = world.step()
    world.end(store, [True, True, False, False], outcome)
    assert list(world.lower.lookup(KEYS[2:4])) == [UNKNOWN, UNKNOWN], "it did not say that they are absent"
    assert writes(world) == [tuple(KEYS[2:4])]


@pytest.mark.parametrize("answer", [LATER, FAILED])
def test_a_tier_is_not_asked_for_ever_and_then_once_in_a_while_when_the_chunk_is_used(answer: StoreOutcome) -> None:
    world = World()
    world.keep(KEYS[:1])
    by_itself = offered(world, answer, 300.0, is_used=False)
    assert len(by_itself) == MAX_TRIES and by_itself[1] == pytest.approx(0.1), "soon, then less and less often"
    assert not world.lower.is_settling
    # Of a tier that fails all the time, writes are suspended, and tried ever less often.
    assert (5 if answer is LATER else 1) <= len(offered(world, answer, 60.0, is_used=True)) <= 7


def test_a_chunk_for_which_there_was_no_room_is_offered_again_when_it_is_used() -> None:
    """Found by use: a disk that had no room for a moment lacked the chunk for ten minutes."""
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [STORED, REFUSED])
    assert writes(world) == [] and not world.lower.is_settling, "not by itself"
    world.manager.touch(KEYS[:2])
    assert writes(world) == [(KEYS[1],)]


def test_a_full_tier_is_offered_a_chunk_in_use_less_and_less_often() -> None:
    world = World()
    world.keep(KEYS[:1])
    times = offered(world, REFUSED, 120.0, is_used=True)
    gaps = [round(later - earlier, 1) for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps) and gaps[0] <= 0.1 and gaps[-1] == 10.0


def test_what_host_memory_has_lost_meanwhile_is_not_written() -> None:
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [LATER, LATER])
    world.host.remove(KEYS[:1])
    world.wait(0.1)
    assert writes(world) == [(KEYS[1],)]


def test_a_tier_that_puts_off_all_is_left_alone_for_a_while_and_what_waits_is_not_lost() -> None:
    world = World(capacity=16, max_inflight_chunks=2)
    world.keep(KEYS[:4])
    (store,) = world.step()
    world.end(store, [LATER, LATER])
    assert writes(world) == []
    world.wait(0.1)
    taken: list[OffloadKey] = []
    while commands := world.step():
        for command in commands:
            taken += command.keys
            world.end(command, [STORED] * len(command.keys))
    assert sorted(taken) == KEYS[:4]


@pytest.mark.parametrize(("theirs", "is_offered"), [(LATER, True), (REFUSED, False)])
def test_one_worker_without_room_is_enough_not_to_try_again(theirs: StoreOutcome, *, is_offered: bool) -> None:
    world = World(num_workers=2)
    world.keep(KEYS[:1])
    (store,) = world.step()
    for answer in (LATER, theirs):
        world.lower.note_report({store.job_id: (world.verdict(store, answer), 1)}, {})
    assert world.lower.end(store.job_id, TransferOutcome.DONE)
    world.wait(0.1)
    assert writes(world) == ([(KEYS[0],)] if is_offered else [])


def test_a_reset_forgets_what_was_not_taken() -> None:
    world = World()
    world.keep(KEYS[:1])
    (store,) = world.step()
    world.end(store, [LATER])
    assert world.manager.reset()
    world.wait(60.0)
    assert writes(world) == [] and not world.lower.is_settling


def test_a_chunk_that_is_not_taken_twice_at_one_time_is_offered_again_once_after_its_latest_parent() -> None:
    """Found by a seed: the two parents were compared, which turned the connector off if one of them was none."""
    queue, backlog = RetryQueue(16, lambda: 5.0), Backlog(16)
    for parent in (None, KEYS[0], None, KEYS[1]):
        queue.add(KEYS[2], parent, backlog, is_refused=False)
        queue.forget(KEYS[2:3] if parent != KEYS[1] else ())
    queue.offer_due()
    assert backlog.parents == {KEYS[2]: KEYS[1]} and not queue.times
