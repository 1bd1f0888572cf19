"""Tiers below host memory in a simulated engine: every step is checked for wrong tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.engine.core.request import FinishReason
from cargohold.offload.tier import JobKind, JobStatus, TierJob
from cargohold.offload.tiering import Admission, TierOptions, WriteMode
from cargohold.simulation import SimulatedEngine, VirtualClock, simulated_layout
from cargohold.simulation.tiers import SimulatedTiering
from tests.connector.common import alone, evict_everything, prompt

DISK = TierOptions(name="disk")
SHARED = TierOptions(name="shared")


def make_engine(tiering: SimulatedTiering, *, num_blocks: int = 60, **options: Any) -> SimulatedEngine:
    windows = options.pop("windows", (None,))
    return SimulatedEngine(
        simulated_layout(num_blocks, windows=windows, world_size=len(tiering.media[0])), tiering, **options
    )


def finish(engine: SimulatedEngine, tiering: SimulatedTiering) -> None:
    """Run until all is done, and verify that nothing is left behind."""
    engine.run()
    engine.scheduler.check_settled()
    tiering.manager.check()
    assert tiering.manager.num_writing == tiering.manager.num_pins == 0


def serve(engine: SimulatedEngine, tiering: SimulatedTiering, name: str, tokens: list[int], num: int = 3) -> None:
    engine.add(name, tokens, num)
    finish(engine, tiering)
    assert engine.tokens(name) == alone(tokens, num)


def restored(engine: SimulatedEngine, name: str) -> dict[str, int]:
    return dict(engine.outputs[name].cache_report.restored_tokens)


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (9, None, 3)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_restarted_engine_finds_its_prompts_on_disk(
    windows: tuple[int | None, ...], blocks_per_chunk: int, world_size: int
) -> None:
    tiering = SimulatedTiering(60, world_size=world_size, blocks_per_chunk=blocks_per_chunk)
    serve(make_engine(tiering, windows=windows, num_blocks=100), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, windows=windows, num_blocks=100)
    serve(engine, tiering, "second", prompt(0, 45))
    chunk = 4 * blocks_per_chunk
    assert restored(engine, "second") == {"disk": 45 // chunk * chunk}
    note = engine.outputs["second"].cache_report.notes[-1]
    assert "0 were on the device and" in note and "in disk" in note
    evict_everything(engine)
    serve(engine, tiering, "third", prompt(0, 45))
    assert restored(engine, "third") == {"host": 45 // chunk * chunk}, "it is in host memory now"


def test_without_the_medium_the_prompt_is_computed() -> None:
    """The control: it is the disk that gives the tokens back."""
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    tiering.media[0][0].chunks.clear()
    engine = make_engine(tiering)
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {}


def test_wrong_bytes_would_be_noticed() -> None:
    """The control: if what is brought up did not matter, the tests here would prove nothing."""
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    chunks = tiering.media[0][0].chunks
    for key, chunk in chunks.items():
        chunks[key] = bytes(len(chunk))
    engine = make_engine(tiering)
    engine.add("second", prompt(0, 45), 3)
    with pytest.raises(AssertionError, match="does not hold the KV"):
        engine.run()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_chunk_is_a_miss_from_there_on_and_is_written_again(world_size: int) -> None:
    tiering = SimulatedTiering(60, world_size=world_size)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    shard = tiering.media[0][-1]  # on one rank alone
    shard.corrupt(list(shard.chunks)[4])
    engine = make_engine(tiering)
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {"disk": 16}
    engine = make_engine(tiering)
    serve(engine, tiering, "third", prompt(0, 45))
    assert restored(engine, "third") == {"disk": 44}


def test_a_chunk_that_one_rank_does_not_have_is_a_miss() -> None:
    tiering = SimulatedTiering(60, world_size=3)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    del tiering.media[0][1].chunks[list(tiering.media[0][1].chunks)[3]]
    engine = make_engine(tiering)
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {"disk": 12}


def test_ranks_may_end_a_job_in_different_steps() -> None:
    tiering = SimulatedTiering(60, world_size=2)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    tiering.media[0][0].chunks.pop(list(tiering.media[0][0].chunks)[6])
    engine = make_engine(tiering)
    fast, slow = (queues[0] for queues in tiering.queues)
    slow.auto = False
    engine.add("second", prompt(0, 45), 3)
    for _ in range(3):
        engine.step()
    assert not fast.pending and [job.kind for job in slow.pending] == [JobKind.PROBE]
    slow.auto = True
    finish(engine, tiering)
    assert restored(engine, "second") == {"disk": 24}


@pytest.mark.parametrize("trouble", ["is_gone", "stalls"])
def test_the_engine_goes_on_without_a_tier_in_trouble_and_uses_it_when_it_is_back(trouble: str) -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    medium = tiering.media[0][0]
    setattr(medium, trouble, True)
    for at in range(6):
        engine.add(f"in trouble {at}", prompt(at, 45), 3)
        engine.run()
        assert engine.tokens(f"in trouble {at}") == alone(prompt(at, 45), 3)
        assert restored(engine, f"in trouble {at}") == {}
    setattr(medium, trouble, False)
    assert isinstance(engine.clock, VirtualClock)
    for _ in range(2):  # what was asked for in the meantime has come too late
        engine.clock.advance(120)
        engine.step()
    serve(engine, tiering, "new", prompt(9, 45))
    engine = make_engine(tiering)
    serve(engine, tiering, "back", prompt(9, 45))
    assert restored(engine, "back") == {"disk": 44}


def test_a_stalled_tier_delays_a_request_no_longer_than_allowed_and_the_next_ones_not_at_all() -> None:
    tiering = SimulatedTiering(60, restore_timeout_s=2.0)
    engine = make_engine(tiering)
    tiering.media[0][0].stalls = True
    waited = []
    for at in range(8):
        began = engine.clock()
        engine.add(f"r{at}", prompt(at, 20), 1)
        while f"r{at}" not in engine.outputs:
            engine.step()
        waited.append(engine.clock() - began)
    assert max(waited) < 2.5
    assert max(waited[4:]) < 0.1, "it is left alone by now"
    began = engine.clock()
    engine.run()
    assert engine.clock() - began < 1.5, "nor does anybody wait for what is to be written"


def test_an_aborted_request_gives_back_what_was_held_for_it() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    engine.add("second", prompt(0, 45), 3)
    engine.step()
    queue.complete(queue.pending[0])
    for _ in range(2):
        engine.step()
    assert [job.kind for job in queue.pending] == [JobKind.LOAD]
    assert tiering.manager.num_writing == 11
    engine.abort("second")
    engine.step()
    finish(engine, tiering)
    assert engine.requests["second"].finish_reason is FinishReason.ABORT
    assert tiering.manager.num_ready == 0, "cancelled"
    queue.auto = True
    serve(engine, tiering, "third", prompt(0, 45))
    assert restored(engine, "third") == {"disk": 44}


def test_two_requests_that_want_the_same_chunks_share_the_work() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    jobs: list[TierJob] = []
    (queue,) = tiering.all_queues()
    queue.on_job = jobs.append
    engine.add("a", [*prompt(0, 45), 1], 3)
    engine.add("b", [*prompt(0, 45), 2], 3)
    finish(engine, tiering)
    loaded = [key for job in jobs if job.kind is JobKind.LOAD for key in job.keys]
    assert len(loaded) == len(set(loaded)) == 11
    assert engine.tokens("a") == alone([*prompt(0, 45), 1], 3)
    assert engine.tokens("b") == alone([*prompt(0, 45), 2], 3)


def test_a_chunk_in_two_tiers_comes_from_the_faster_and_what_came_from_afar_is_kept_nearer() -> None:
    tiering = SimulatedTiering(60, (DISK, SHARED))
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    disk, shared = (media[0].chunks for media in tiering.media)
    assert list(disk) == list(shared) and len(disk) == 11
    for key in list(disk)[5:]:
        del disk[key]
    engine = make_engine(tiering)
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {"disk": 20, "shared": 24}
    assert len(disk) == 11


def test_what_host_memory_has_no_room_for_is_restored_in_part() -> None:
    tiering = SimulatedTiering(100)
    serve(make_engine(tiering), tiering, "first", prompt(0, 200))
    tiering.num_slots = 20
    engine = make_engine(tiering)
    serve(engine, tiering, "second", prompt(0, 200))
    assert restored(engine, "second") == {"disk": 80}


def test_chunks_are_written_from_their_second_use_on_if_so_asked() -> None:
    tiering = SimulatedTiering(60, (TierOptions(name="disk", admission=Admission.REUSED),))
    engine = make_engine(tiering)
    serve(engine, tiering, "once", prompt(0, 45))
    assert not tiering.media[0][0].chunks
    serve(engine, tiering, "again", prompt(0, 24))
    assert len(tiering.media[0][0].chunks) == 6


def test_written_back_only_when_host_memory_fills_up() -> None:
    tiering = SimulatedTiering(40, (TierOptions(name="disk", write_mode=WriteMode.BACK),))
    engine = make_engine(tiering)
    serve(engine, tiering, "r0", prompt(0, 40), 1)
    assert not tiering.media[0][0].chunks
    for at in range(1, 6):
        serve(engine, tiering, f"r{at}", prompt(at, 40), 1)
    written = tiering.media[0][0].chunks
    assert 10 <= len(written) < 60
    engine = make_engine(tiering)
    serve(engine, tiering, "back", prompt(0, 40), 1)
    assert restored(engine, "back") == {"disk": 40}, "it was written before it was lost"


def test_after_a_reset_nothing_is_found_anywhere() -> None:
    tiering = SimulatedTiering(60)
    engine = make_engine(tiering)
    serve(engine, tiering, "first", prompt(0, 45))
    assert engine.scheduler.reset_cache()
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {}
    evict_everything(engine)
    tiering.manager.host.reset()
    serve(engine, tiering, "third", prompt(0, 45))
    assert restored(engine, "third") == {"disk": 44}, "what came after the reset is"


def test_what_is_read_or_written_is_not_evicted_and_a_full_queue_drops_stores_not_loads() -> None:
    tiering = SimulatedTiering(16)
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    for at in range(8):
        engine.add(f"r{at}", prompt(at, 40), 2)
        for _ in range(12):
            engine.step()
        num_writing = sum(len(job.keys) for job in queue.pending if job.kind is JobKind.STORE)
        assert num_writing <= 4, "a quarter of host memory at most"
        tiering.manager.check()
    queue.auto = True
    finish(engine, tiering)
    assert tiering.media[0][0].chunks


@pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED])
def test_of_a_load_that_ended_badly_only_what_arrived_is_used(status: JobStatus) -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    engine.add("second", prompt(0, 45), 3)
    engine.step()
    queue.complete(queue.pending[0])
    for _ in range(2):
        engine.step()
    queue.complete(queue.pending[0], status)
    queue.auto = True
    finish(engine, tiering)
    assert engine.tokens("second") == alone(prompt(0, 45), 3)
    assert restored(engine, "second") == {"disk": 4}


def test_an_engine_that_did_not_step_for_long_does_not_blame_the_tier_for_that() -> None:
    tiering = SimulatedTiering(60)
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    engine.add("first", prompt(0, 45), 3)
    while engine.scheduler.num_unfinished:
        for job in list(queue.pending):
            queue.complete(job)
        engine.step()
    engine.step()
    for job in list(queue.pending):
        queue.complete(job)
    queue.auto = True
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(3600)
    serve(engine, tiering, "second", prompt(1, 45))
    assert "disk_failures" not in engine.connector.get_stats()
