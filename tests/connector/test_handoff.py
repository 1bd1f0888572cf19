"""Hand-offs: one engine computes a prompt, and another one, with a host memory of its own, goes on over a shared tier."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.connector.guests.handoff import HANDOFF
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation import SimulatedEngine, VirtualClock
from cargohold.protocol import TransferOutcome, metrics
from cargohold.tiers import JobKind, JobStatus, StoreOutcome
from cargohold.tiers.scheduler_side import Admission, TierOptions, WriteMode
from tests.connector.common import alone, evict_everything, prompt
from tests.connector.offloading import keys_of
from tests.connector.tiering import finish, make_engine, restored
from tests.held_tiers import HeldQueue, SimulatedTiering

MODES: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "exclusive": {"mode": "exclusive"},
    "lazy": {"mode": "lazy", "lookahead_blocks": 4},
}
REMOTE_DECODE: dict[str, Any] = {"do_remote_decode": True}


def shared(**options: Any) -> TierOptions:
    return TierOptions(name="shared", locality="REMOTE", **options)


def announcement(engine: SimulatedEngine, name: str = "r") -> tuple[int, int]:
    """Numbers of tokens that the engine has announced: in all, and those that were readable."""
    params = engine.outputs[name].kv_transfer_params
    assert params is not None and params.keys() == {HANDOFF}, "nothing that another connector might take for its own"
    told = params[HANDOFF]
    return told["num_tokens"], told["num_readable_tokens"]


def notes(engine: SimulatedEngine, name: str = "r") -> str:
    return "; ".join(engine.outputs[name].cache_report.notes)


def clock_of(engine: SimulatedEngine) -> VirtualClock:
    assert isinstance(engine.clock, VirtualClock)
    return engine.clock


def prefill(tiering: SimulatedTiering, num_tokens: int = 41, **options: Any) -> SimulatedEngine:
    """Let an engine compute a prompt for another one, and run until all is settled."""
    engine = make_engine(tiering, **options)
    engine.add("r", prompt(0, num_tokens), 1, kv_transfer_params=REMOTE_DECODE)
    finish(engine, tiering)
    return engine


def decode(tiering: SimulatedTiering, num_tokens: int = 41, params: Any = None, **options: Any) -> SimulatedEngine:
    """Let another engine answer the prompt; verify its tokens."""
    engine = make_engine(tiering, **options)
    engine.add("r", prompt(0, num_tokens), 8, kv_transfer_params=params)
    finish(engine, tiering)
    assert engine.tokens("r") == alone(prompt(0, num_tokens), 8)
    return engine


# --- the promise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", MODES)
@pytest.mark.parametrize(
    "options",
    [{}, {"admission": Admission.REUSED}, {"write_mode": WriteMode.BACK}, {"has_index": False, "num_asked_at_once": 2}],
)
@pytest.mark.parametrize("num_slots", [4, 200])
def test_what_one_engine_announces_another_restores_whatever_the_options(
    stores: str, options: dict[str, Any], num_slots: int
) -> None:
    """Found by use: 200 tokens were announced, and another engine restored 0 with reused or back, 112 with a small host."""
    tiering = SimulatedTiering(num_slots, [shared(**options)], **MODES[stores])
    engine = prefill(tiering)
    assert announcement(engine)[0] == 40
    tiering.num_slots = 200
    other = decode(tiering, params=engine.outputs["r"].kv_transfer_params)
    assert restored(other, "r") == {"shared": 40}
    assert other.tokens("r")[:1] == engine.tokens("r")
    assert f"handed off 40 tokens, of which another engine can read {announcement(engine)[1]} now" in notes(engine)


@pytest.mark.parametrize("windows", [(6,), (None, 6)])
@pytest.mark.parametrize(("blocks_per_chunk", "world_size"), [(1, 2), (3, 1)])
def test_windows_chunks_of_several_blocks_and_several_workers_are_handed_off(
    windows: tuple[int | None, ...], blocks_per_chunk: int, world_size: int
) -> None:
    tiering = SimulatedTiering(200, [shared()], world_size, blocks_per_chunk=blocks_per_chunk)
    engine = prefill(tiering, windows=windows)
    whole = 40 // (4 * blocks_per_chunk) * 4 * blocks_per_chunk
    assert announcement(engine)[0] == whole, "the last partial chunk is computed again"
    other = decode(tiering, params=engine.outputs["r"].kv_transfer_params, windows=windows)
    assert restored(other, "r") == {"shared": whole}


def test_the_same_prompt_without_an_announcement_is_found_too() -> None:
    tiering = SimulatedTiering(200, [shared(admission=Admission.REUSED)])
    prefill(tiering)
    assert restored(decode(tiering), "r") == {"shared": 40}


def test_chunks_are_written_as_the_prompt_is_computed_not_at_its_end() -> None:
    tiering = SimulatedTiering(200, [shared(write_mode=WriteMode.BACK)])
    engine = make_engine(tiering, max_num_batched_tokens=8)
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    (medium,) = tiering.media[0]
    counts = []
    while engine.scheduler.num_unfinished:
        engine.step()
        counts.append(len(medium.chunks))
    assert counts[-1] >= 6, "only the last two steps' chunks are still on their way"
    assert announcement(engine) == (40, 4 * counts[-1])
    finish(engine, tiering)
    assert len(medium.chunks) == 10


@pytest.mark.parametrize("num_slots", [4, 200])
def test_steps_that_take_seconds_break_no_promise(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by use, on a slow machine with vLLM: of 1,408 tokens 768 were announced, or none, though all were written."""
    tiering = SimulatedTiering(num_slots, [shared()])
    engine = make_engine(tiering, max_num_batched_tokens=8)
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    execute = engine.executor.execute
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.STORE})

    def execute_slowly(step: SchedulerStep) -> StepOutput:
        for job in list(queue.pending):  # begun in the step before
            queue.complete(job)
        clock_of(engine).advance(1.2 * tiering.config.restore_timeout_s)
        return execute(step)

    monkeypatch.setattr(engine.executor, "execute", execute_slowly)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert announcement(engine)[0] == 40
    queue.held = frozenset()
    finish(engine, tiering)


