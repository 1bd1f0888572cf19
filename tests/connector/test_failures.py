"""Copies and steps that fail or never end, in a simulated engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.request import FinishReason, SchedulerStep
from cargohold.engine.core.request_queues import LoadFailurePolicy
from cargohold.engine.executor import LayerHooks
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, VirtualClock, simulated_layout
from cargohold.protocol import (
    KVConnectorOutput,
    TransferOutcome,
    metrics,
)
from cargohold.transfer import Direction
from tests.connector.common import alone, evict_everything, finish, prompt, serve_and_lose
from tests.connector.offloading import HOLDS, broken_rule, keys_of


def test_chunks_spoiled_by_a_failed_step_are_stored_again_when_the_copy_has_ended() -> None:
    """Found by a review: while the spoiled copy was pending, its chunks counted as being stored, and were not offered later."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(40), offloading)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("first", prompt(0, 12), 20)
    while not transfers.pending:
        engine.step()
    failed = KVConnectorOutput(step_failed=True)
    engine.scheduler.connector.update_connector_output(failed)
    for _ in range(2):
        engine.step()
    transfers.auto = True
    finish(engine, offloading)
    evict_everything(engine)
    engine.add("second", [*prompt(0, 12), 7], 1)
    finish(engine, offloading)
    assert dict(engine.outputs["second"].cache_report.restored_tokens) == {"host": 12}


