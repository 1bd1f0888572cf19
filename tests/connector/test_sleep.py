"""The device's memory is taken away while it sleeps: no copy touches it, and every request gets its tokens."""

from __future__ import annotations

from random import Random

import pytest

from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.transfer import Direction
from tests.connector.common import evict_everything, finish, prompt, serve_and_lose


def start(tier: SimulatedOffloading) -> SimulatedEngine:
    return SimulatedEngine(simulated_layout(60), tier)


@pytest.mark.parametrize("direction", Direction)
def test_copies_under_way_end_before_the_device_sleeps(direction: Direction) -> None:
    tier = SimulatedOffloading(60)
    engine = start(tier)
    if direction is Direction.LOAD:
        serve_and_lose(engine, tier, prompt(0, 41), 1)
    (transfers,) = tier.transfers
    transfers.auto = False
    engine.add("second", prompt(0, 41), 3)
    while not any(job.direction is direction for job in transfers.pending):
        engine.step()
    (worker,) = engine.worker_sides
    worker.unregister_kv_caches()
    worker.unregister_kv_caches()
    assert not transfers.pending
    worker.restore_kv_caches()
    transfers.auto = True
    finish(engine, tier)
    assert len(engine.tokens("second")) == 3


def test_jobs_of_steps_in_which_the_device_sleeps_fail_and_later_ones_do_not() -> None:
    tier = SimulatedOffloading(60)
    engine = start(tier)
    serve_and_lose(engine, tier, prompt(0, 41), 1)
    (transfers,) = tier.transfers
    (worker,) = engine.worker_sides
    worker.restore_kv_caches()
    worker.unregister_kv_caches()
    engine.add("asleep", prompt(0, 41), 3)
    transfers.on_copy = lambda job: pytest.fail(f"{job} touches memory that is not there")
    finish(engine, tier)
    assert not engine.outputs["asleep"].cache_report.restored_tokens
    worker.restore_kv_caches()
    transfers.on_copy = lambda _: None
    for name in ("computed", "restored"):
        evict_everything(engine)
        engine.add(name, prompt(1, 41), 3)
        finish(engine, tier)
    assert sum(engine.outputs["restored"].cache_report.restored_tokens.values()) == 40


@pytest.mark.parametrize("seed", range(20))
def test_in_whatever_order_the_hooks_are_called_no_copy_touches_memory_that_is_not_there(seed: int) -> None:
    """Requests come and copies end at any time between; reads are checked against what the device should hold."""
    random, tier = Random(seed), SimulatedOffloading(60)
    engine = start(tier)
    (transfers,), (worker,) = tier.transfers, engine.worker_sides
    is_mapped = True

    def check(job: object) -> None:
        assert is_mapped, f"{job} touches memory that is not there"

    transfers.on_copy = check
    for at in range(60):
        transfers.auto = random.random() < 0.5
        match random.choice(("ask", "forget", "sleep", "sleep again", "wake", "step", "step")):
            case "ask":
                engine.add(f"r{at}", prompt(random.randrange(3), 41), 3)
            case "forget" if not engine.scheduler.has_work():
                evict_everything(engine)
            case "sleep" | "sleep again":
                worker.unregister_kv_caches()
                is_mapped = False
            case "wake":
                is_mapped = True
                worker.restore_kv_caches()
            case _:
                engine.step()
    is_mapped, transfers.auto = True, True
    worker.restore_kv_caches()
    finish(engine, tier)


def test_a_copy_that_does_not_end_is_an_error_with_which_the_guard_stops_the_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = SimulatedOffloading(60)
    engine = start(tier)
    (transfers,) = tier.transfers
    monkeypatch.setattr(transfers, "settle", lambda _: False)
    (worker,) = engine.worker_sides
    with pytest.raises(TimeoutError, match="a copy is stuck"):
        worker.unregister_kv_caches()
