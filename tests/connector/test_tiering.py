"""Tiers below host memory in a simulated engine: every step is checked for wrong tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import extend_hashes, root_hash
from cargohold.connector.offloading import prefetch
from cargohold.connector.offloading.waiting import Waiting
from cargohold.engine.core.request import FinishReason
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.core.waiting_queue import QueuePolicy
from cargohold.offload.tier import JobKind, JobStatus, TierJob
from cargohold.offload.tiering import Admission, Chain, Fetch, TierOptions, WriteMode, fetches, tier_state
from cargohold.protocol import MEDIUM_STORAGE, AttentionKind, BlockRemoved, BlockStored
from cargohold.simulation import SimulatedEngine, VirtualClock, simulated_layout
from cargohold.simulation.layouts import GroupPlan, layout_of
from cargohold.simulation.tiers import HeldQueue, SimulatedTiering
from cargohold.simulation.transfers import HeldTransfers
from tests.connector.common import alone, evict_everything, prompt
from tests.effort import examples

DISK = TierOptions(name="disk")
SHARED = TierOptions(name="shared")
BUCKET = TierOptions(name="shared", has_index=False)


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


def test_what_is_worth_little_in_host_memory_reaches_the_disk_all_the_same() -> None:
    """Found by replaying: the default policy kept one-shot prompts out of host memory, and so off every tier below."""
    tiering = SimulatedTiering(12)
    engine = make_engine(tiering)
    for number in range(40):
        serve(engine, tiering, f"often {number}", prompt(0, 17), num=1)
        serve(engine, tiering, f"once {number}", prompt(1 + number, 33), num=1)
        evict_everything(engine)
    assert len(tiering.media[0][0].chunks) == 4 + 40 * 8


def test_the_time_that_a_request_waited_for_a_lower_tier_is_told() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, max_num_seqs=1)
    assert isinstance(engine.clock, VirtualClock)
    (queue,) = tiering.all_queues()
    queue.auto = False
    engine.add("second", prompt(0, 45), 3)
    for kind in (JobKind.PROBE, JobKind.LOAD):
        engine.step()
        (job,) = queue.pending
        assert job.kind is kind
        engine.clock.advance(1.0)
        queue.complete(job)
        engine.step()
    queue.auto = True
    finish(engine, tiering)
    assert restored(engine, "second") == {"disk": 44}
    assert 2.0 <= engine.requests["second"].times.load_wait_s <= 2.5


def test_the_time_that_a_request_waited_for_a_place_is_none_of_a_lower_tiers() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, max_num_seqs=2)
    assert isinstance(engine.clock, VirtualClock)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    engine.add("runs", prompt(1, 9), 30)
    engine.step()
    engine.step()
    engine.add("second", prompt(0, 45), 3)
    engine.step()
    engine.add("urgent", prompt(2, 9), 20)
    for _ in range(4):
        engine.step()
    assert engine.requests["urgent"].num_output_tokens > 0, "it has taken the only place"
    engine.clock.advance(50.0)
    queue.held = frozenset()
    finish(engine, tiering)
    assert engine.requests["second"].times.load_wait_s < 1.0


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
    stats = engine.scheduler.connector.get_stats()
    assert "removed_chunks" not in stats, "what was never there has not gone"
    assert stats["num_ready_chunks"] == stats["stored_chunks"] + stats["disk_loaded_chunks"]
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


def test_who_waits_for_a_place_is_restored_when_there_is_one() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    clock = VirtualClock()
    engine = make_engine(tiering, max_num_seqs=1, clock=clock)
    engine.add("known", prompt(0, 45), 3)
    engine.add("other", prompt(1, 9), 50)
    for _ in range(50):
        engine.step()
        clock.advance(1)
    finish(engine, tiering)
    assert restored(engine, "known") == {"host": 44}, "it came up while the request waited, and was held no more"
    assert not any("took longer" in note for note in engine.outputs["known"].cache_report.notes)


@pytest.mark.parametrize(("num_requests", "num_chunks", "num_answer_tokens"), [(6, 60, 1500), (30, 50, 200)])
def test_in_a_long_queue_every_request_is_restored(num_requests: int, num_chunks: int, num_answer_tokens: int) -> None:
    """Found by reading: what came up long before its request's turn was evicted, and the request did not ask again.

    And where many are asked for whenever there is a place for one, the time of all of them ran out.
    """
    tiering = SimulatedTiering(2 * num_requests * num_chunks)
    shape = {"num_blocks": 1000, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    engine = make_engine(tiering, **shape)
    for at in range(num_requests):
        serve(engine, tiering, str(at), prompt(at, 4 * num_chunks + 1), 1)
    tiering.num_slots = 5 * num_chunks
    engine = make_engine(tiering, **shape)
    serve(engine, tiering, "known", prompt(5000, 200), 2)  # so that it is known how long computing takes
    (queue,) = tiering.all_queues()
    loaded: list[bytes] = []
    queue.on_job = lambda job: loaded.extend(job.keys if job.kind is JobKind.LOAD else ())
    for at in range(num_requests):
        engine.add(str(at), prompt(at, 4 * num_chunks + 1), num_answer_tokens)
    most_held = 0
    while engine.scheduler.num_unfinished:
        engine.step()
        most_held = max(most_held, tiering.manager.num_pins + tiering.manager.num_writing)
    finish(engine, tiering)
    for at in range(num_requests):
        assert sum(restored(engine, str(at)).values()) == 4 * num_chunks, at
        assert engine.requests[str(at)].times.load_wait_s < 0.2, "time without a place counted"
    assert len(loaded) <= 1.5 * num_requests * num_chunks, "chunks came up again and again"
    assert most_held <= 4 * num_chunks, "more than half of host memory was held, and one request's chunks beside"


def test_prompts_with_more_chunks_than_answers_are_remembered_are_restored_as_far_as_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by reading: the answers for the last chunks pushed out those for the first, which were asked for again."""
    monkeypatch.setattr(tier_state, "MIN_ANSWERS", 0)
    tokens = prompt(0, 220)
    tiering = SimulatedTiering(100)
    serve(make_engine(tiering, num_blocks=100), tiering, "first", tokens)
    tiering.num_slots = 10  # 40 answers are remembered, and the prompt has 55 chunks
    engine = make_engine(tiering, num_blocks=100)
    (queue,) = tiering.all_queues()
    asked: list[bytes] = []
    queue.on_job = lambda job: asked.extend(job.keys if job.kind is JobKind.PROBE else ())
    serve(engine, tiering, "second", tokens)
    assert restored(engine, "second") == {"disk": 40}
    assert len(asked) == len(set(asked)) == 20


