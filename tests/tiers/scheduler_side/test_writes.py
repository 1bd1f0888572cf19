"""Writes to lower tiers: what is written, when, in which order, and how much of it."""

from __future__ import annotations

import pytest

from cargohold.blocks import READY
from cargohold.cache import StoreOffer
from cargohold.cache.manager import offload_key
from cargohold.protocol import metrics
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side import Admission, WriteMode
from tests.tiers.scheduler_side.world import KEYS, World, key_of


def test_chunks_of_several_prefixes_are_written_behind_their_own_parents() -> None:
    world = World(capacity=16)
    others = [key_of(1, at) for at in range(2)]
    world.keep(KEYS[:1])
    for write in world.step():
        world.end(write, [True] * len(write.keys))
    handle = world.manager.prepare_stores(
        [StoreOffer(KEYS[1:2], KEYS[0]), StoreOffer(others, None), StoreOffer(KEYS[:1], None)]
    )
    assert world.step() == [], "nothing is there yet"
    handle.commit()
    (write,) = world.step()  # one job for all
    assert dict(zip(write.keys, write.parents, strict=True)) == {
        KEYS[1]: KEYS[0],
        others[0]: None,
        others[1]: others[0],
    }
    slots = world.host.prepare_load(write.keys)
    assert list(write.slots) == list(slots.slots)
    slots.release()
    world.end(write, [True] * len(write.keys))
    assert world.step() == []


def test_chunks_are_written_in_prefix_order_with_their_parents() -> None:
    world = World(max_inflight_chunks=2)
    world.keep(KEYS[:3])
    world.keep(KEYS[3:5], KEYS[2])
    written = []
    while commands := world.step():
        for command in commands:
            written.append((command.keys, command.parents))
            assert len(command.slots) == len(command.keys)
            world.end(command, [True] * len(command.keys))
    assert written == [
        (tuple(KEYS[:2]), (None, KEYS[0])),
        (tuple(KEYS[2:4]), tuple(KEYS[1:3])),
        ((KEYS[4],), (KEYS[3],)),
    ]
    assert list(world.lower.lookup(KEYS[:5])) == [READY] * 5


def test_chunks_that_only_this_process_knows_stay_in_host_memory() -> None:
    world = World(local_hashes=bytes([7]))
    own = [key_of(7, at) for at in range(2)]
    world.keep([*KEYS[:2], *own])
    world.lower.note_used([*KEYS[:2], *own])
    written = [key for command in world.step() if command.kind is JobKind.STORE for key in command.keys]
    assert written and set(written) <= set(KEYS[:2])


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_chunks_of_a_host_memory_of_few_slots_are_written(capacity: int) -> None:
    world = World(capacity)
    world.keep(KEYS[:capacity])
    written = []
    while commands := world.step():
        (command,) = commands
        written.append(command.keys)
        world.end(command, [True])
    assert written == [(key,) for key in KEYS[:capacity]], "one at a time"


def test_write_back_begins_when_host_memory_is_nearly_full_with_the_least_used_chunk() -> None:
    world = World(write_mode=WriteMode.BACK)
    for first in (0, 3):
        world.keep(KEYS[first : first + 3])
        assert world.step() == []
    world.manager.touch(KEYS[:2])
    world.keep(KEYS[6:7])
    (store,) = world.step()
    assert (store.kind, store.keys) == (JobKind.STORE, (KEYS[2],))
    world.end(store, [True])
    assert [command for command in world.step() if command.kind is JobKind.STORE] == []


def test_use_does_not_delay_write_through() -> None:
    world = World(max_inflight_chunks=1)
    world.keep(KEYS[:3])
    world.manager.touch(KEYS[:1])
    assert [command.keys for command in world.step()] == [(KEYS[0],)]


def test_admission_on_second_use_remembers_the_latest_chunks_that_were_seen_once() -> None:
    world = World(capacity=2, admission=Admission.REUSED)
    for key in KEYS[:9]:  # one more than are remembered
        world.keep([key])
        assert world.step() == []
    world.keep(KEYS[:1])
    assert world.step() == [], "the first was forgotten"
    world.keep(KEYS[2:3])
    assert [(command.keys, command.parents) for command in world.step()] == [((KEYS[2],), (None,))]


def test_admission_on_second_use_counts_uses_while_the_tier_has_the_chunk() -> None:
    world = World(admission=Admission.REUSED)
    for is_there in (True, False):
        world.lower.tiers[0].note_presence(KEYS[:1], [is_there])
        world.lower.note_new_in_host(KEYS[:1], {KEYS[0]: None})
        assert len(world.lower.writes[0].backlog) == (0 if is_there else 1)


def test_a_used_chunk_is_written_once_with_its_parent() -> None:
    world = World(capacity=16, admission=Admission.REUSED)
    world.keep(KEYS[:4])
    world.manager.touch(KEYS[:6])
    assert len(world.lower.writes[0].backlog) == 4, "what host memory has"
    (store,) = world.step()
    assert (store.kind, store.keys, store.parents) == (JobKind.STORE, tuple(KEYS[:4]), (None, *KEYS[:3]))
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it is being written"
    world.end(store, [True] * 4)
    world.manager.touch(KEYS[:4])
    assert len(world.lower.writes[0].backlog) == 0
    assert world.step() == []
    stats = world.lower.take_stats()
    assert (stats[metrics.STORED.of("tier0")], stats[metrics.NOT_STORED.of("tier0")]) == (4, 0)