def test_hits_on_the_device_and_in_host_memory_are_written_too() -> None:
    tiering = SimulatedTiering(200, [shared(admission=Admission.REUSED)])
    engine = make_engine(tiering)
    (medium,) = tiering.media[0]
    engine.add("before", prompt(0, 25), 1)
    finish(engine, tiering)
    evict_everything(engine)
    engine.add("on the device", prompt(0, 13), 1, kv_transfer_params={"max_load_tokens": 0, "max_store_tokens": 0})
    finish(engine, tiering)
    assert len(medium.chunks) == 3, "those that were used twice"
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    finish(engine, tiering)
    assert restored(engine, "r") == {"host": 12}
    assert announcement(engine)[0] == 40 and len(medium.chunks) == 10


# --- honest numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", MODES)
def test_a_daily_limit_wins_and_the_number_says_so(stores: str) -> None:
    tiering = SimulatedTiering(200, [shared(max_daily_chunks=24 * 3)], **MODES[stores])
    engine = make_engine(tiering)
    clock_of(engine).advance(3600.0)  # saves up an hour's allowance: three chunks
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    engine.run()
    assert announcement(engine)[0] == 12
    assert len(tiering.media[0][0].chunks) == 3


def test_a_client_s_limit_wins_and_the_number_says_so() -> None:
    tiering = SimulatedTiering(200, [shared()])
    engine = make_engine(tiering)
    engine.add("r", prompt(0, 41), 1, kv_transfer_params={**REMOTE_DECODE, "max_store_tokens": 17})
    finish(engine, tiering)
    assert announcement(engine)[0] == 16


def test_chunks_whose_copy_failed_are_not_announced() -> None:
    tiering = SimulatedTiering(60, [shared()])
    engine = make_engine(tiering, max_num_batched_tokens=8)
    (transfers,) = tiering.transfers
    transfers.auto = False
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    for _ in range(3):
        engine.step()
    transfers.complete(transfers.pending[1], TransferOutcome.FAILED)
    transfers.auto = True
    finish(engine, tiering)
    assert announcement(engine)[0] == 8