def waiting_for_a_load(prompt_tokens: list[int]) -> tuple[SimulatedEngine, SimulatedTiering, HeldQueue]:
    """An engine for one request at a time, whose request "known" has waited 0.9 of 2 s for what is asked of the disk."""
    tiering = SimulatedTiering(60, restore_timeout_s=2.0)
    serve(make_engine(tiering), tiering, "first", prompt_tokens)
    engine = make_engine(tiering, max_num_seqs=1)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.PROBE, JobKind.LOAD})
    engine.add("known", prompt_tokens, 3)
    while engine.clock() < 0.9:
        engine.step()
    return engine, tiering, queue


def test_a_request_waits_for_all_jobs_together_no_longer_than_it_may() -> None:
    engine, tiering, queue = waiting_for_a_load(prompt(0, 45))
    queue.complete(queue.pending[0])
    while engine.clock() < 1.9:
        engine.step()
    assert [job.kind for job in queue.pending] == [JobKind.LOAD], "which may take 2 s itself"
    while "known" not in engine.outputs:
        engine.step()
    assert engine.clock() < 2.2
    notes = engine.outputs["known"].cache_report.notes
    assert "lower tiers took longer than 2 s" in notes and not any("is off" in note for note in notes)
    assert restored(engine, "known") == {} and engine.tokens("known") == alone(prompt(0, 45), 3)
    finish(engine, tiering)


@pytest.mark.parametrize("ends", [True, False])
def test_time_without_a_place_is_not_spent_on_lower_tiers_and_the_rest_of_it_is(ends: bool) -> None:
    engine, tiering, queue = waiting_for_a_load(prompt(0, 45))
    engine.add("other", prompt(1, 3), 20)
    engine.step()  # less than a chunk needs no tier, so it takes the only place
    queue.complete(queue.pending[0])
    assert isinstance(engine.clock, VirtualClock)
    while "other" not in engine.outputs:
        assert not queue.pending
        engine.clock.advance(0.5)
        engine.step()
    began = engine.clock()
    queue.held = frozenset() if ends else queue.held
    while "known" not in engine.outputs:
        engine.step()
    assert restored(engine, "known") == ({"disk": 44} if ends else {})
    is_late = any("took longer" in note for note in engine.outputs["known"].cache_report.notes)
    assert is_late is not ends
    assert engine.clock() - began < 1.3, "1.1 s were left"
    finish(engine, tiering)


def test_of_requests_that_were_admitted_no_wait_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Waiting]] = []

    class Watched(Waiting):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(prefetch, "Waiting", Watched)
    tiering = SimulatedTiering(60)
    engine = make_engine(tiering)
    for at in range(4):
        serve(engine, tiering, f"r{at}", prompt(at, 20))
    assert [ref() for ref in made] == [None] * 4


@pytest.mark.parametrize("kind", [JobKind.PROBE, JobKind.LOAD])
def test_time_in_which_nobody_steps_is_not_held_against_a_tier(kind: JobKind) -> None:
    """Before, a request whose chunks had come while a reader paused was told that lower tiers took too long."""
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({kind})
    engine.add("known", prompt(0, 45), 3)
    while not queue.pending:
        engine.step()
    queue.complete(queue.pending[0])
    queue.held = frozenset()
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(120)
    finish(engine, tiering)
    assert engine.tokens("known") == alone(prompt(0, 45), 3)
    assert restored(engine, "known") == {"disk": 44}
    assert not any("took longer" in note for note in engine.outputs["known"].cache_report.notes)
    (tier,) = tiering.manager.lower.tiers
    predicted_s = tier.pace.predict(11)
    assert predicted_s is not None and predicted_s < 1, "nor is it slow"


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


