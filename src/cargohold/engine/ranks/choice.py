"""Which executor is made, and how it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from cargohold.engine.executor import Executor, InlineExecutor, RankPlace, Worker
from cargohold.engine.ranks.processes import MultiprocessExecutor
from cargohold.engine.ranks.rank import RankSpec
from cargohold.engine.ranks.ray_actors import RayExecutor
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.protocol import KVConnectorScheduler, OutputAggregator, WorkerEnvironment


class ExecutorKind(Enum):
    """Where workers run."""

    INLINE = "inline"
    """One worker, in the engine's own process and thread."""
    MULTIPROCESS = "multiprocess"
    """One process per rank, on this machine."""
    RAY = "ray"
    """One Ray actor per rank, on one machine or several."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Which executor, and how it runs.

    Attributes:
        kind: where workers run.
        step_timeout_s: longest time that a step may take with several processes.
        gpus_per_worker: GPUs that Ray reserves for each worker.
    """

    kind: ExecutorKind = ExecutorKind.INLINE
    step_timeout_s: float = 300.0
    gpus_per_worker: int = 0


def make_executor(config: ExecutorConfig, spec: RankSpec, connector: KVConnectorScheduler) -> Executor:
    """Start the workers, and make the executor for them. ``connector`` is the scheduler side of the workers' connector.

    Raises:
        CargoholdError: a worker could not start; none is left running.
    """
    world_size, finished_count = spec.layout.world_size, connector.get_finished_count()
    if config.kind is ExecutorKind.INLINE:
        assert world_size == 1, "one process is one rank"
        runner = spec.runners.make_runner(RankPlace(0, 1, ""))
        worker_side = spec.connectors.make_worker_side(WorkerEnvironment(spec.layout, rank=0, clock=time.monotonic))
        try:
            return InlineExecutor(Worker(runner, worker_side), finished_count, connector.name)
        except BaseException:
            worker_side.shutdown()  # it may have opened tiers, which no other process could use
            raise
    codec, aggregator = (
        StepCodec.for_outputs_of(connector),
        OutputAggregator(world_size, finished_count, connector.name),
    )
    if config.kind is ExecutorKind.MULTIPROCESS:
        return MultiprocessExecutor(spec, world_size, codec, aggregator, config.step_timeout_s)
    return RayExecutor(
        spec,
        world_size,
        codec,
        aggregator,
        num_gpus=config.gpus_per_worker,
        step_timeout_s=config.step_timeout_s,
    )