def test_a_chunk_that_the_tier_has_is_not_written_again() -> None:
    world = World()
    world.learn(KEYS[:2])
    world.keep(KEYS[:3])
    assert len(world.lower.writes[0].backlog) == 1, "nor does it wait for its turn, and keep the engine stepping"
    assert [command.keys for command in world.step()] == [(KEYS[2],)]


def test_the_daily_write_budget_is_kept() -> None:
    world = World(max_daily_chunks=48)
    world.keep(KEYS[:6])
    (store,) = world.step()
    assert len(store.keys) == 1, "a start is given little"
    world.end(store, [True])
    assert world.step() == []
    world.clock.advance(1801)
    assert [len(command.keys) for command in world.step()] == [1]


def test_a_small_chunk_takes_less_of_the_daily_write_budget() -> None:
    """Found by reading: a disk was worn less than it may be, because each chunk counted like one of the largest group."""
    world = World(max_daily_chunks=48, chunk_parts=(1.0, 0.25))
    small = [offload_key(bytes([at] * 32), 1) for at in range(3)]
    world.keep(small)
    (store,) = world.step()
    assert len(store.keys) == 1, "a start is given little"
    world.end(store, [True])
    assert world.step() == []
    world.clock.advance(451)
    assert [len(command.keys) for command in world.step()] == [1], "a quarter of half an hour"


def test_a_large_daily_write_budget_does_not_raise_the_writes_in_flight() -> None:
    world = World(max_daily_chunks=48_000, max_inflight_chunks=1)
    world.keep(KEYS[:3])
    assert [len(command.keys) for command in world.step()] == [1]
    assert world.step() == []


def test_the_engine_has_work_for_a_while_as_long_as_chunks_wait_to_be_written() -> None:
    world = World(max_inflight_chunks=1)
    world.keep(KEYS[:3])
    while world.lower.is_settling:
        for command in world.step():
            world.end(command, [True])
    assert len(world.lower.writes[0].backlog) == 0
    world.keep(KEYS[3:5])
    world.step()
    before = world.lower.is_settling
    world.clock.advance(3.1)
    assert (before, world.lower.is_settling) == (True, False), "the tier does nothing, so nobody waits for it"
    world.keep(KEYS[5:6])
    world.step()
    still = world.lower.is_settling
    world.end(next(iter(world.running.values())), [True])
    assert (still, world.lower.is_settling) == (False, True), "until it does something"


def test_the_engine_has_work_for_a_bounded_time_however_much_is_to_be_written() -> None:
    world = World(capacity=16, max_inflight_chunks=1)
    world.keep(KEYS)
    num_steps = 0
    while world.lower.is_settling:
        (store,) = world.step()
        world.clock.advance(1.0)
        world.end(store, [True])
        num_steps += 1
    assert num_steps == 5 and world.lower.writes[0].backlog


def test_the_engine_has_work_for_writes_after_a_long_idle_time() -> None:
    world = World()
    world.clock.advance(60.0)
    world.step()
    world.keep(KEYS[:2])
    assert world.step() and world.lower.is_settling


def test_the_engine_has_work_for_writes_of_used_chunks_but_not_for_touches() -> None:
    world = World(admission=Admission.REUSED)
    world.keep(KEYS[:2])
    settling = []
    for _ in range(2):
        world.clock.advance(60.0)
        settling.append(world.lower.is_settling)
        world.manager.touch(KEYS[:2])
        settling.append(world.lower.is_settling)
        if len(settling) == 2:
            for command in world.step():
                world.end(command, [True] * len(command.keys))
    assert settling == [False, True, False, False], "its second use makes it worth writing, and further ones nothing"
    assert [command.kind for command in world.step()] == [JobKind.TOUCH], "that waits for somebody who steps"


def test_a_queued_write_is_dropped_when_the_tier_turns_out_to_have_the_chunk() -> None:
    world = World(max_inflight_chunks=1)
    world.keep(KEYS[:3])
    (store,) = world.step()
    world.lower.probe(KEYS[1:2])
    (probe,) = world.step()
    world.end(probe, [True])
    world.end(store, [True])
    assert [job.keys for job in world.step()] == [(KEYS[2],)]


def test_a_written_chunk_is_not_written_again_with_every_use() -> None:
    world = World(capacity=16, admission=Admission.REUSED)
    world.keep(KEYS[:4])
    assert world.step() == []
    for _ in range(3):
        world.manager.touch(KEYS[:4])
        for command in world.step():
            assert command.kind is not JobKind.STORE or world.clock() == 0
            world.end(command, [True] * 4)
        world.clock.advance(60)
    assert world.lower.tiers[0].stats[metrics.STORED.of("tier0")] == 4