def waits_of(engine: SimulatedEngine, prompts: Sequence[list[int]]) -> list[float]:
    """Serve prompts, one after the other; how long each took."""
    waited = []
    for tokens in prompts:
        name, began = f"r{len(engine.outputs)}", engine.clock()
        engine.add(name, tokens, 1)
        while name not in engine.outputs:
            engine.step()
        waited.append(engine.clock() - began)
    return waited


def test_a_stalled_tier_delays_a_request_no_longer_than_allowed_and_the_next_ones_not_at_all() -> None:
    tiering = SimulatedTiering(60, restore_timeout_s=2.0, restore="always")
    engine = make_engine(tiering)
    tiering.media[0][0].stalls = True
    waited = waits_of(engine, [prompt(at, 20) for at in range(8)])
    assert max(waited) < 1.1, "half of the time is for look-ups"
    assert max(waited[4:]) < 0.1, "it is suspended by now"
    began = engine.clock()
    engine.run()
    assert engine.clock() - began < 4.1, "nor does anybody wait long for what is to be written"
    engine.add("next", prompt(20, 20), 1)
    while "next" not in engine.outputs:
        engine.step()
    assert not engine.connector.has_pending_work(), "and not again"


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("num_new_tokens", [0, 16])
def test_a_tier_whose_loads_never_end_is_left_alone_too(num_new_tokens: int, has_index: bool) -> None:
    """Found by a soak: each request cancelled its load a moment before that was late, so every one of them waited in vain.

    And found by reading: if prompts had new tokens, they were written, and each write that succeeded ended the row of loads
    that did not. So did look-ups of a tier without an index.
    """
    tiering = SimulatedTiering(400, [replace(DISK, has_index=has_index)], restore_timeout_s=2.0, restore="always")
    prompts = [prompt(at, 20) for at in range(80)]
    for at, tokens in enumerate(prompts):
        serve(make_engine(tiering), tiering, f"first {at}", tokens)
    engine = make_engine(tiering)
    assert isinstance(engine.clock, VirtualClock)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    longer = [tokens + [7] * num_new_tokens for tokens in prompts]
    waited = waits_of(engine, longer[:8])
    assert max(waited) < 2.5 < sum(waited), "they waited, but not for long"
    assert max(waited[4:]) < 0.1, "it is suspended by now"
    told = "tier disk: loads are suspended: simulated: expired"
    assert told in engine.outputs["r7"].cache_report.notes and told not in engine.outputs["r0"].cache_report.notes

    num_trials = 0
    for number, tokens in enumerate(longer[8:70]):
        engine.clock.advance(1.0)
        (again,) = waits_of(engine, [tokens])
        assert again < 0.1, f"request {number} paid for trying whether it is back"
        num_trials += any(job.kind is JobKind.LOAD for job in queue.pending)
    assert num_trials > 3, "it was tried"

    queue.held = frozenset()
    engine.clock.advance(60.0)
    waits_of(engine, longer[70:72])
    assert restored(engine, "r71") == {"disk": 20}, "it is used again after one load has succeeded"


