"""Engines that allocate blocks for what was found long after they have asked, for less than was found, or never.

VLLM 0.33 does where a load must not begin before a step in flight has ended, and where it cannot use all of a hit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from cargohold.connector.kernel.answers import KEPT_STEPS
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.lab.simulation.connectors import offloading_sides
from cargohold.protocol import BlockIds, RequestView
from tests.connector.common import alone, evict_everything, finish, prompt, serve_and_lose

LATE = [*prompt(0, 40), 1]


class LateBlocks:
    """Tells the connector of blocks for the request named ``late`` only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: list[Callable[[], None]] = []
        self.is_late = True
        tell = OffloadingScheduler.update_state_after_alloc

        def hold(side: OffloadingScheduler, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
            if request.request_id == "late" and num_external_tokens and self.is_late:
                self._held.append(lambda: tell(side, request, blocks, num_external_tokens))
            else:
                tell(side, request, blocks, num_external_tokens)

        monkeypatch.setattr(OffloadingScheduler, "update_state_after_alloc", hold)

    def tell(self) -> None:
        """Tell it now."""
        (held,) = self._held
        self._held.clear()
        held()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateBlocks:
    return LateBlocks(monkeypatch)


def start_late(
    offloading: SimulatedOffloading, windows: tuple[int | None, ...] = (None,)
) -> tuple[SimulatedEngine, OffloadingScheduler]:
    """An engine in which ``late`` was told that all its chunks can be loaded, and has the blocks for them."""
    engine = SimulatedEngine(simulated_layout(120, windows=windows), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    engine.add("late", LATE, 2)
    engine.step()
    ((side, _),) = offloading_sides(engine.scheduler.connector)
    return engine, side


def store_others(engine: SimulatedEngine, num_chunks: int) -> None:
    """Let other requests store as many chunks."""
    for number in range(num_chunks // 10):
        name = f"other {number}"
        engine.add(name, prompt(1000 + number, 40), 1)
        while name not in engine.outputs:
            engine.step()
        evict_everything(engine)
    for _ in range(3):
        engine.step()  # copies end


def expect_served(engine: SimulatedEngine, offloading: SimulatedOffloading, restored: dict[str, int]) -> None:
    finish(engine, offloading)
    assert engine.tokens("late") == alone(LATE, 2)
    assert engine.outputs["late"].cache_report.restored_tokens == restored
    assert engine.scheduler.connector.broken is None, "it stays on"


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_what_a_request_was_told_is_kept_until_it_has_blocks(late: LateBlocks, windows: tuple[int | None, ...]) -> None:
    """Found by reading: the load raised, which turned the connector off."""
    offloading = SimulatedOffloading(40)
    engine, side = start_late(offloading, windows)
    store_others(engine, 100)
    assert 0 < side.answers.num_pins <= 20
    late.tell()
    assert not side.answers.num_pins, "the load has pins of its own"
    expect_served(engine, offloading, {"host": 40})


def test_what_is_gone_when_the_blocks_come_fails_as_any_load(
    late: LateBlocks, caplog: pytest.LogCaptureFixture
) -> None:
    """More than half of host memory is kept for nobody: whoever waits may not keep others from storing."""
    offloading = SimulatedOffloading(16)
    engine, side = start_late(offloading)
    assert not side.answers.num_pins
    store_others(engine, 30)
    late.tell()
    with caplog.at_level(logging.WARNING):
        expect_served(engine, offloading, {})
    (line,) = [record.getMessage() for record in caplog.records if "a load of" in record.getMessage()]
    assert line.endswith("its chunks were evicted before the engine had blocks for it")
    notes = engine.outputs["late"].cache_report.notes
    assert any("40 tokens are computed instead" in note for note in notes), notes
    late.is_late = False
    evict_everything(engine)
    engine.add("again", LATE, 1)
    finish(engine, offloading)
    assert engine.outputs["again"].cache_report.restored_tokens == {"host": 40}, "it was stored again"


def test_nothing_is_kept_for_ever_for_an_engine_that_does_not_come_back(late: LateBlocks) -> None:
    offloading = SimulatedOffloading(40)
    engine, side = start_late(offloading)
    for _ in range(KEPT_STEPS):
        assert side.answers.num_pins == 10
        engine.step()
    assert not side.answers.num_pins
    late.tell()
    expect_served(engine, offloading, {"host": 40})


def test_nothing_is_kept_for_a_request_that_was_aborted_before_it_had_blocks() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(12), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    engine.add("runs", prompt(1, 20), 20)
    engine.step()
    engine.add("late", LATE, 1)
    engine.step()
    ((side, _),) = offloading_sides(engine.scheduler.connector)
    assert side.answers.num_pins == 10, "it waits for room"
    engine.abort("late")
    assert not side.answers.num_pins
    finish(engine, offloading)


def test_nothing_is_kept_for_a_request_of_whose_hit_the_engine_takes_nothing(late: LateBlocks) -> None:
    offloading = SimulatedOffloading(40)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    ((side, _),) = offloading_sides(engine.scheduler.connector)
    engine.add("other", prompt(1, 9), 4)
    engine.step()
    engine.add("late", LATE, 2)
    request = engine.requests["late"]
    assert side.get_num_new_matched_tokens(request, 0) == (40, True)
    engine.scheduler.connector.build_connector_meta(engine.last_step[0])
    assert side.answers.num_pins == 10
    side.update_state_after_alloc(request, ((),), 0)
    assert not side.answers.num_pins
    assert side.explain("late").restored_tokens == {}


@pytest.mark.parametrize("is_other_weights", [False, True])
def test_what_was_dropped_or_set_aside_meanwhile_is_not_loaded(late: LateBlocks, is_other_weights: bool) -> None:
    """Every read is checked against the KV of the weights of now."""
    offloading = SimulatedOffloading(40)
    engine, side = start_late(offloading)
    store_others(engine, 10)
    if is_other_weights:
        engine.load_weights(1)
        assert side.use_weights("others")
    else:
        assert side.reset_cache()
    assert not side.answers.num_pins
    late.tell()
    finish(engine, offloading)
    assert engine.outputs["late"].cache_report.restored_tokens == {}
    assert engine.scheduler.connector.broken is None
