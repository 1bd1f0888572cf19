"""A disk whose chunks are all known is not asked which it has: nobody waits for an answer."""

from __future__ import annotations

import pytest

from cargohold.lab.simulation import SimulatedEngine
from cargohold.tiers import JobKind
from cargohold.tiers.port import JobStatus
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import prompt
from tests.connector.test_hints import later
from tests.connector.tiering import finish, lose_host_memory, make_engine, restored, serve
from tests.held_tiers import SimulatedTiering

DISK = TierOptions(name="disk", is_listed=True)


def settled_engine(tiering: SimulatedTiering) -> SimulatedEngine:
    """An engine that has listed its disks."""
    engine = make_engine(tiering)
    finish(engine, tiering)
    return engine


def restarted(tiering: SimulatedTiering) -> SimulatedEngine:
    """The same, over what an engine before has left of a prompt."""
    serve(settled_engine(tiering), tiering, "first", prompt(0, 45))
    return settled_engine(tiering)


def kinds_of_jobs(tiering: SimulatedTiering) -> list[JobKind]:
    """The kinds of the jobs that the workers get from now on."""
    kinds: list[JobKind] = []
    for queue in tiering.all_queues():
        queue.on_job = lambda job: kinds.append(job.kind)
    return kinds


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_new_prompt_is_admitted_at_once(world_size: int) -> None:
    tiering = SimulatedTiering(60, [DISK], world_size)
    engine = restarted(tiering)
    kinds = kinds_of_jobs(tiering)
    engine.add("new", prompt(1, 45), 1)
    engine.step()
    assert engine.requests["new"].num_computed_tokens > 0
    finish(engine, tiering)
    assert set(kinds) == {JobKind.STORE}


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_an_earlier_engine_has_left_is_fetched_in_the_first_step(world_size: int) -> None:
    tiering = SimulatedTiering(60, [DISK], world_size)
    engine = restarted(tiering)
    kinds = kinds_of_jobs(tiering)
    engine.add("again", prompt(0, 45), 3)
    engine.step()
    assert set(kinds) == {JobKind.LOAD}
    finish(engine, tiering)
    assert restored(engine, "again") == {"disk": 44}
    assert JobKind.PROBE not in kinds


def test_until_the_list_has_come_to_its_end_the_disk_is_asked() -> None:
    tiering = SimulatedTiering(60, [DISK])
    serve(settled_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LIST})
    kinds = kinds_of_jobs(tiering)
    serve(engine, tiering, "again", prompt(0, 45))
    assert restored(engine, "again") == {"disk": 44}
    assert JobKind.PROBE in kinds


def test_a_list_that_fails_is_read_again_after_a_pause() -> None:
    """Found by simulation: what an earlier engine has left was not known for the rest of the process's life."""
    tiering = SimulatedTiering(60, [DISK])
    serve(settled_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LIST})
    engine.add("begins", prompt(1, 9), 1)
    engine.step()
    (listing,) = (job for job in queue.pending if job.kind is JobKind.LIST)
    queue.complete(listing, JobStatus.FAILED)
    finish(engine, tiering)
    assert not tiering.lower.tiers[0].knows_all
    queue.held = frozenset()
    later(engine, 1.0)
    serve(engine, tiering, "second", prompt(2, 9))
    assert tiering.lower.tiers[0].knows_all


def test_a_chunk_that_one_worker_lacks_is_not_fetched() -> None:
    tiering = SimulatedTiering(60, [DISK], 2)
    serve(settled_engine(tiering), tiering, "first", prompt(0, 45))
    tiering.media[0][1].lose(next(reversed(tiering.media[0][1].chunks)))
    tiering.media[0][1].take_losses()  # before the engine starts
    engine = settled_engine(tiering)
    serve(engine, tiering, "again", prompt(0, 45))
    assert restored(engine, "again") == {"disk": 40}


def test_what_the_disk_has_lost_is_not_waited_for() -> None:
    tiering = SimulatedTiering(60, [DISK])
    engine = settled_engine(tiering)
    serve(engine, tiering, "first", prompt(0, 45))
    lose_host_memory(engine, tiering)
    for key in list(tiering.media[0][0].chunks):
        tiering.media[0][0].lose(key)
    serve(engine, tiering, "other", prompt(1, 13))
    kinds = kinds_of_jobs(tiering)
    serve(engine, tiering, "again", prompt(0, 45))
    assert restored(engine, "again") == {}
    assert not {JobKind.PROBE, JobKind.LOAD} & set(kinds)


def test_after_a_reset_nothing_is_there_and_nothing_is_asked() -> None:
    tiering = SimulatedTiering(60, [DISK])
    engine = settled_engine(tiering)
    serve(engine, tiering, "first", prompt(0, 45))
    assert engine.scheduler.reset_cache()
    kinds = kinds_of_jobs(tiering)
    for name, found in (("again", 0), ("and again", 44)):
        lose_host_memory(engine, tiering)
        tiering.manager.reset()
        serve(engine, tiering, name, prompt(0, 45))
        assert sum(restored(engine, name).values()) == found
    assert JobKind.PROBE not in kinds


def test_a_disk_that_holds_more_than_can_be_known_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.tiers.scheduler_side.tier_state.MAX_KNOWN", 12)
    tiering = SimulatedTiering(60, [DISK])
    engine = settled_engine(tiering)
    kinds = kinds_of_jobs(tiering)
    serve(engine, tiering, "first", prompt(0, 45))
    serve(engine, tiering, "second", prompt(1, 45))
    assert JobKind.PROBE not in kinds
    lose_host_memory(engine, tiering)
    engine.clock.advance(100.0)  # type: ignore[attr-defined]  # virtual: what was written just now is no longer remembered
    serve(engine, tiering, "again", prompt(0, 45))
    assert JobKind.PROBE in kinds
    assert restored(engine, "again") == {"disk": 44}
    again = settled_engine(tiering)
    serve(again, tiering, "and again", prompt(1, 45))
    assert restored(again, "and again") == {"disk": 44}