def test_who_waits_for_a_tier_that_is_always_too_slow_does_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: only loads that were done in time told how fast it is, so it was never known to be slower."""
    monkeypatch.setattr(fetches, "BATCH_CHUNKS", 2)
    tiering = SimulatedTiering(200, restore_timeout_s=2.0)
    for at in range(9):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 41))
    engine = make_engine(tiering)
    assert isinstance(engine.clock, VirtualClock)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    waited = []
    for at in range(9):
        engine.clock.advance(0.0 if at < 8 else 30.0)
        assert not queue.pending
        began = done_at = engine.clock()
        engine.add(f"r{at}", prompt(at, 41), 1)
        while f"r{at}" not in engine.outputs:
            engine.step()
            if queue.pending and engine.clock() >= done_at + 0.5:  # three of five batches are done in time
                queue.complete(queue.pending[0])
                done_at = engine.clock()
        waited.append(engine.clock() - began)
    assert restored(engine, "r0") == {"disk": 24}, "with what has come, the request goes on"
    assert 2.0 < waited[0] < 2.5
    assert max(waited[1:8]) < 0.1, "computing is faster"
    assert queue.pending, "after a while it is tried again"
    assert waited[8] < 0.1, "and nobody waits for it longer than computing takes"


def measured_engine(tiering: SimulatedTiering, **options: Any) -> tuple[SimulatedEngine, HeldQueue]:
    """An engine that knows how long computing takes: 0.01 s for 8 tokens."""
    engine = make_engine(tiering, max_num_batched_tokens=8, **options)
    serve(engine, tiering, "measured", prompt(1000, 8), 1)
    (queue,) = tiering.all_queues()
    return engine, queue


@pytest.mark.parametrize("restore", ["if_faster", "always"])
@pytest.mark.parametrize("kind", [JobKind.PROBE, JobKind.LOAD])
def test_nobody_waits_much_longer_for_a_tier_than_computing_takes(kind: JobKind, restore: str) -> None:
    """Found by simulation: until a tier that hangs was known to, requests of some steps waited for it for seconds."""
    tiering = SimulatedTiering(60, restore_timeout_s=2.0, restore=restore)
    serve(make_engine(tiering), tiering, "first", prompt(0, 48))
    engine, queue = measured_engine(tiering)
    queue.held = frozenset({kind})
    (waited,) = waits_of(engine, [prompt(0, 48)])
    notes = engine.outputs["r1"].cache_report.notes
    if kind is JobKind.PROBE:
        limit_s, reason = 0.06 if restore == "if_faster" else 1.0, "there was not enough time to learn from disk"
    elif restore == "if_faster":
        limit_s, reason = 0.12, "lower tiers took longer than 0.12 s, and computing is expected to take 0.06 s"
    else:
        limit_s, reason = 2.0, "lower tiers took longer than 2 s"
    assert 0.0 < waited - limit_s < 0.11, (
        "twice as long as computing takes, half of it for look-ups; then it is computed"
    )
    assert any(note.startswith(reason) for note in notes)
    finish(engine, tiering)


def test_who_waits_is_told_as_soon_as_it_is_known_how_long_computing_takes() -> None:
    tiering = SimulatedTiering(60, restore_timeout_s=2.0)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, max_num_batched_tokens=8)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.PROBE})
    engine.add("known", prompt(0, 45), 1)
    while engine.clock() < 0.5:
        engine.step()
    assert "known" not in engine.outputs, "nothing was ever computed"
    engine.add("other", prompt(1, 3), 1)  # less than a chunk needs no tier
    while "known" not in engine.outputs:
        engine.step()
    assert engine.clock() < 0.75
    finish(engine, tiering)


def test_a_deadline_that_was_put_off_is_not_forgotten() -> None:
    """Nobody looked at the request again when its time was over, if that had been brought forward and then put off."""
    tiering = SimulatedTiering(60, restore_timeout_s=2.0)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine, queue = measured_engine(tiering, max_num_seqs=1)
    queue.held = frozenset({JobKind.LOAD})
    engine.add("known", prompt(0, 45), 1)
    for _ in range(3):
        engine.step()
    engine.add("other", prompt(1, 3), 20)  # less than a chunk needs no tier, so it takes the only place
    while "other" not in engine.outputs:
        engine.step()
    began = engine.clock()
    while "known" not in engine.outputs:
        engine.step()
    assert engine.clock() - began < 0.25
    finish(engine, tiering)


def test_what_comes_after_a_request_has_given_up_tells_how_slow_a_tier_is() -> None:
    tiering = SimulatedTiering(60)
    for at in range(2):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 45))
    engine, queue = measured_engine(tiering)
    queue.held = frozenset({JobKind.LOAD})
    waits_of(engine, [prompt(0, 45)])
    while engine.clock() < 1.0:
        engine.step()
    queue.complete(queue.pending[0])
    finish(engine, tiering)
    (waited,) = waits_of(engine, [prompt(1, 45)])
    assert waited < 0.1
    notes = engine.outputs["r2"].cache_report.notes
    assert any("computing was expected to be faster than loading from disk: 0.06" in note for note in notes), notes


@pytest.mark.parametrize("timeout_s", [60.0, 1.5])
def test_of_two_tiers_the_one_that_is_too_slow_is_left_out(timeout_s: float) -> None:
    """What is not worth loading is computed, not all of the prompt, even if the slow tier would not be done in time."""
    tiering = SimulatedTiering(200, [DISK, SHARED], restore_timeout_s=timeout_s)
    for at in range(3):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 60))
    on_disk = list(tiering.media[0][0].chunks)
    for key in on_disk[:15] + on_disk[40:]:  # the first prompt, and the end of the last one, are only in the store
        del tiering.media[0][0].chunks[key]
    engine = make_engine(tiering, max_num_batched_tokens=8)
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    serve(engine, tiering, "measured", prompt(1000, 8), 1)
    _, store = tiering.all_queues()
    store.on_job = lambda job: clock.advance(1.0 if job.kind is JobKind.LOAD else 0.0)
    for at, restored_from in enumerate([{"shared": 60}, {"disk": 60}, {"disk": 40}]):
        serve(engine, tiering, f"r{at}", prompt(at, 60))
        assert restored(engine, f"r{at}") == restored_from
    notes = [note for note in engine.outputs["r2"].cache_report.notes if "was expected" in note]
    assert len(notes) == 1 and "faster than loading from shared: 0.0" in notes[0]


def on_storage(engine: SimulatedEngine, kind: type[BlockStored | BlockRemoved]) -> set[bytes]:
    """Blocks in events of a kind since the last look, for lower tiers."""
    events = [event for event in engine.scheduler.take_events() if isinstance(event, kind)]
    return {name for event in events if event.medium == MEDIUM_STORAGE for name in event.block_hashes}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tier_that_is_off_on_a_worker_is_planned_for_no_more(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, each request of a quiet engine asked it, waited a step, and was warned that it is left alone for a while."""
    tiering = SimulatedTiering(60, world_size=world_size)
    engine = make_engine(tiering, emit_events=True)
    serve(engine, tiering, "first", prompt(0, 45))
    announced = on_storage(engine, BlockStored)
    asked: list[TierJob] = []
    for queues in tiering.queues:
        queues[0].on_job = asked.append
    tiering.queues[-1][0].is_off = True
    engine.add("second", prompt(1, 45), 3)
    finish(engine, tiering)
    asked.clear()
    assert isinstance(engine.clock, VirtualClock)
    for at in range(2, 6):
        engine.clock.advance(120)
        serve(engine, tiering, f"r{at}", prompt(at, 45))
        assert "tier disk is off" in engine.outputs[f"r{at}"].cache_report.notes[0]
    assert not asked and not tiering.lower.tiers[0].backlog
    assert caplog.text.count("tier disk is off") == 1 and "left alone" not in caplog.text
    assert on_storage(engine, BlockRemoved) == announced
    assert engine.connector.get_stats()["disk_off"] == 1


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


