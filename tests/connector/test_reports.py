"""What the offloading connector tells: events, counters, and reports to requests."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, VirtualClock, simulated_layout
from cargohold.protocol import (
    Stats,
    TransferOutcome,
    metrics,
)
from cargohold.transfer import Direction
from tests.connector.common import evict_everything, finish, prompt, serve_and_lose
from tests.connector.offloading import keys_of


@pytest.mark.parametrize("outcome", [TransferOutcome.ABANDONED, TransferOutcome.FAILED])
@pytest.mark.parametrize("direction", Direction)
def test_copies_that_did_not_happen_are_not_counted(direction: Direction, outcome: TransferOutcome) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 60), 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("second", prompt(0, 60) if direction is Direction.LOAD else prompt(1, 60), 1)
    engine.step()
    (job,) = transfers.pending
    transfers.complete(job, outcome)
    _, output = engine.step()
    assert job.direction is direction
    assert output.connector.jobs == {job.job_id: outcome}
    assert output.connector.kv_connector_stats == {}
    transfers.auto = True
    finish(engine, offloading)


def test_a_request_reports_the_time_that_it_waited_for_its_load() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    assert engine.requests["first"].times.load_wait_s == 0
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(50.0)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("second", prompt(0, 30), 1)
    began = engine.clock()
    engine.step()
    (load,) = transfers.pending
    engine.clock.advance(3.0)
    transfers.complete(load)
    engine.step()
    assert 3.0 <= engine.requests["second"].times.load_wait_s <= engine.clock() - began
    transfers.auto = True
    finish(engine, offloading)
    assert 3.0 <= engine.requests["second"].times.load_wait_s <= 3.1
    assert engine.requests["second"].num_preemptions == 0


@pytest.mark.parametrize("end", ["abort", "turned off"])
def test_a_request_reports_the_time_that_it_waited_in_vain(end: str) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("second", prompt(0, 30), 1)
    engine.step()
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(3.0)
    if end == "abort":
        engine.abort("second")
    else:
        engine.scheduler.connector.break_off("made for this test")
    transfers.auto = True
    engine.run()
    assert 3.0 <= engine.requests["second"].times.load_wait_s <= 3.1


def test_prompt_tokens_are_counted_once_however_often_a_request_is_preempted() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(15), offloading)
    prompts = [prompt(number, 21) for number in range(3)]
    for turn in range(2):
        for number, tokens in enumerate(prompts):
            engine.add(f"{number} in turn {turn}", tokens, 24)
        finish(engine, offloading)
    stats = engine.scheduler.connector.get_kv_connector_stats()
    requests = engine.requests.values()
    assert sum(request.num_preemptions for request in requests) > 0
    assert stats[metrics.ASKED.of()] == 2 * 3 * 21
    assert stats[metrics.FOUND_ON_DEVICE.of()] == sum(request.num_first_device_tokens for request in requests)
    told = sum(sum(output.cache_report.restored_tokens.values()) for output in engine.outputs.values())
    assert 0 < stats[metrics.PROMPT.of("host")] < told, "a request is told of what was loaded for it later, too"
    assert stats[metrics.FOUND_ON_DEVICE.of()] + stats[metrics.PROMPT.of("host")] <= stats[metrics.ASKED.of()]


def test_a_token_that_was_restored_again_after_a_preemption_is_told_once() -> None:
    """Found by use: of a prompt of 423 tokens, a request was told that 768 were restored."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(15), offloading)
    prompts = [prompt(number, 21) for number in range(3)]
    for turn in range(3):
        for number, tokens in enumerate(prompts):
            engine.add(f"{number} in turn {turn}", tokens, 24)
        finish(engine, offloading)
    told = {name: sum(output.cache_report.restored_tokens.values()) for name, output in engine.outputs.items()}
    assert all(told[name] <= request.num_tokens for name, request in engine.requests.items())
    assert 0 < sum(told.values()) < engine.scheduler.connector.get_kv_connector_stats()[metrics.LOAD_TOKENS.of()], (
        "nothing was loaded twice"
    )


def test_a_request_is_told_why_no_more_of_it_was_found() -> None:
    offloading = SimulatedOffloading(60, blocks_per_chunk=2)
    engine = SimulatedEngine(simulated_layout(60), offloading, prefix_caching=False)
    (transfers,) = offloading.transfers
    serve_and_lose(engine, offloading, prompt(0, 40), 1)

    def why(name: str, tokens: list[int], **options: Any) -> str:
        engine.add(name, tokens, 1, **options)
        while name not in engine.outputs:
            engine.step()
        return engine.outputs[name].cache_report.notes[-1].partition("; ")[2]

    limit = {"kv_transfer_params": {"max_load_tokens": 16}}
    assert why("limited", prompt(0, 40), **limit) == (
        "24 had to be computed, because the request allows 16 to be loaded"
    )
    assert why("little is left", [*prompt(0, 40), 1, 2]) == "2 had to be computed, less than a chunk of 8"
    transfers.auto = False
    assert why("longer", [*prompt(1, 24)]) == "24 had to be computed, because nothing of it is kept"
    assert why("too early", [*prompt(1, 24), 1]) == (
        "25 had to be computed, because the chunk from token 0 on is still being stored"
    )
    transfers.auto = True
    finish(engine, offloading)


def test_a_request_is_told_that_a_window_is_missing() -> None:
    """Found by use: it was told of the chunk from token 0 on, which was there."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60, windows=(8, None)), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    windows = keys_of(prompt(0, 40), 10)  # of group 0
    offloading.manager.remove(windows[3:])
    engine.add("longer", [*prompt(0, 40), 1], 1)
    finish(engine, offloading)
    assert engine.outputs["longer"].cache_report.notes[-1].partition("; ")[2] == (
        "29 had to be computed, because full attention is kept up to token 40, but no whole window of 8 tokens that ends "
        "after token 12"
    )


def test_copies_are_counted_by_how_they_ended() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=64)
    (transfers,) = offloading.transfers

    def counted() -> Stats:
        stats = engine.connector.get_kv_connector_stats()
        looked_at = metrics.PLANNED, metrics.PLANNED_BLOCKS, metrics.FAILURES, metrics.STORED, metrics.OTHER_LEVELS
        return {series: count for series, count in stats.items() if count and series.family in looked_at}

    transfers.auto = False
    engine.add("first", prompt(0, 30), 1)
    engine.step()
    transfers.complete(transfers.pending[0], TransferOutcome.FAILED)
    finish(engine, offloading)
    assert counted() == {
        metrics.PLANNED.of("store"): 1,
        metrics.PLANNED_BLOCKS.of("store"): 7,
        metrics.FAILURES.of("store"): 1,
    }
    assert offloading.manager.num_ready == 0
    transfers.auto = True
    evict_everything(engine)
    engine.add("second", prompt(0, 30), 1)
    finish(engine, offloading)
    assert counted() == {
        metrics.PLANNED.of("store"): 1,
        metrics.PLANNED_BLOCKS.of("store"): 7,
        metrics.STORED.of("host"): 7,
        metrics.READY_CHUNKS: 7,
    }
    evict_everything(engine)
    engine.add("third", prompt(0, 30), 1)
    finish(engine, offloading)
    assert counted() == {metrics.PLANNED.of("load"): 1, metrics.PLANNED_BLOCKS.of("load"): 7}