def test_nothing_is_announced_without_a_tier_that_other_engines_share() -> None:
    tiering = SimulatedTiering(60, [TierOptions(name="disk", locality="LOCAL")])
    engine = prefill(tiering)
    assert engine.outputs["r"].kv_transfer_params is None
    assert "nothing is handed off to another engine: no tier is shared with any" in notes(engine)


def test_nothing_is_announced_while_writes_are_suspended() -> None:
    tiering = SimulatedTiering(60, [shared()])
    tiering.media[0][0].is_gone = True
    engine = make_engine(tiering)
    for at in range(6):
        engine.add(f"other {at}", prompt(at + 1, 41), 1)
        engine.run()
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    engine.run()
    assert announcement(engine) == (0, 0)


@pytest.mark.parametrize("stores", MODES)
@pytest.mark.parametrize("outcome", [StoreOutcome.LATER, StoreOutcome.FAILED])
def test_what_a_tier_puts_off_is_written_in_time_and_announced(stores: str, outcome: StoreOutcome) -> None:
    """Found by use: while a store with ``max_bytes`` was listed, 320 tokens were announced, and 0 came."""
    tiering = SimulatedTiering(60, [shared()], **MODES[stores])
    engine = make_engine(tiering)
    engine.add("before", prompt(1, 41), 1, kv_transfer_params=REMOTE_DECODE)
    finish(engine, tiering)
    tiering.media[0][0].not_now = [outcome] * 14
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    finish(engine, tiering)
    assert announcement(engine)[0] == 40
    assert metrics.FAILURES.of("promise") not in tiering.lower.take_stats()
    assert restored(decode(tiering, params=engine.outputs["r"].kv_transfer_params), "r") == {"shared": 40}


@pytest.mark.parametrize("stores", MODES)
def test_a_tier_that_has_put_off_everything_so_far_gets_no_promises(stores: str) -> None:
    """Found by use: at the start of a store with ``max_bytes``, three requests were announced, waited 3 s each, and got 0."""
    tiering = SimulatedTiering(60, [shared()], **MODES[stores])
    tiering.media[0][0].not_now = [StoreOutcome.LATER] * 10**6
    engine = make_engine(tiering)
    for number in range(3):
        engine.add(f"r{number}", prompt(number, 41), 1, kv_transfer_params=REMOTE_DECODE)
        engine.run()
        assert announcement(engine, f"r{number}") == (0, 0)
        assert "tier shared has postponed all writes so far" in notes(engine, f"r{number}")
    tiering.media[0][0].not_now = []
    finish(engine, tiering)
    engine.add("after", prompt(7, 41), 1, kv_transfer_params=REMOTE_DECODE)
    finish(engine, tiering)
    assert announcement(engine, "after")[0] == 40


def test_what_a_tier_has_no_room_for_is_not_announced_and_the_note_says_so() -> None:
    """Found by use: announced short, without a note."""
    tiering = SimulatedTiering(60, [shared()])
    tiering.media[0][0].not_now = [StoreOutcome.REFUSED]
    engine = prefill(tiering, max_num_batched_tokens=8)
    assert announcement(engine)[0] == 0
    assert "no more, because of the chunk from token 0 on: tier shared has no room for it" in notes(engine)
    assert tiering.lower.take_stats()[metrics.FAILURES.of("promise")] == 1


def test_a_tier_that_has_put_off_everything_for_long_gets_no_more_promises() -> None:
    tiering = SimulatedTiering(60, [shared()], restore_timeout_s=2.0)
    engine = prefill(tiering)
    tiering.media[0][0].not_now = [StoreOutcome.LATER] * 10**6
    announced = []
    for number in range(3):
        engine.add(f"r{number}", prompt(number + 1, 41), 1, kv_transfer_params=REMOTE_DECODE)
        finish(engine, tiering)
        announced.append(announcement(engine, f"r{number}")[0])
    assert announced == [40, 0, 0]
    assert "tier shared has postponed all writes for too long" in notes(engine, "r1")
    tiering.media[0][0].not_now = []
    clock_of(engine).advance(10.0)
    for name in ("after", "later"):
        engine.add(name, prompt(7, 41), 1, kv_transfer_params=REMOTE_DECODE)
        finish(engine, tiering)
    assert announcement(engine, "later")[0] == 40