def test_what_host_memory_has_is_held_while_the_rest_is_brought_up() -> None:
    tiering = SimulatedTiering(60, policy="lru")
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    tiering.num_slots = 12
    engine = make_engine(tiering)
    serve(engine, tiering, "its start", prompt(0, 17))
    evict_everything(engine)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    engine.add("all of it", prompt(0, 45), 3)
    while not queue.pending:
        engine.step()
    engine.add("other", prompt(1, 45), 1)
    while "other" not in engine.outputs:
        engine.step()
    queue.held = frozenset()
    finish(engine, tiering)
    assert restored(engine, "all of it") == {"host": 16, "disk": 28}


def play_out_of_slots() -> tuple[SimulatedTiering, SimulatedEngine, HeldTransfers]:
    """The disk has the first prompt, and host memory is full of another's chunks on their way into it."""
    tiering = SimulatedTiering(60, restore="always")
    serve(make_engine(tiering), tiering, "first", prompt(0, 17))
    tiering.num_slots = 4
    engine = make_engine(tiering)
    (transfers,) = tiering.transfers
    transfers.auto = False
    engine.add("other", prompt(1, 17), 1)
    while "other" not in engine.outputs:
        engine.step()
    return tiering, engine, transfers


def test_who_finds_no_slot_for_a_moment_waits_for_one() -> None:
    tiering, engine, transfers = play_out_of_slots()
    assert tiering.manager.num_writing == 4
    engine.add("known", prompt(0, 17), 3)
    for _ in range(10):
        engine.step()
    assert engine.requests["known"].times.first_scheduled is None
    transfers.auto = True
    finish(engine, tiering)
    assert restored(engine, "known") == {"disk": 16} and engine.tokens("known") == alone(prompt(0, 17), 3)


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse-index"])
def test_who_fills_host_memory_alone_does_not_wait_for_slots_that_only_its_own_chunks_have(policy: str) -> None:
    """Found by a review: it waited as long as it might, and all others that needed slots waited behind it."""
    larger = SimulatedTiering(200)
    for number, num_tokens in enumerate((81, 81, 9)):
        serve(make_engine(larger), larger, f"first {number}", prompt(number, num_tokens))
    tiering = SimulatedTiering(10, policy=policy, restore="always")
    tiering.media = larger.media
    engine = make_engine(tiering)
    serve(engine, tiering, "its start", prompt(0, 41), 1)
    evict_everything(engine)
    engine.add("large", prompt(0, 81), 1)
    engine.add("small", prompt(2, 9), 1)
    finish(engine, tiering)
    assert engine.clock() < 2.0
    assert restored(engine, "large") == {"host": 40} and restored(engine, "small") == {"disk": 8}
    (note,) = [note for note in engine.outputs["large"].cache_report.notes if "host memory" in note]
    assert note == "the request's own chunks fill host memory: there was no room for more from lower tiers"


