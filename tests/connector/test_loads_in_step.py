"""Loads that are short beside a step are part of the step that computes their request, in a simulated engine."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.connector.kernel import loads
from cargohold.engine.core.request import FinishReason
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.lab.simulation.replica import STEP_S
from cargohold.lab.simulation.transfers import HeldTransfers
from cargohold.protocol import KVConnectorOutput, TransferOutcome, metrics
from cargohold.transfer import CopyJob, Direction
from tests.connector.common import alone, finish, prompt, serve_and_lose


class Bench:
    """An engine that has lost two prompts of 40 tokens, which a tier has."""

    def __init__(self, **options: Any) -> None:
        self.offloading = SimulatedOffloading(60)
        self.engine = SimulatedEngine(simulated_layout(60), self.offloading, **{"loads_in_step": True, **options})
        for number in (0, 1):
            serve_and_lose(self.engine, self.offloading, prompt(number, 40), 1)

    @property
    def transfers(self) -> HeldTransfers:
        (transfers,) = self.offloading.transfers
        assert isinstance(transfers, HeldTransfers)
        return transfers

    def come_back(self, name: str, number: int = 0) -> None:
        self.engine.add(name, [*prompt(number, 40), 7], 3)

    def note_loads(self, block_s: float) -> None:
        """Loads have taken so many seconds for each block."""
        stats = {metrics.COPIED_BLOCKS.of("load"): 2, metrics.COPY_SECONDS.of("load"): 2 * block_s}
        self.engine.connector.update_connector_output(KVConnectorOutput(kv_connector_stats=stats))

    def num_in_step(self) -> float:
        return self.engine.connector.get_kv_connector_stats().get(metrics.LOADS_IN_STEP, 0)

    def check(self, name: str, number: int = 0) -> None:
        finish(self.engine, self.offloading)
        assert self.engine.tokens(name) == alone([*prompt(number, 40), 7], 3)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def num_tokens_after_one_step(bench: Bench, name: str) -> int:
    bench.engine.step()
    return bench.engine.requests[name].num_output_tokens


def test_a_short_load_costs_its_request_no_step(bench: Bench) -> None:
    bench.come_back("back")
    assert num_tokens_after_one_step(bench, "back") == 1
    assert bench.num_in_step() == 1
    bench.check("back")
    assert bench.engine.outputs["back"].cache_report.restored_tokens == {"host": 40}


def test_an_engine_that_computes_a_loaded_request_later_is_not_asked_to_wait() -> None:
    bench = Bench(loads_in_step=False)
    bench.come_back("back")
    assert num_tokens_after_one_step(bench, "back") == 0
    assert bench.num_in_step() == 0
    bench.check("back")


def test_blocks_that_only_their_request_holds_are_not_loaded_within_a_step() -> None:
    bench = Bench(with_context=False, applies_locks=False)
    bench.come_back("back")
    assert num_tokens_after_one_step(bench, "back") == 0
    bench.check("back")


@pytest.mark.parametrize("most_s", [loads.MAX_IN_STEP_S, loads.IN_STEP_SHARE * STEP_S])
def test_a_long_load_is_not_waited_for(bench: Bench, most_s: float) -> None:
    bench.note_loads(most_s / 9.9)  # it has ten blocks
    bench.come_back("back")
    assert num_tokens_after_one_step(bench, "back") == 0
    bench.check("back")


def test_one_slow_load_among_others_does_not_make_all_long(bench: Bench) -> None:
    most_s = min(loads.MAX_IN_STEP_S, loads.IN_STEP_SHARE * STEP_S)
    bench.note_loads(0.0)
    bench.note_loads(most_s / 4)  # by far too long for ten blocks
    bench.come_back("one")
    assert num_tokens_after_one_step(bench, "one") == 1
    bench.check("one")


def test_loads_of_one_step_share_the_time_for_which_it_waits(bench: Bench) -> None:
    bench.note_loads(min(loads.MAX_IN_STEP_S, loads.IN_STEP_SHARE * STEP_S) / 15)
    bench.come_back("one", 0)
    bench.come_back("two", 1)
    bench.engine.step()
    assert [bench.engine.requests[name].num_output_tokens for name in ("one", "two")] == [1, 0]
    bench.check("one", 0)
    bench.check("two", 1)


def test_before_any_copy_was_measured_loads_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads.Loads, "note_copied", lambda *_: None)
    bench = Bench()
    bench.come_back("back")
    assert num_tokens_after_one_step(bench, "back") == 0
    bench.check("back")


def test_a_step_does_not_wait_behind_another_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_IN_STEP_S", -1.0)
    bench.transfers.auto = False
    bench.come_back("long", 0)
    bench.engine.step()
    monkeypatch.undo()
    bench.come_back("short", 1)
    assert num_tokens_after_one_step(bench, "short") == 0
    assert bench.num_in_step() == 0 and not bench.engine.requests["short"].num_computed_tokens, "its load goes on"
    bench.transfers.auto = True
    bench.check("short", 1)
    bench.check("long", 0)


def test_requests_with_the_same_prefix_cause_one_load(bench: Bench) -> None:
    bench.come_back("one")
    bench.come_back("two")
    bench.engine.step()
    bench.engine.step()
    assert bench.engine.requests["two"].num_first_device_tokens == 40
    assert bench.num_in_step() == 1
    bench.check("one")
    bench.check("two")


def test_a_load_that_fails_within_a_step_is_computed_instead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = HeldTransfers.submit

    def submit_and_fail(self: HeldTransfers, job: CopyJob) -> None:
        submit(self, job)
        if job.direction is Direction.LOAD:
            self.complete(job, TransferOutcome.FAILED)

    monkeypatch.setattr(HeldTransfers, "submit", submit_and_fail)
    monkeypatch.setattr(HeldTransfers, "finish_loads", lambda _: False)
    bench.engine.add("other", prompt(8, 9), 6)
    bench.engine.step()
    bench.come_back("back")
    assert num_tokens_after_one_step(bench, "back") == 0
    assert bench.engine.requests["other"].num_output_tokens == 2, "others go on"
    bench.check("back")
    assert bench.engine.outputs["back"].cache_report.restored_tokens == {}
    assert bench.offloading.manager.num_pins == 0


def test_a_copy_that_does_not_end_keeps_its_blocks_and_nobody_else(bench: Bench) -> None:
    bench.transfers.auto = False
    bench.come_back("back")
    bench.engine.step()
    (load,) = [job for job in bench.transfers.pending if job.direction is Direction.LOAD]
    pool = bench.engine.scheduler.kv.pool
    assert all(pool.get_block(block_id).ref_cnt == 1 for block_id in load.block_ids), "the connector holds them"
    while "back" not in bench.engine.outputs:
        bench.engine.step()
    assert bench.engine.tokens("back") == alone([*prompt(0, 40), 7], 3)
    bench.come_back("another", 1)
    assert num_tokens_after_one_step(bench, "another") == 0, "no step waits behind it"
    bench.transfers.auto = True
    bench.check("another", 1)


def test_a_request_aborted_in_the_step_that_loads_it_leaves_nothing_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.come_back("back")
    finish_loads = HeldTransfers.finish_loads

    def abort_meanwhile(self: HeldTransfers) -> bool:
        bench.engine.scheduler.finish_request("back", FinishReason.ABORT)
        return finish_loads(self)

    monkeypatch.setattr(HeldTransfers, "finish_loads", abort_meanwhile)
    bench.engine.step()
    monkeypatch.undo()
    bench.come_back("again")
    bench.check("again")


def test_the_cache_is_reset_only_when_the_step_that_loads_is_over(bench: Bench) -> None:
    bench.transfers.auto = False
    bench.come_back("back")
    bench.engine.step()
    assert not bench.engine.connector.reset_cache()
    bench.transfers.auto = True
    bench.check("back")
    assert bench.engine.connector.reset_cache()