def test_nothing_is_announced_after_a_reset() -> None:
    tiering = SimulatedTiering(60, [shared()])
    engine = prefill(tiering)
    assert engine.scheduler.reset_cache()
    engine.add("again", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    finish(engine, tiering)
    assert announcement(engine, "again") == (0, 0)
    assert "after a reset, other engines do not find what this one writes" in notes(engine, "again")


# --- what a promise may cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", MODES)
def test_blocks_and_slots_held_for_a_tier_that_hangs_are_free_again_in_time(stores: str) -> None:
    tiering = SimulatedTiering(4, [shared()], **MODES[stores], restore_timeout_s=2.0)
    engine = make_engine(tiering, max_num_batched_tokens=64)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.STORE})
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    while engine.scheduler.num_unfinished:
        engine.step()
    for _ in range(20):
        engine.step()
    pool = engine.scheduler.kv.pool
    assert pool.num_free_blocks < pool.num_usable_blocks, "the blocks without a slot are held"
    assert announcement(engine)[0] == 40
    clock = clock_of(engine)
    end = clock.now + 2.5
    while clock.now < end:
        engine.step()
    assert pool.num_free_blocks == pool.num_usable_blocks
    assert not tiering.lower.promises.made
    queue.held = frozenset()
    finish(engine, tiering)


def test_blocks_are_free_again_in_time_while_copies_that_do_not_end_leave_no_room_for_stores() -> None:
    """Found by the simulator: behind the first of several ended requests, blocks were held for ever."""
    tiering = SimulatedTiering(40, [shared()], restore_timeout_s=2.0)
    engine = make_engine(tiering, num_blocks=80, max_num_batched_tokens=256)
    (transfers,) = tiering.transfers
    transfers.auto = False
    engine.add("stuck", prompt(0, 161), 1)
    engine.step()
    for name in ("r", "s"):
        engine.add(name, prompt(len(name), 41), 1, kv_transfer_params=REMOTE_DECODE)
        engine.add(name + "2", prompt(ord(name), 41), 1, kv_transfer_params=REMOTE_DECODE)
    while engine.scheduler.num_unfinished:
        engine.step()
    pool, clock = engine.scheduler.kv.pool, clock_of(engine)
    assert pool.num_usable_blocks - pool.num_free_blocks > 40
    end = clock.now + 2.5
    while clock.now < end:
        engine.step()
    assert pool.num_usable_blocks - pool.num_free_blocks == 40, "what is being copied"
    transfers.auto = True
    finish(engine, tiering)


def test_a_promise_that_cannot_be_held_is_not_made() -> None:
    tiering = SimulatedTiering(4, [shared()], max_inflight_fraction=0.05)
    engine = make_engine(tiering, max_num_batched_tokens=64)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.STORE})
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert announcement(engine)[0] == 16, "what fits into host memory"
    queue.held = frozenset()
    finish(engine, tiering)
    assert len(tiering.media[0][0].chunks) >= 4


def test_a_promise_is_over_when_every_shared_tier_has_its_chunks() -> None:
    far = TierOptions(name="far", locality="REMOTE")
    tiering = SimulatedTiering(4, [shared(), far])
    engine = make_engine(tiering, max_num_batched_tokens=8)
    slow = tiering.queues[0][1]
    slow.held = frozenset({JobKind.STORE})
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    while engine.scheduler.num_unfinished:
        engine.step()
    for name in range(4):  # they want the slots
        engine.add(f"other {name}", prompt(1 + name, 17), 1)
    for _ in range(20):
        engine.step()
    assert tiering.lower.promises.num_pins, "the far tier has not written them"
    slow.held = frozenset()
    finish(engine, tiering)
    near, late = (set(media[0].chunks) for media in tiering.media)
    assert len(near) >= 4 and set(keys_of(prompt(0, 41), 4)) <= near & late


# --- the other side ---------------------------------------------------------------------------------------------------