def test_who_finds_no_slot_does_not_look_for_one_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look goes through all chunks of the prompt. Once the tiers had answered, there was no pause between two of them."""
    tiering, engine, transfers = play_out_of_slots()
    looks: list[float] = []
    fetch = tiering.lower.fetch

    def noted(chains: Sequence[Chain], kept: Sequence[bytes]) -> Fetch | None:
        looks.append(engine.clock())
        return fetch(chains, kept)

    monkeypatch.setattr(tiering.lower, "fetch", noted)
    engine.add("known", prompt(0, 17), 3)
    began = engine.clock()
    for at in range(20):
        engine.add(str(at), prompt(2 + at, 9), 1)  # so that something is answered in every step
        engine.step()
    assert 2 <= len(looks) <= (engine.clock() - began) / prefetch.LOOK_AGAIN_S
    transfers.auto = True
    finish(engine, tiering)
    assert restored(engine, "known") == {"disk": 16} and engine.tokens("known") == alone(prompt(0, 17), 3)


def test_nobody_waits_for_a_slow_write_to_get_blocks_that_a_loaded_request_holds() -> None:
    """Found by reading: as long as a disk was busy, a request that was first in line waited, and nobody ran."""
    tiering = SimulatedTiering(60)
    engine = make_engine(tiering, num_blocks=13, policy=QueuePolicy.PRIORITY)
    (queue,), (transfers,) = tiering.all_queues(), tiering.transfers
    serve(engine, tiering, "before", prompt(1, 36), 1)
    evict_everything(engine)
    queue.held = frozenset({JobKind.STORE})
    engine.add("writes", prompt(2, 20), 1)
    while engine.scheduler.num_unfinished:
        engine.step()
    evict_everything(engine)
    engine.add("loaded", prompt(1, 36), 2, priority=5)
    transfers.auto = False
    engine.step()
    engine.add("urgent", prompt(3, 36), 2)  # needs 9 of the 12 blocks, of which the loaded one holds 9
    began = engine.clock()
    engine.step()
    transfers.auto = True
    while "urgent" not in engine.outputs:
        engine.step()
    assert engine.clock() - began < 0.2 and engine.requests["loaded"].num_preemptions == 1
    assert tiering.lower.is_settling, "the disk was not busy"
    queue.held = frozenset()
    finish(engine, tiering)
    assert engine.tokens("urgent") == alone(prompt(3, 36), 2) and engine.tokens("loaded") == alone(prompt(1, 36), 2)


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
    queue.held = frozenset({JobKind.STORE})
    for at in range(8):
        engine.add(f"r{at}", prompt(at, 40), 2)
        for _ in range(12):
            engine.step()
        assert 1 <= sum(len(job.keys) for job in queue.pending) <= 4, "a quarter of host memory at most"
        assert f"r{at}" in engine.outputs, "nobody waits for that"
        tiering.manager.check()
    queue.held = frozenset()
    finish(engine, tiering)
    engine = make_engine(tiering)
    for at in range(8):
        serve(engine, tiering, f"again {at}", prompt(at, 40), 2)
    assert sum(restored(engine, f"again {at}").get("disk", 0) for at in range(8)) >= 16


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


def test_an_idle_engine_steps_on_until_what_nobody_wants_any_more_has_come() -> None:
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
                if draw(st.booleans()):
                    queue.complete(job, draw(st.sampled_from(JobStatus)))


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@examples(40)
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


def compute_slowly(engine: SimulatedEngine, clock: VirtualClock, step_s: float) -> None:
    """Let computing 32 tokens take ``step_s``."""
    execute = engine.executor.execute

    def slow(step: SchedulerStep) -> StepOutput:
        if step.scheduled:
            clock.advance(step_s * step.num_tokens / 32)
        return execute(step)

    engine.executor.execute = slow  # type: ignore[method-assign]  # time must pass somewhere


class TestDoNoHarm:
    """Virtual time: a step of the engine takes 0.01 s, a job as long as the test lets it."""

    def measure(self, step_s: float, job_s: float, **options: Any) -> tuple[SimulatedEngine, SimulatedTiering]:
        """An engine that has measured both: computing 32 tokens takes ``step_s``, bringing up chunks ``job_s`` each."""
        tiering = SimulatedTiering(200, **options)
        first = make_engine(tiering)
        for at in range(6):
            serve(first, tiering, f"first {at}", prompt(at, 60 + 4 * at))
        engine = make_engine(tiering)
        assert isinstance(engine.clock, VirtualClock)
        clock = engine.clock
        (queue,) = tiering.all_queues()
        queue.on_job = lambda job: clock.advance(job_s * len(job.keys) if job.kind is JobKind.LOAD else 0)
        compute_slowly(engine, clock, step_s)
        for at in range(3):
            serve(engine, tiering, f"measured {at}", prompt(at, 60 + 4 * at))
        return engine, tiering

    def test_a_fast_tier_is_used(self) -> None:
        engine, tiering = self.measure(step_s=0.5, job_s=0.001)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"disk": 60}

    def test_a_tier_slower_than_computing_is_left_alone_and_the_request_is_told(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {}
        assert any("faster than loading from disk" in note for note in engine.outputs["now"].cache_report.notes)

    def test_what_host_memory_has_does_not_count_as_computing_that_a_tier_saves(self) -> None:
        """Computing all of it would take longer than loading what host memory lacks; computing that alone would not."""
        engine, tiering = self.measure(step_s=0.8, job_s=0.2)
        serve(engine, tiering, "its start", prompt(5, 41))
        evict_everything(engine)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"host": 40}
        assert any("faster than loading from disk" in note for note in engine.outputs["now"].cache_report.notes)

    def test_what_was_decided_holds_while_the_request_waits_for_room(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2)
        engine.add("large", prompt(9, 210), 20)
        while engine.requests["large"].times.first_token is None:
            engine.step()
        engine.add("now", prompt(5, 60), 3)
        while "large" not in engine.outputs:
            engine.step()
            assert engine.requests["now"].times.first_scheduled is None
        finish(engine, tiering)
        notes = engine.outputs["now"].cache_report.notes
        assert sum("faster than loading from disk" in note for note in notes) == 1
        assert restored(engine, "now") == {} and engine.tokens("now") == alone(prompt(5, 60), 3)

    def test_unless_it_is_to_be_used_always(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2, restore="always", restore_timeout_s=60.0)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"disk": 60}

    def test_a_slow_tier_is_tried_again_after_a_while(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2)
        (queue,) = tiering.all_queues()
        queue.on_job = lambda _: None
        assert isinstance(engine.clock, VirtualClock)
        engine.clock.advance(31)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"disk": 60}

    def ask_slowly(self, step_s: float, look_up_s: float, **options: Any) -> tuple[SimulatedEngine, SimulatedTiering]:
        """An engine over a disk and a shared store: the store has needed ``look_up_s`` to say that it lacks a prompt."""
        tiering = SimulatedTiering(200, [DISK, replace(SHARED, has_index=False)], **options)
        for at in range(5):
            serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 60))
        shared = tiering.media[1][0].chunks
        on_disk = list(tiering.media[0][0].chunks)
        # The first prompt is only in the store; of the second, the start is on disk.
        for key in on_disk[:15] + on_disk[20:30]:
            del tiering.media[0][0].chunks[key]
        assert len(shared) == 75
        engine = make_engine(tiering)
        assert isinstance(engine.clock, VirtualClock)
        clock = engine.clock
        _, store = tiering.all_queues()
        store.on_job = lambda job: clock.advance(look_up_s if job.kind is JobKind.PROBE else 0)
        compute_slowly(engine, clock, step_s)
        serve(engine, tiering, "new", prompt(9, 60))
        return engine, tiering

    def test_a_store_that_is_slow_to_say_what_it_has_is_not_asked_for_what_is_computed_sooner(self) -> None:
        """Found by reading: each new prompt waited for every chunk to be looked up, however long that took."""
        engine, tiering = self.ask_slowly(step_s=0.1, look_up_s=1.0)
        assert isinstance(engine.clock, VirtualClock)
        (waited,) = waits_of(engine, [prompt(10, 60)])
        assert waited < 0.3
        (note,) = [note for note in next(reversed(engine.outputs.values())).cache_report.notes if "asking" in note]
        assert note == "asking shared was expected to take 1.010 s, and to save 0.197 s"
        serve(engine, tiering, "there", prompt(0, 60))
        assert restored(engine, "there") == {}
        serve(engine, tiering, "partly on disk", prompt(1, 60))
        assert restored(engine, "partly on disk") == {"disk": 20}, "that is known without asking the store"
        engine.clock.advance(31.0)
        serve(engine, tiering, "later", prompt(0, 60)[:48] + prompt(11, 12))
        assert engine.requests["later"].times.load_wait_s > 1.0, "it was asked again"

    @pytest.mark.parametrize(
        ("step_s", "look_up_s", "options"), [(0.1, 0.01, {}), (2.0, 1.0, {}), (0.1, 1.0, {"restore": "always"})]
    )
    def test_a_store_is_asked_if_that_is_faster_or_wanted(
        self, step_s: float, look_up_s: float, options: dict[str, Any]
    ) -> None:
        engine, tiering = self.ask_slowly(step_s=step_s, look_up_s=look_up_s, **options)
        serve(engine, tiering, "there", prompt(0, 60))
        assert restored(engine, "there") == {"shared": 60}

    def serve_stored(self, num_asked_at_once: int | None, gain: float, ask_s: float) -> dict[str, int]:
        """What is restored of a prompt that a store has; computing it takes 0.56 s.

        The store has taken ``ask_s`` for each chunk that it was asked for, and has had a part of ``gain`` of these.
        """
        tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=num_asked_at_once)])
        serve(make_engine(tiering), tiering, "first", prompt(0, 60))
        engine = make_engine(tiering)
        assert isinstance(engine.clock, VirtualClock)
        compute_slowly(engine, engine.clock, step_s=0.3)
        for at in (10, 11):
            serve(engine, tiering, f"new {at}", prompt(at, 60))
        (store,) = tiering.lower.tiers
        for _ in range(200):
            store.look_up_gain.note(gain)
        for num_chunks in (1, 15) * 20:
            store.look_up_pace.note(num_chunks, ask_s * num_chunks)
        serve(engine, tiering, "there", prompt(0, 60))
        return restored(engine, "there")

    @pytest.mark.parametrize(("num_asked_at_once", "expected"), [(None, {}), (1, {"shared": 60})])
    def test_asking_for_a_few_chunks_first_may_be_worth_it_where_asking_for_all_is_not(
        self, num_asked_at_once: int | None, expected: dict[str, int]
    ) -> None:
        # All answers take 0.45 s, the first 0.03 s; of the time for computing, six tenths are saved on average.
        assert self.serve_stored(num_asked_at_once, gain=0.6, ask_s=0.03) == expected

    def test_of_a_store_that_has_the_first_chunks_more_is_expected_than_of_one_that_was_not_asked_yet(self) -> None:
        # The next four chunks take 0.06 s: more than a tenth of the time that computing takes, and less than all of it.
        assert self.serve_stored(1, gain=0.1, ask_s=0.015) == {"shared": 60}

    def test_only_what_comes_in_time_is_brought_up_behind_what_the_device_has(self) -> None:
        engine, tiering = self.measure(step_s=9.0, job_s=0.2, restore_timeout_s=3.0)
        serve(engine, tiering, "its start", prompt(5, 17))
        serve(engine, tiering, "now", prompt(5, 60))
        assert engine.requests["now"].num_first_device_tokens == 16
        assert 4 <= restored(engine, "now")["disk"] <= 28, "half of 3 s is enough for seven chunks of eleven"

    def test_only_what_comes_in_time_is_brought_up(self) -> None:
        engine, tiering = self.measure(step_s=9.0, job_s=0.2, restore_timeout_s=3.0)
        serve(engine, tiering, "now", prompt(5, 60))
        assert 4 <= restored(engine, "now")["disk"] <= 40


def sizes_of_probes(tiering: SimulatedTiering) -> list[int]:
    """A list that from now on gets the size of each question to the slowest tier of the engine made last."""
    sizes: list[int] = []

    def note(job: TierJob) -> None:
        if job.kind is JobKind.PROBE:
            sizes.append(len(job.keys))

    tiering.all_queues()[-1].on_job = note
    return sizes


@pytest.mark.parametrize(
    ("tokens", "expected", "num_restored"),
    [
        (prompt(9, 60), [2], 0),
        (prompt(0, 60), [2, 8, 5], 60),
        (prompt(0, 4) + prompt(9, 56), [2], 4),
        (prompt(0, 12) + prompt(9, 48), [2, 8], 12),
        (prompt(0, 11), [2], 8),
    ],
)
def test_a_store_that_answers_one_by_one_is_asked_for_the_first_chunks_first(
    tokens: list[int], expected: list[int], num_restored: int
) -> None:
    """Of a new prompt, all other questions would be asked in vain: at an object store, each is a request of its own."""
    tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=2)])
    serve(make_engine(tiering), tiering, "first", prompt(0, 60))
    engine = make_engine(tiering)
    sizes = sizes_of_probes(tiering)
    serve(engine, tiering, "now", tokens)
    assert sizes == expected
    assert sum(restored(engine, "now").values()) == num_restored


@pytest.mark.parametrize("restore", ["if_faster", "always"])
def test_of_a_long_prompt_as_much_is_restored_as_can_be_looked_up_in_time(restore: str) -> None:
    """Found by a review: if looking up all of it took longer than a request may wait, it waited in vain at every visit."""
    tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=2)], restore_timeout_s=1.0, restore=restore)
    serve(make_engine(tiering, num_blocks=200), tiering, "first", prompt(0, 241))
    engine = make_engine(tiering, num_blocks=200)
    assert isinstance(engine.clock, VirtualClock)
    clock = engine.clock
    compute_slowly(engine, clock, step_s=1.0)
    (queue,) = tiering.all_queues()
    queue.on_job = lambda job: clock.advance(0.02 * len(job.keys) if job.kind is JobKind.PROBE else 0)
    for number in range(4):
        tiering.manager.host.reset()
        evict_everything(engine)
        clock.advance(11.0)
        serve(engine, tiering, f"visit {number}", prompt(0, 241), 1)
        assert 40 <= restored(engine, f"visit {number}")["shared"] <= 100, "half a second is enough for 25 chunks of 60"
        assert engine.requests[f"visit {number}"].times.load_wait_s < 0.7
    assert tiering.lower.tiers[0].stats["failures"] == 0


def test_what_some_tiers_have_said_counts_when_another_does_not_answer_in_time() -> None:
    tiering = SimulatedTiering(60, [DISK, replace(BUCKET, num_asked_at_once=4)], restore_timeout_s=1.0)
    serve(make_engine(tiering), tiering, "first", prompt(0, 61))
    on_disk = tiering.media[0][0].chunks
    for key in list(on_disk)[6:]:
        del on_disk[key]
    engine = make_engine(tiering)
    assert isinstance(engine.clock, VirtualClock)
    compute_slowly(engine, engine.clock, step_s=3.0)
    _, store = tiering.all_queues()
    store.held = frozenset({JobKind.PROBE})
    serve(engine, tiering, "second", prompt(0, 61), 1)
    assert restored(engine, "second") == {"disk": 24}
    notes = engine.outputs["second"].cache_report.notes
    assert "there was not enough time to learn from shared whether it has more chunks" in notes


def test_below_a_disk_it_is_asked_for_the_first_chunks_that_the_disk_lacks() -> None:
    tiering = SimulatedTiering(200, [DISK, replace(BUCKET, num_asked_at_once=2)])
    serve(make_engine(tiering), tiering, "first", prompt(0, 60))
    on_disk = tiering.media[0][0].chunks
    for key in list(on_disk)[6:]:
        del on_disk[key]
    engine = make_engine(tiering)
    sizes = sizes_of_probes(tiering)
    serve(engine, tiering, "now", prompt(0, 60))
    assert sizes[:2] == [2, 7], "of nine; later it is asked whether it has what came from the disk"
    assert restored(engine, "now") == {"disk": 24, "shared": 36}


@pytest.mark.parametrize("windows", [(6,), (None, 6), (9, None, 3)])
def test_with_windows_all_that_is_needed_is_found_in_the_end(windows: tuple[int | None, ...]) -> None:
    tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=1)])
    serve(make_engine(tiering, windows=windows, num_blocks=100), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, windows=windows, num_blocks=100)
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {"shared": 44}


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
def test_other_kinds_of_attention(plans: list[GroupPlan]) -> None:
    tiering = SimulatedTiering(90)
    layout = layout_of(plans, 120)
    serve(SimulatedEngine(layout, tiering), tiering, "first", prompt(0, 45))
    engine = SimulatedEngine(layout, tiering)
    serve(engine, tiering, "second", prompt(0, 45))
    counts = restored(engine, "second")
    # Chunked local attention needs nothing of what lies before the last chunk, so the device has it without having it.
    assert engine.requests["second"].num_first_device_tokens + sum(counts.values()) >= 40
    assert set(counts) == {"disk"}
