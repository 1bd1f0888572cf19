"""Requests that wait for tiers below host memory, and for slots there, in a simulated engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from cargohold.engine.core.request import FinishReason
from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.lab.simulation import SimulatedEngine, VirtualClock
from cargohold.lab.simulation.transfers import HeldTransfers
from cargohold.protocol import metrics
from cargohold.tiers import JobKind, TierJob
from cargohold.tiers.scheduler_side import Chain, Fetch, Waiting, prefetch, tier_state
from tests.connector.common import alone, evict_everything, prompt
from tests.connector.tiering import fetching_engine, finish, make_engine, measured_engine, restored, serve
from tests.held_tiers import HeldQueue, SimulatedTiering


def test_a_request_reports_the_time_that_it_waited_for_a_lower_tier() -> None:
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


def test_time_in_the_queue_does_not_count_as_waiting_for_a_lower_tier() -> None:
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


def test_a_request_in_the_queue_is_restored_when_it_is_admitted() -> None:
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


def test_prompts_with_more_chunks_than_remembered_answers_are_restored_as_far_as_possible(
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


def test_a_request_waits_for_all_jobs_together_no_longer_than_restore_timeout_s() -> None:
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
def test_restore_timeout_s_does_not_run_while_a_request_is_in_the_queue(ends: bool) -> None:
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


def test_waits_of_admitted_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_time_between_steps_does_not_count_against_a_tier(kind: JobKind) -> None:
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
    (tier,) = tiering.lower.tiers
    predicted_s = tier.pace.predict(11)
    assert predicted_s is not None and predicted_s < 1, "nor is it slow"


def test_a_postponed_deadline_still_ends_the_wait() -> None:
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


def test_an_aborted_request_releases_its_pins() -> None:
    tiering = SimulatedTiering(60)
    engine, queue = fetching_engine(tiering)
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


def test_two_requests_for_the_same_chunks_share_one_fetch() -> None:
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


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_what_requests_share_is_brought_up_once_where_they_end_elsewhere(windows: tuple[int | None, ...]) -> None:
    tiering = SimulatedTiering(200)
    known = [[*prompt(0, 20), *prompt(seed, 20)] for seed in (1, 2, 3)]
    before = make_engine(tiering, num_blocks=120, windows=windows)
    for at, tokens in enumerate(known):
        serve(before, tiering, f"before {at}", tokens)
    engine = make_engine(tiering, num_blocks=120, windows=windows)
    jobs: list[TierJob] = []
    (queue,) = tiering.all_queues()
    queue.on_job = jobs.append
    for at, tokens in enumerate(known):
        engine.add(f"goes on {at}", [*tokens, 5], 1)
    finish(engine, tiering)
    loaded = [key for job in jobs if job.kind is JobKind.LOAD for key in job.keys]
    assert len(loaded) == len(set(loaded)) > 0
    assert [restored(engine, f"goes on {at}")["disk"] > 0 for at in range(3)] == [True] * 3


def test_chunks_in_host_memory_are_pinned_while_the_rest_is_fetched() -> None:
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


def test_a_request_that_finds_no_slot_for_a_moment_waits_for_one() -> None:
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
def test_a_request_that_fills_host_memory_alone_does_not_wait_for_its_own_slots(policy: str) -> None:
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


def test_a_request_that_finds_no_slot_does_not_look_for_one_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look goes through all chunks of the prompt. Once the tiers had answered, there was no pause between two of them."""
    tiering, engine, transfers = play_out_of_slots()
    looks: list[float] = []
    fetch = tiering.lower.fetches.begin

    def noted(chains: Sequence[Chain], kept: Sequence[bytes], tenant: str | None) -> Fetch | None:
        looks.append(engine.clock())
        return fetch(chains, kept, tenant)

    monkeypatch.setattr(tiering.lower.fetches, "begin", noted)
    engine.add("known", prompt(0, 17), 3)
    began = engine.clock()
    for at in range(20):
        engine.add(str(at), prompt(2 + at, 9), 1)  # so that something is answered in every step
        engine.step()
    assert 2 <= len(looks) <= (engine.clock() - began) / prefetch.LOOK_AGAIN_S
    transfers.auto = True
    finish(engine, tiering)
    assert restored(engine, "known") == {"disk": 16} and engine.tokens("known") == alone(prompt(0, 17), 3)


def test_requests_that_wait_are_looked_up_once_per_change_while_the_pace_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by a review: 32 requests that waited took 64 look-ups of whole prompts per step."""
    tiering = SimulatedTiering(200, restore_timeout_s=100.0)
    first = make_engine(tiering)
    for at in range(8):
        serve(first, tiering, f"first {at}", prompt(at, 41))
    engine = make_engine(tiering, max_num_seqs=8, max_num_batched_tokens=64)
    serve(engine, tiering, "short", prompt(99, 5))  # which says nothing about prompts
    (queue,) = tiering.all_queues()
    queue.auto = False
    for at in range(8):
        engine.add(f"waits {at}", prompt(at, 41), 1)
    engine.step()
    host, looked_up = tiering.manager, list[int]()
    lookup_run = host.lookup_run

    def noted(keys: Sequence[bytes]) -> bytes:
        looked_up.append(len(keys))
        return lookup_run(keys)

    monkeypatch.setattr(host, "lookup_run", noted)
    for _ in range(10):
        engine.step()
    assert len(looked_up) <= 8, "nothing has changed in host memory"
    queue.auto = True
    for job in list(queue.pending):
        queue.complete(job)
    finish(engine, tiering)
    assert all(restored(engine, f"waits {at}") for at in range(8))


def test_a_slow_write_does_not_delay_requests_for_blocks_of_a_loaded_request() -> None:
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


def test_a_prompt_larger_than_host_memory_is_restored_in_part() -> None:
    tiering = SimulatedTiering(100)
    serve(make_engine(tiering), tiering, "first", prompt(0, 200))
    tiering.num_slots = 20
    engine = make_engine(tiering)
    serve(engine, tiering, "second", prompt(0, 200))
    assert restored(engine, "second") == {"disk": 80}


def test_a_long_pause_between_steps_is_no_failure_of_a_tier() -> None:
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
    assert metrics.TIER_FAILURES.of("disk") not in engine.connector.get_kv_connector_stats()
