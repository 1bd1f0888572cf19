"""A simulated engine with tiers below host memory, for tests."""

from __future__ import annotations

from typing import Any

from cargohold.lab.simulation import SimulatedEngine, simulated_layout
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import alone, evict_everything, prompt
from tests.held_tiers import HeldQueue, SimulatedTiering

DISK = TierOptions(name="disk")
SHARED = TierOptions(name="shared")


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
    tiering.lower.check()
    assert tiering.manager.num_writing == tiering.manager.num_pins == 0


def serve(engine: SimulatedEngine, tiering: SimulatedTiering, name: str, tokens: list[int], num: int = 3) -> None:
    engine.add(name, tokens, num)
    finish(engine, tiering)
    assert engine.tokens(name) == alone(tokens, num)


def lose_host_memory(engine: SimulatedEngine, tiering: SimulatedTiering) -> None:
    """Leave what the disk has to the disk alone."""
    evict_everything(engine)
    tiering.manager.remove(tiering.media[0][0].chunks)


def restored(engine: SimulatedEngine, name: str) -> dict[str, int]:
    return dict(engine.outputs[name].cache_report.restored_tokens)


def measured_engine(tiering: SimulatedTiering, **options: Any) -> tuple[SimulatedEngine, HeldQueue]:
    """An engine that knows how long computing takes: 0.01 s for 8 tokens."""
    engine = make_engine(tiering, max_num_batched_tokens=8, **options)
    serve(engine, tiering, "measured", prompt(1000, 8), 1)
    (queue,) = tiering.all_queues()
    return engine, queue


def fetching_engine(tiering: SimulatedTiering) -> tuple[SimulatedEngine, HeldQueue]:
    """An engine after a restart whose request ``second`` waits for its chunks: the only job, still pending, loads them."""
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    engine.add("second", prompt(0, 45), 3)
    engine.step()
    queue.complete(queue.pending[0])
    for _ in range(2):
        engine.step()
    return engine, queue
