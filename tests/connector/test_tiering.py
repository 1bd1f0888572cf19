"""Tiers below host memory in a simulated engine: every step is checked for wrong tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import extend_hashes, root_hash
from cargohold.engine.core.request import FinishReason
from cargohold.lab.simulation import SimulatedEngine
from cargohold.lab.simulation.fingerprints import GroupPlan, layout_of
from cargohold.protocol import MEDIUM_STORAGE, AttentionKind, BlockRemoved, BlockStored, metrics
from cargohold.tiers import JobKind, JobStatus, TierJob
from cargohold.tiers.scheduler_side import Admission, TierOptions, WriteMode
from tests.connector.common import alone, evict_everything, prompt
from tests.connector.tiering import DISK, SHARED, fetching_engine, finish, make_engine, restored, serve
from tests.effort import examples
from tests.held_tiers import SimulatedTiering


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (9, None, 3)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_restarted_engine_restores_from_disk(
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


def test_what_the_device_held_is_found_on_disk_after_a_stop() -> None:
    """Where a disk is written as chunks are computed, no chunk is on the device alone: a stop has nothing to save."""
    tiering, prompts = SimulatedTiering(16, mode="exclusive", restore="always"), [prompt(at, 41) for at in range(4)]
    found = []
    for _ in range(2):
        engine = make_engine(tiering)
        for at, tokens in enumerate(prompts):  # 40 chunks, all of which the device holds
            serve(engine, tiering, f"{at}", tokens, num=1)
            found.append(restored(engine, f"{at}"))
    assert found == [{}] * 4 + [{"disk": 40}] * 4


def test_what_is_computed_although_host_memory_has_it_is_a_copy_whose_slot_is_taken_first() -> None:
    """Found by a seed: what came up from disk while it was computed was no copy, and what nothing else had was lost."""
    tiering = SimulatedTiering(16, mode="exclusive", restore="always")
    engine, queue = fetching_engine(tiering)  # 11 chunks
    queue.complete(queue.pending[0])
    engine.step()
    assert tiering.manager.num_ready == 11
    queue.auto = True
    engine.abort("second")
    serve(engine, tiering, "other", prompt(1, 21), num=1)
    engine.add("computed", prompt(0, 45), 1, kv_transfer_params={"max_load_tokens": 0})
    finish(engine, tiering)
    serve(engine, tiering, "another", prompt(2, 45), num=1)
    evict_everything(engine)
    serve(engine, tiering, "other again", prompt(1, 21), num=1)
    assert restored(engine, "other again") == {"host": 20}


def test_a_chunk_that_host_memory_evicts_first_reaches_the_disk() -> None:
    """Found by replaying: the default policy kept one-shot prompts out of host memory, and so off every tier below."""
    tiering = SimulatedTiering(12)
    engine = make_engine(tiering)
    for number in range(40):
        serve(engine, tiering, f"often {number}", prompt(0, 17), num=1)
        serve(engine, tiering, f"once {number}", prompt(1 + number, 33), num=1)
        evict_everything(engine)
    assert len(tiering.media[0][0].chunks) == 4 + 40 * 8


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
    stats = engine.scheduler.connector.get_kv_connector_stats()
    assert not any(stats[series] for series in stats if series.family is metrics.REMOVED), (
        "what was never there has not gone"
    )
    assert (
        stats[metrics.READY_CHUNKS] == stats[metrics.STORED.of("host")] + stats[metrics.OTHER.of("disk_loaded_chunks")]
    )
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


def test_a_chunk_in_two_tiers_comes_from_the_faster_and_is_written_to_the_nearer() -> None:
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


def test_with_admission_on_second_use_chunks_are_written_from_their_second_use_on() -> None:
    tiering = SimulatedTiering(60, (TierOptions(name="disk", admission=Admission.REUSED),))
    engine = make_engine(tiering)
    serve(engine, tiering, "once", prompt(0, 45))
    assert not tiering.media[0][0].chunks
    serve(engine, tiering, "again", prompt(0, 24))
    assert len(tiering.media[0][0].chunks) == 6


def test_with_write_back_chunks_are_written_when_host_memory_fills_up() -> None:
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


def test_after_a_reset_no_tier_has_a_hit() -> None:
    tiering = SimulatedTiering(60)
    engine = make_engine(tiering)
    serve(engine, tiering, "first", prompt(0, 45))
    assert engine.scheduler.reset_cache()
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {}
    evict_everything(engine)
    tiering.manager.reset()
    serve(engine, tiering, "third", prompt(0, 45))
    assert restored(engine, "third") == {"disk": 44}, "what came after the reset is"


def test_chunks_in_transfer_are_not_evicted_and_a_full_queue_drops_stores_not_loads() -> None:
    tiering = SimulatedTiering(16)
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.STORE})
    for at in range(8):
        engine.add(f"r{at}", prompt(at, 40), 2)
        for _ in range(12):
            engine.step()
        assert 1 <= sum(len(job.keys) for job in queue.pending) <= 8, "half of host memory at most"
        assert f"r{at}" in engine.outputs, "nobody waits for that"
        tiering.manager.check()
    queue.held = frozenset()
    finish(engine, tiering)
    engine = make_engine(tiering)
    for at in range(8):
        serve(engine, tiering, f"again {at}", prompt(at, 40), 2)
    assert sum(restored(engine, f"again {at}").get("disk", 0) for at in range(8)) >= 16


@pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED])
def test_a_load_that_failed_in_part_restores_only_what_arrived(status: JobStatus) -> None:
    tiering = SimulatedTiering(60)
    engine, queue = fetching_engine(tiering)
    queue.complete(queue.pending[0], status)
    queue.auto = True
    finish(engine, tiering)
    assert engine.tokens("second") == alone(prompt(0, 45), 3)
    assert restored(engine, "second") == {"disk": 4}


def test_an_idle_engine_has_work_until_cancelled_loads_have_ended() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    engine.add("second", prompt(0, 45), 3)
    while not queue.pending or queue.pending[0].kind is not JobKind.LOAD:
        engine.step()
    engine.abort("second")
    queue.held = frozenset()
    finish(engine, tiering)
    assert engine.scheduler.reset_cache()


def drawn_tiering(draw: Callable[[Any], Any]) -> SimulatedTiering:
    options = st.builds(
        TierOptions,
        name=st.sampled_from(["near", "far"]),
        admission=st.sampled_from(Admission),
        write_mode=st.sampled_from(WriteMode),
        max_inflight_chunks=st.integers(1, 20),
    )
    tiering = SimulatedTiering(
        draw(st.integers(1, 40)),
        draw(st.lists(options, min_size=1, max_size=2, unique_by=lambda tier: tier.name)),
        draw(st.integers(1, 2)),
        blocks_per_chunk=draw(st.integers(1, 2)),
        restore_timeout_s=draw(st.sampled_from([0.05, 1.0])),
        restore=draw(st.sampled_from(["always", "if_faster"])),
    )
    for shards in tiering.media:
        max_chunks = draw(st.integers(0, 30))
        for shard in shards:
            shard.max_chunks = max_chunks
    return tiering


def run_any_way(engine: SimulatedEngine, tiering: SimulatedTiering, draw: Callable[[Any], Any]) -> None:
    """A few steps, with jobs ending at any time and in any way."""
    for _ in range(draw(st.integers(0, 10))):
        engine.step()
        tiering.manager.check()
        for queue in tiering.all_queues():
            for job in list(queue.pending):
                if not job.status and draw(st.booleans()):  # one before it may have got its access suspended
                    queue.complete(job, draw(st.sampled_from(JobStatus)))


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@examples(16)
@given(data=st.data())
def test_tokens_are_those_without_offloading_under_any_schedule_of_jobs(
    windows: tuple[int | None, ...], data: st.DataObject
) -> None:
    """Several lives of an engine over the same media; jobs end in any order, at any time, in any way, or never."""
    draw = data.draw
    tiering = drawn_tiering(draw)
    for _ in range(draw(st.integers(1, 3))):
        engine = make_engine(
            tiering,
            windows=windows,
            num_blocks=1 + draw(st.integers(14, 30)) * len(windows),
            max_num_batched_tokens=draw(st.integers(4, 64)),
            max_num_seqs=draw(st.integers(1, 4)),
            prefix_caching=draw(st.booleans()),
        )
        for queue in tiering.all_queues():
            queue.auto, queue.medium.is_gone = draw(st.booleans()), draw(st.integers(0, 9)) == 0
        for at in range(draw(st.integers(1, 6))):
            tokens = prompt(0, 30)[: draw(st.integers(0, 30))] + prompt(at % 3, draw(st.integers(1, 12)))
            engine.add(f"r{at}", tokens, draw(st.integers(1, 6)))
            run_any_way(engine, tiering, draw)
            if draw(st.integers(0, 5)) == 0:
                engine.abort(f"r{at}")
        for queue in tiering.all_queues():
            queue.auto, queue.medium.is_gone = True, False
        finish(engine, tiering)
        for request_id, request in engine.requests.items():
            if request.finish_reason is not FinishReason.ABORT:
                prompt_ids = list(request.all_token_ids[: request.num_prompt_tokens])
                assert engine.tokens(request_id) == alone(prompt_ids, request.sampling.max_tokens)


def test_events_say_what_is_on_disk() -> None:
    tiering = SimulatedTiering(60)
    first = make_engine(tiering, emit_events=True)
    serve(first, tiering, "first", prompt(0, 45))
    stored = [event for event in first.scheduler.take_events() if event.medium == MEDIUM_STORAGE]
    hashes: list[bytes] = []
    extend_hashes(hashes, prompt(0, 45), 4, root_hash())
    assert [event.block_hashes[0] for event in stored if isinstance(event, BlockStored)] == hashes
    shard = tiering.media[0][0]
    shard.corrupt(list(shard.chunks)[3])
    engine = make_engine(tiering, emit_events=True)
    serve(engine, tiering, "second", prompt(0, 45))
    known: list[bytes] = []
    for event in engine.scheduler.take_events():
        if event.medium == MEDIUM_STORAGE and isinstance(event, BlockStored):
            known += event.block_hashes
        elif event.medium == MEDIUM_STORAGE and isinstance(event, BlockRemoved):
            known = [block_hash for block_hash in known if block_hash not in event.block_hashes]
    assert sorted(known) == sorted(hashes)


@pytest.mark.parametrize(
    "plans",
    [
        [GroupPlan(AttentionKind.CHUNKED_LOCAL, 4, 8)],
        [GroupPlan(), GroupPlan(AttentionKind.CHUNKED_LOCAL, 4, 8)],
        [GroupPlan(), GroupPlan(AttentionKind.RECURRENT, 8)],
        [GroupPlan(AttentionKind.SLIDING_WINDOW, 4, 6), GroupPlan(AttentionKind.RECURRENT, 4)],
    ],
)
def test_chunked_local_and_recurrent_groups_are_restored_from_disk(plans: list[GroupPlan]) -> None:
    tiering = SimulatedTiering(90)
    layout = layout_of(plans, 120)
    serve(SimulatedEngine(layout, tiering), tiering, "first", prompt(0, 45))
    engine = SimulatedEngine(layout, tiering)
    serve(engine, tiering, "second", prompt(0, 45))
    counts = restored(engine, "second")
    # Chunked local attention needs nothing of what lies before the last chunk, so the device has it without having it.
    assert engine.requests["second"].num_first_device_tokens + sum(counts.values()) >= 40
    assert set(counts) == {"disk"}


def test_what_comes_from_a_slow_tier_is_written_to_the_faster_one_and_not_back() -> None:
    tiering = SimulatedTiering(60, [DISK, SHARED])
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    tiering.media[0][0].chunks.clear()
    engine = make_engine(tiering)
    jobs: list[list[TierJob]] = [[], []]
    for queue, noted in zip(tiering.all_queues(), jobs, strict=True):
        queue.on_job = noted.append
    engine.add("second", prompt(0, 45), 1)
    finish(engine, tiering)
    assert restored(engine, "second") == {"shared": 44}
    written = [sum(len(job.keys) for job in of_tier if job.kind is JobKind.STORE) for of_tier in jobs]
    assert written == [11, 0]


def test_a_request_is_told_that_a_load_from_below_has_failed() -> None:
    """Found by a simulation: chunks that are there were not restored, and nothing said why."""
    tiering = SimulatedTiering(60)
    engine, queue = fetching_engine(tiering)
    queue.complete(queue.pending[0], JobStatus.FAILED)
    queue.auto = True
    finish(engine, tiering)
    notes = engine.outputs["second"].cache_report.notes
    assert any("lower tiers did not deliver all their chunks" in note for note in notes), notes