@pytest.mark.parametrize("is_composed", [False, True])
def test_values_of_one_request_that_are_not_finite_spoil_no_copies_of_others(
    is_composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a review: copies in flight of requests that had ended were given up, and never made again."""
    offloading = SimulatedOffloading(200)
    factory = MultiConnectorFactory((offloading,)) if is_composed else offloading
    engine = SimulatedEngine(simulated_layout(100), factory)
    (transfers,) = offloading.transfers
    transfers.auto = False
    execute = engine.runner.execute

    def overflow(step: SchedulerStep, hooks: LayerHooks | None) -> dict[str, int | None]:
        not_finite = [share.request_id for share in step.scheduled if share.request_id == "bad"]
        return {**execute(step, hooks), **dict.fromkeys(not_finite)}

    monkeypatch.setattr(engine.runner, "execute", overflow)
    engine.add("good", prompt(0, 20), 1)
    engine.step()
    engine.add("bad", prompt(1, 20), 1)
    engine.step()
    assert engine.outputs["good"].request.error is None and engine.outputs["bad"].request.error
    transfers.auto = True
    finish(engine, offloading)
    evict_everything(engine)
    monkeypatch.undo()
    for name, seed, expected in (("good again", 0, {"host": 20}), ("bad again", 1, {})):
        engine.add(name, [*prompt(seed, 20), 7], 1)
        finish(engine, offloading)
        assert dict(engine.outputs[name].cache_report.restored_tokens) == expected


@pytest.mark.parametrize("failure", [TransferOutcome.FAILED, TransferOutcome.ABANDONED])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_failed_load_is_a_miss(failure: TransferOutcome, windows: tuple[int | None, ...]) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60, windows=windows), offloading)
    serve_and_lose(engine, offloading, prompt(0, 30), 3)
    num_ready = offloading.manager.num_ready
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("second", prompt(0, 30), 3)
    engine.step()
    (load,) = transfers.pending
    transfers.complete(load, failure)
    engine.step()
    if failure is TransferOutcome.FAILED:
        assert offloading.manager.num_ready < num_ready, "a bad chunk is gone"
    else:
        assert offloading.manager.num_ready == num_ready, "a late one is not"
    transfers.auto = True
    finish(engine, offloading)
    assert engine.tokens("second") == engine.tokens("first")
    assert engine.outputs["second"].cache_report.restored_tokens == {}
    assert any("computed instead" in note for note in engine.outputs["second"].cache_report.notes)
    assert offloading.manager.num_ready == num_ready, "and replaced by the next store"


@pytest.mark.parametrize(
    ("options", "num_kept"), [({}, 12), ({"prefix_caching": False}, 0), ({"windows": (None, 6)}, 0)]
)
def test_a_load_that_failed_in_part_reports_what_it_restored(
    options: dict[str, Any], num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloading = SimulatedOffloading(60)
    layout = simulated_layout(60, windows=options.pop("windows", (None,)))
    engine = SimulatedEngine(layout, offloading, **options)
    serve_and_lose(engine, offloading, prompt(0, 30), 3)
    engine.scheduler.connector.get_kv_connector_stats()
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("second", prompt(0, 30), 3)
    engine.step()
    (load,) = transfers.pending
    transfers.complete(load)
    (done,) = transfers.poll()
    bad_ids = frozenset((load.block_ids[3], load.block_ids[5]))
    bad = replace(done, outcome=TransferOutcome.FAILED, failed_block_ids=bad_ids)
    with monkeypatch.context() as patched:
        patched.setattr(transfers, "poll", lambda: [bad])
        engine.step()
    transfers.auto = True
    finish(engine, offloading)
    assert engine.tokens("second") == engine.tokens("first")
    report, stats = engine.outputs["second"].cache_report, engine.scheduler.connector.get_kv_connector_stats()
    assert sum(report.restored_tokens.values()) == stats.get(metrics.PROMPT.of("host"), 0) == num_kept
    assert any(f"{28 - num_kept} tokens are computed instead" in note for note in report.notes)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_load_that_failed_in_part_drops_the_bad_chunk_alone(blocks_per_chunk: int) -> None:
    offloading = SimulatedOffloading(60, blocks_per_chunk=blocks_per_chunk)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 34), 3)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("second", prompt(0, 34), 3)
    engine.step()
    (load,) = transfers.pending
    bad = load.block_ids[4]
    transfers.complete(load, TransferOutcome.FAILED, [bad])
    engine.runner.memory[bad] = 0
    engine.step()
    there = [True] * (8 // blocks_per_chunk)
    there[4 // blocks_per_chunk] = False
    keys = keys_of(prompt(0, 34), len(there), blocks_per_chunk)
    assert list(offloading.manager.lookup(keys)) == [READY if is_there else ABSENT for is_there in there]
    transfers.auto = True
    finish(engine, offloading)
    assert engine.requests["second"].num_device_tokens == 16, "what came before it is used"
    assert engine.tokens("second") == engine.tokens("first")
    assert offloading.manager.lookup_run(keys) == bytes([READY]) * len(there), "and it is stored again"


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 9)])
def test_chunks_lost_by_a_failed_store_are_stored_when_a_request_hits_them_on_the_device(
    hold: str, blocks_per_chunk: int, windows: tuple[int | None, ...]
) -> None:
    offloading = SimulatedOffloading(100, blocks_per_chunk=blocks_per_chunk)
    engine = SimulatedEngine(
        simulated_layout(200, windows=windows), offloading, max_num_batched_tokens=16, **HOLDS[hold]
    )
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("first", prompt(0, 33), 1)
    outcomes = iter([TransferOutcome.ABANDONED, TransferOutcome.FAILED])
    while engine.scheduler.has_work():
        engine.step()
        for job in list(transfers.pending):
            transfers.complete(job, next(outcomes))
    transfers.auto = True
    copied: list[int] = []
    transfers.on_copy = lambda job: copied.extend(job.rows) if job.direction is Direction.STORE else None
    for name in ("second", "third"):
        num_copied = len(copied)
        engine.add(name, [*prompt(0, 33), 7, 8], 1)
        finish(engine, offloading)
        assert engine.requests[name].num_first_device_tokens == 32
        assert (len(copied) > num_copied) is (name == "second"), "what the tier has is not stored again"
    evict_everything(engine)
    engine.add("last", [*prompt(0, 33), 9], 1)
    finish(engine, offloading)
    assert engine.outputs["last"].cache_report.restored_tokens == {"host": 32}


def test_with_the_policy_fail_a_failed_load_fails_its_request() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, load_failure_policy=LoadFailurePolicy.FAIL)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    offloading.transfers[0].auto = False
    engine.add("second", prompt(0, 30), 1)
    engine.add("other", prompt(1, 30), 1)
    engine.step()
    load = next(job for job in offloading.transfers[0].pending if job.direction is Direction.LOAD)
    offloading.transfers[0].complete(load, TransferOutcome.FAILED)
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    failed = engine.outputs["second"].request
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert "could not be loaded" in failed.error
    assert engine.outputs["other"].request.finish_reason is FinishReason.LENGTH


def test_a_failed_load_is_logged_once_and_not_per_block(caplog: pytest.LogCaptureFixture) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 60), 1)
    offloading.transfers[0].auto = False
    engine.add("second", prompt(0, 60), 1)
    engine.step()
    offloading.transfers[0].complete(offloading.transfers[0].pending[0], TransferOutcome.FAILED)
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert engine.scheduler.connector.get_kv_connector_stats()[metrics.FAILURES.of("load")] == 1


def test_a_connector_that_fails_during_a_step_keeps_its_blocks_until_the_workers_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by reading: an abort during a step, for which a connector raised, released blocks that copies were reading."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(30), offloading)
    (transfers,) = offloading.transfers
    transfers.auto = False
    for name in ("stays", "goes"):
        engine.add(name, prompt(len(name), 20), 5)
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    held = scheduler.connector.held_references()
    assert held and transfers.pending

    def fails(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.connector, "request_finished", fails)
    step = scheduler.schedule()
    output = engine.executor.execute(step)
    scheduler.finish_request("goes", FinishReason.ABORT)
    scheduler.update_from_output(output)
    assert "request_finished raised" in broken_rule(engine)
    assert scheduler.connector.held_references() == held, "copies are still reading these blocks"
    step, _ = engine.step()
    assert step.drop_connector and not transfers.pending and not scheduler.connector.held_references()
    engine.run()
    scheduler.check_settled()
    assert engine.tokens("stays") == alone(prompt(len("stays"), 20), 5)


@pytest.mark.parametrize("hold", ["touch", "lock"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@pytest.mark.parametrize("outcome", TransferOutcome)
@pytest.mark.parametrize("direction", Direction)
def test_a_stuck_copy_takes_its_blocks_and_slots_out_of_service_and_nothing_else(
    direction: Direction, outcome: TransferOutcome, windows: tuple[int | None, ...], world_size: int, hold: str
) -> None:
    offloading = SimulatedOffloading(100, transfer_timeout_s=5.0)
    layout = simulated_layout(120, windows=windows, world_size=world_size)
    engine = SimulatedEngine(layout, offloading, max_num_batched_tokens=64, **HOLDS[hold])
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    assert isinstance(engine.clock, VirtualClock)
    slow = offloading.transfers[-1]
    slow.auto = False
    tokens = prompt(0 if direction is Direction.LOAD else 1, 30)
    engine.add("second", tokens, 1)
    while not slow.pending:
        engine.step()
    (job,) = slow.pending
    assert job.direction is direction
    while engine.scheduler.has_work():
        engine.step()
        engine.clock.advance(1.0)
        assert engine.clock() < 60, "the engine steps on for ever"
    connector, side = engine.scheduler.connector, engine.connector
    assert isinstance(side, OffloadingScheduler)
    assert broken_rule(engine) == "" and engine.tokens("second") == alone(tokens, 1)
    assert set(connector.held_references()) == set(job.block_ids)
    assert side.shared.jobs.num_stuck == 1
    slow.auto, slow.pending = True, []  # others go on, the stuck one still does not
    evict_everything(engine)
    engine.add("third", [*prompt(0, 30), 7], 1)
    engine.run()
    assert engine.outputs["third"].cache_report.restored_tokens == {"host": 28}
    assert set(connector.held_references()) == set(job.block_ids)
    assert not engine.scheduler.reset_cache()
    slow.pending = [job]
    num_ready = offloading.manager.num_ready
    slow.complete(job, outcome, job.block_ids if outcome is TransferOutcome.FAILED else ())
    engine.step()
    finish(engine, offloading)
    if direction is Direction.LOAD:
        num_bad = len(job.block_ids) if outcome is TransferOutcome.FAILED else 0
        assert offloading.manager.num_ready == num_ready - num_bad, "what could not be read is not found again"
    assert not connector.held_references() and not side.shared.jobs
    assert engine.scheduler.reset_cache()
    assert sum(engine.connector.get_kv_connector_stats().get(metrics.STUCK_COPIES, 0) for _ in range(2)) == 0


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("outcome", TransferOutcome)
def test_a_load_that_is_given_up_holds_its_blocks_until_its_copy_has_ended(
    outcome: TransferOutcome, world_size: int
) -> None:
    offloading = SimulatedOffloading(100)
    engine = SimulatedEngine(simulated_layout(120, world_size=world_size), offloading)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    slow, connector, side = offloading.transfers[-1], engine.scheduler.connector, engine.connector
    assert isinstance(side, OffloadingScheduler)
    slow.auto = False
    engine.add("second", prompt(0, 30), 1)
    while not slow.pending:
        engine.step()
    (job,) = slow.pending
    connector.give_up_transfers()
    connector.give_up_transfers()
    slow.auto, slow.pending = True, []  # others go on
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.clock() < 1 and engine.tokens("second") == alone(prompt(0, 30), 1)
    report = engine.outputs["second"].cache_report
    assert not report.restored_tokens and any("was abandoned" in note for note in report.notes)
    assert set(connector.held_references()) >= set(job.block_ids)
    assert side.shared.jobs.num_awaited and not side.shared.jobs.num_stuck
    slow.pending = [job]
    slow.complete(job, outcome, job.block_ids if outcome is TransferOutcome.FAILED else ())
    finish(engine, offloading)
    assert not connector.held_references() and not side.shared.jobs
    assert metrics.FAILURES.of("load") not in side.get_kv_connector_stats()
    evict_everything(engine)
    engine.add("third", [*prompt(0, 30), 7], 1)
    finish(engine, offloading)
    restored = engine.outputs["third"].cache_report.restored_tokens
    assert restored == ({} if outcome is TransferOutcome.FAILED else {"host": 28})


def test_a_request_whose_load_is_stuck_is_told_so_and_its_id_can_be_used_again() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, load_timeout_s=10.0)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    offloading.transfers[0].auto = False
    engine.add("second", prompt(0, 30), 1)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.clock() < 10
    (note,) = [note for note in engine.outputs["second"].cache_report.notes if "did not end" in note]
    assert note == "the load from host did not end within 5 s; 28 tokens are computed instead"
    (job,) = [job for job in offloading.transfers[0].pending if job.direction is Direction.LOAD]
    evict_everything(engine)
    engine.add("second", [*prompt(0, 30), 7], 1)
    engine.step()
    offloading.transfers[0].complete(job)
    engine.step()
    assert engine.scheduler.unfinished_ids == ["second"], "the first one's report does not end the second one's load"
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert engine.outputs["second"].cache_report.restored_tokens == {"host": 28}


def test_stuck_copies_take_no_more_than_a_part_of_the_device_pool() -> None:
    offloading = SimulatedOffloading(200, max_inflight_fraction=0.2)
    engine = SimulatedEngine(simulated_layout(101), offloading, load_timeout_s=2.0, max_num_batched_tokens=64)
    for at in range(10):
        engine.add(f"first {at}", prompt(at, 41), 1)
        finish(engine, offloading)
    evict_everything(engine)
    offloading.transfers[0].auto = False
    for at in range(10):
        engine.add(f"second {at}", prompt(at, 41), 1)
        engine.run()
        assert engine.tokens(f"second {at}") == engine.tokens(f"first {at}")
    assert len(engine.scheduler.connector.held_references()) <= 20 + 10
    assert broken_rule(engine) == ""


@pytest.mark.parametrize("direction", Direction)
def test_a_stuck_copy_whose_blocks_only_its_request_holds_turns_the_connector_off(direction: Direction) -> None:
    offloading = SimulatedOffloading(60, transfer_timeout_s=5.0)
    engine = SimulatedEngine(simulated_layout(60), offloading, load_timeout_s=100.0, **HOLDS["request"])
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(100.0)  # what has ended is not lost
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("second", prompt(0 if direction is Direction.LOAD else 1, 30), 1)
    while not transfers.pending:
        engine.step()
    (job,) = transfers.pending
    assert job.direction is direction
    engine.clock.advance(69.0)
    for _ in range(10):
        engine.step()
    assert broken_rule(engine) == ""
    for _ in range(10):
        engine.clock.advance(1.0)
        engine.step()
    assert f"did not end job {job.job_id} within 70 s" in broken_rule(engine)
    engine.run()
    engine.scheduler.check_settled()
    assert engine.tokens("second") == alone(prompt(0 if direction is Direction.LOAD else 1, 30), 1)
