"""Resets of lower tiers: what was before is not found, and not waited for."""

from __future__ import annotations

import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.cache import make_manager
from cargohold.protocol import TransferOutcome
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side import UNKNOWN, Admission, Chain
from tests.tiers.scheduler_side.world import KEYS, World, written


def test_after_a_reset_chunks_have_other_names() -> None:
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [True, True])
    assert world.manager.reset()
    assert world.lower.lookup([KEYS[0]])[0] == UNKNOWN
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    assert [len(key) for key in probe.keys] == [36, 36] and all(key[-4:] == bytes(4) for key in probe.keys)
    world.end(probe, [False, False])
    assert world.manager.reset()
    world.lower.probe(KEYS[:2])
    (again,) = world.step()
    assert len({*store.keys, *probe.keys, *again.keys}) == 6, (
        "each chunk has one of its own, and another after each reset"
    )


@pytest.mark.parametrize("outcome", [TransferOutcome.DONE, TransferOutcome.ABANDONED])
def test_a_reset_does_not_wait_for_writes_in_flight(outcome: TransferOutcome) -> None:
    world = World(host=make_manager("lru", 8), max_inflight_chunks=2)
    world.keep(KEYS[:3])
    (store,) = world.step()
    assert world.manager.reset()
    assert world.manager.lookup(KEYS[:3]) == bytes([ABSENT] * 3)
    assert world.cancelled() == [store.job_id]
    assert len(store.keys) == 2 and world.manager.num_free == 6, "what workers may still read must not be overwritten"
    world.manager.check()
    world.keep(KEYS[:3])
    assert world.manager.num_free == 3
    world.end(store, [outcome is TransferOutcome.DONE] * 2, outcome)
    assert world.manager.num_free == 5
    world.manager.check()
    assert list(world.lower.lookup(KEYS[:3])) == [UNKNOWN] * 3, "it was written under names that nobody uses any more"


def test_a_chunk_stored_again_after_a_reset_is_written_though_its_old_name_still_is() -> None:
    """Before, it was taken for what was being written, and not in the tier when host memory had evicted it."""
    world = World(capacity=16, max_inflight_chunks=4)
    world.keep(KEYS[:2])
    (old,) = world.step()
    assert world.manager.reset()
    world.keep(KEYS[:4])
    (new,) = world.step()
    assert len(new.keys) == 2 and not set(new.keys) & set(old.keys), "as many at a time, whatever their names"
    world.manager.check()
    world.end(old, [True] * 2)
    world.manager.touch(KEYS[:2])
    (rest,) = world.step()  # what is being written is neither written again nor asked for
    for store in (new, rest):
        world.end(store, [True] * 2)
    world.manager.check()
    assert list(world.lower.lookup(KEYS[:4])) == [READY] * 4
    assert world.step() == []


@pytest.mark.parametrize("admission", Admission)
def test_a_reset_drops_queued_writes_and_what_was_seen_once(admission: Admission) -> None:
    world = World(capacity=16, admission=admission)
    world.keep(KEYS[:4])
    assert world.manager.reset()
    assert not world.lower.is_settling and world.step() == []
    world.keep(KEYS[:4])
    assert [command.kind for command in world.step()] == ([JobKind.STORE] if admission is Admission.ALL else [])


def test_writes_under_old_names_count_as_in_flight_until_they_end() -> None:
    world = World(capacity=16, max_inflight_chunks=4)
    olds = []
    for first in (0, 2):
        world.keep(KEYS[first : first + 2])
        olds += world.step()
    assert world.manager.reset()
    world.keep(KEYS[:6])
    for old in olds:
        assert sum(len(job.keys) for job in world.running.values()) == 4 and world.step() == []
        world.end(old, [True] * 2)
        world.manager.check()
        assert [len(new.keys) for new in world.step()] == [2]


def test_a_reset_is_refused_while_chunks_are_pinned() -> None:
    world = World()
    world.keep(KEYS[:2])
    fetch = world.lower.fetches.begin([], KEYS[:2])
    assert fetch is not None
    refused = world.manager.reset()
    fetch.release()
    assert (refused, world.manager.reset()) == (False, True)


def test_a_reset_is_refused_while_chunks_are_fetched() -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], [])
    assert fetch is not None and not world.manager.reset()
    (load,) = world.step()
    fetch.release()
    assert not world.manager.reset(), "workers may still write there"
    world.end(load, [False, False], TransferOutcome.ABANDONED)
    assert world.manager.reset()


def test_a_reset_does_not_wait_for_probes_and_ignores_their_answers() -> None:
    world = World()
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    assert world.manager.reset()
    assert world.cancelled() == [probe.job_id]
    world.end(probe, [True, True])
    assert list(world.lower.lookup(KEYS[:2])) == [UNKNOWN, UNKNOWN]


def test_a_reset_drops_queued_touches() -> None:
    world = World(capacity=32, has_index=False, num_asked_at_once=3)
    written(world, KEYS[:8])
    world.clock.advance(601)
    world.manager.touch(KEYS[:8])
    (probe,) = world.step()
    assert world.manager.reset()
    world.end(probe, [True] * 3, TransferOutcome.ABANDONED)
    assert world.step() == []
