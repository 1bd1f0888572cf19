"""The offloading connector in a simulated engine: every step is checked for wrong tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, VirtualClock, simulated_layout
from cargohold.transfer import Direction
from tests.connector.common import alone, finish, play_any_schedule, prompt, serve_and_lose
from tests.connector.offloading import HOLDS, broken_rule
from tests.effort import examples


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (9, None, 3)])
@examples(10)
@given(data=st.data())
def test_tokens_are_those_without_offloading_under_any_schedule_of_copies(
    hold: str, windows: tuple[int | None, ...], data: st.DataObject
) -> None:
    offloading = SimulatedOffloading(
        data.draw(st.integers(1, 60)),
        blocks_per_chunk=data.draw(st.integers(1, 3)),
        max_inflight_fraction=data.draw(st.sampled_from([0.1, 0.5, 1.0])),
    )
    engine = SimulatedEngine(
        simulated_layout(1 + data.draw(st.integers(14, 30)) * len(windows), windows=windows),
        offloading,
        max_num_batched_tokens=data.draw(st.integers(4, 64)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        prefix_caching=data.draw(st.booleans()),
        **HOLDS[hold],
    )
    play_any_schedule(data, engine, offloading)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_an_evicted_prompt_is_restored(hold: str, windows: tuple[int | None, ...], blocks_per_chunk: int) -> None:
    offloading = SimulatedOffloading(60, blocks_per_chunk=blocks_per_chunk)
    engine = SimulatedEngine(simulated_layout(40, windows=windows), offloading, **HOLDS[hold])
    serve_and_lose(engine, offloading, prompt(0, 30), 3)
    engine.add("second", prompt(0, 30), 3)
    finish(engine, offloading)
    chunk = 4 * blocks_per_chunk
    assert engine.outputs["second"].cache_report.restored_tokens == {"host": 30 // chunk * chunk}
    assert engine.tokens("second") == engine.tokens("first")
    assert "30 tokens, 0 were on the device" in engine.outputs["second"].cache_report.notes[0]


def test_a_corrupted_tier_is_noticed_by_these_tests() -> None:
    """The control: if restored bytes did not matter, the tests above would prove nothing."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(40), offloading)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    rows = offloading.rows(0, engine.layout)
    rows += 1
    engine.add("second", prompt(0, 30), 1)
    with pytest.raises(AssertionError, match="does not hold the KV"):
        engine.run()


@pytest.mark.parametrize("state", ["waiting", "loading", "running", "finished"])
@pytest.mark.parametrize("hold", HOLDS)
def test_an_abort_in_any_state_leaks_nothing(state: str, hold: str) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=16, **HOLDS[hold])
    serve_and_lose(engine, offloading, prompt(0, 30), 3)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("r", prompt(0, 30) + prompt(1, 30), 2)
    if state != "waiting":
        engine.step()
    if state in ("running", "finished"):
        transfers.auto = True
        engine.step()
        engine.step()
        transfers.auto = False
    if state == "finished":
        while engine.scheduler.num_unfinished:
            engine.step()
    engine.abort("r")
    for _ in range(3):
        engine.step()
        used = {block for job in transfers.pending if job.direction is Direction.LOAD for block in job.block_ids}
        free = set(engine.scheduler.kv.pool.next_victims(10**6))
        assert not used & free, "a copy would write to blocks that others may get"
    transfers.auto = True
    finish(engine, offloading)


def test_a_reset_is_refused_while_a_copy_runs_and_clears_the_tier_after() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    offloading.transfers[0].auto = False
    engine.add("r", prompt(0, 30), 1)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert not engine.scheduler.reset_cache()
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert offloading.manager.num_ready == 7
    assert engine.scheduler.reset_cache()
    assert offloading.manager.num_ready == 0


def test_a_load_that_ends_is_progress_even_if_its_request_is_gone() -> None:
    offloading = SimulatedOffloading(60)
    first = SimulatedEngine(simulated_layout(60), offloading)
    for at in range(3):
        first.add(str(at), prompt(at, 40), 1)
        finish(first, offloading)
    engine = SimulatedEngine(simulated_layout(14), offloading, load_timeout_s=1.8)
    assert isinstance(engine.clock, VirtualClock)
    transfers = offloading.transfers[-1]
    transfers.auto = False
    for at, name in enumerate(("gone", "gone, too", "loads next")):
        engine.add(name, [*prompt(at, 40), 1], 1)
    engine.add("waits", prompt(3, 40), 1)
    for name in ("gone", "gone, too", "loads next"):
        engine.step()
        (load,) = transfers.pending
        assert load.direction is Direction.LOAD
        if name != "loads next":
            engine.abort(name)
        for _ in range(8):
            engine.clock.advance(0.1)
            engine.step()
        transfers.complete(load)
        engine.step()
    transfers.auto = True
    finish(engine, offloading)
    assert broken_rule(engine) == ""
    assert engine.outputs["loads next"].cache_report.restored_tokens == {"host": 40}
    assert engine.tokens("waits") == alone(prompt(3, 40), 1)