def handing_off(tiering: SimulatedTiering) -> tuple[SimulatedEngine, HeldQueue, Any]:
    """An engine whose request was announced while all of its chunks are still being written, and its queue."""
    engine = make_engine(tiering, max_num_batched_tokens=64)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.STORE})
    engine.add("r", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
    while not queue.pending:
        engine.step()
    assert announcement(engine) == (40, 0)
    return engine, queue, engine.outputs["r"].kv_transfer_params


@pytest.mark.parametrize("has_index", [True, False])
def test_a_request_waits_for_announced_chunks_that_are_still_being_written(has_index: bool) -> None:
    tiering = SimulatedTiering(60, [shared(has_index=has_index)])
    first, queue, params = handing_off(tiering)
    other = make_engine(tiering)
    other.add("r", prompt(0, 41), 8, kv_transfer_params=params)
    for _ in range(20):
        other.step()
    assert not other.requests["r"].num_computed_tokens, "it waits"
    queue.held = frozenset()
    first.run()
    finish(other, tiering)
    assert restored(other, "r") == {"shared": 40}
    assert other.tokens("r") == alone(prompt(0, 41), 8)


def test_a_request_takes_what_has_come_at_the_deadline_and_computes_the_rest() -> None:
    tiering = SimulatedTiering(60, [shared()], restore_timeout_s=2.0)
    _, queue, params = handing_off(tiering)
    (job,) = queue.pending
    job.keys, job.buffers, job.parents = job.keys[:3], job.buffers[:3], job.parents[:3]
    job.answers = job.answers[:3]
    queue.complete(job, JobStatus.DONE)  # the others are lost with the engine
    other = make_engine(tiering)
    other.add("r", prompt(0, 41), 8, kv_transfer_params=params)
    clock = clock_of(other)
    finish(other, tiering)
    assert restored(other, "r") == {"shared": 12}
    assert other.tokens("r") == alone(prompt(0, 41), 8)
    assert "40 tokens were announced; 12 had arrived after 1" in notes(other)
    assert 1.0 <= clock.now < 2.0, "half of the time is for questions"


def test_waiting_ends_when_computing_would_be_done() -> None:
    tiering = SimulatedTiering(60, [shared()])
    _, _, params = handing_off(tiering)
    other = make_engine(tiering, max_num_batched_tokens=8)
    other.add("measured", prompt(1000, 41), 1)
    other.run()
    clock = clock_of(other)
    since = clock.now
    other.add("r", prompt(0, 41), 1, kv_transfer_params=params)
    other.run()
    assert clock.now - since < 4 * 0.06, "computing takes six steps of 0.01 s"
    assert restored(other, "r") == {}


@pytest.mark.parametrize("is_first", [False, True])
def test_a_request_does_not_wait_for_an_engine_with_another_namespace_and_says_why(*, is_first: bool) -> None:
    tiering = SimulatedTiering(60, [shared()])
    tiering.namespace = {"id": "aa", "weights": "01", "dtype": "02", "split": "03"}
    _, _, params = handing_off(tiering)
    assert params[HANDOFF]["namespace"] == tiering.namespace
    tiering.namespace = {"id": "bb", "weights": "11", "dtype": "02", "split": "13"}
    other = make_engine(tiering)
    if not is_first:  # with its first step, the worker says what its namespace is
        other.add("first", prompt(1000, 9), 1)
        other.run()
    clock = clock_of(other)
    since = clock.now
    other.add("r", prompt(0, 41), 1, kv_transfer_params=params)
    other.run()
    assert (
        "the announced KV comes from an engine that differs in its weights, split, so it cannot be used here"
        in notes(other)
    )
    assert clock.now - since < 0.2


@pytest.mark.parametrize("num_tokens", [10**9, 100])
def test_a_lie_costs_only_the_liar_s_own_patience(num_tokens: int) -> None:
    tiering = SimulatedTiering(60, [shared()], restore_timeout_s=2.0)
    other = make_engine(tiering)
    other.add("r", prompt(0, 41), 1, kv_transfer_params={HANDOFF: {"num_tokens": num_tokens}})
    other.add("honest", prompt(1, 41), 1)
    clock = clock_of(other)
    while "honest" not in other.outputs:
        other.step()
    assert clock.now < 0.2
    finish(other, tiering)
    assert clock.now < 2.0 and other.tokens("r") == alone(prompt(0, 41), 1)
