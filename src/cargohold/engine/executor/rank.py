"""One rank of several: a worker that takes its steps and gives its outputs as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cargohold.engine.executor.codec import StepCodec
from cargohold.engine.executor.runner import ModelRunner
from cargohold.engine.executor.worker import Worker
from cargohold.protocol import Clock, KVCacheLayout, KVConnectorFactory, WorkerEnvironment


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is among the others.

    Attributes:
        rank: number of the rank, from 0.
        world_size: number of ranks.
        rendezvous: URL at which they meet to form a group for their collectives; see ``torch.distributed``.
        sees_own_device_only: whether accelerators that belong to other ranks are hidden from this one.
    """

    rank: int
    world_size: int
    rendezvous: str
    sees_own_device_only: bool = False


class RunnerFactory(Protocol):
    """Makes a rank's model runner. It travels to the rank's process, so it must survive pickling."""

    def make_runner(self, place: RankPlace) -> ModelRunner:
        """Load the rank's shard of the model. Called in the rank's own process."""
        ...


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank needs to start.

    Attributes:
        runners: makes the model runner.
        connectors: makes the worker side of the connector.
        layout: the paged KV cache.
    """

    runners: RunnerFactory
    connectors: KVConnectorFactory
    layout: KVCacheLayout


class RankWorker:
    """A worker that takes steps and gives outputs as bytes.

    Args:
        spec: makes the worker's parts.
        place: which rank this is.
        clock: monotonic time in seconds.
    """

    def __init__(self, spec: RankSpec, place: RankPlace, clock: Clock) -> None:
        runner = spec.runners.make_runner(place)
        connector = spec.connectors.make_worker_side(WorkerEnvironment(spec.layout, place.rank, clock))
        self._codec = StepCodec(metadata_type=connector.metadata_type)
        self._worker = Worker(runner, connector)

    def execute(self, step: bytes) -> bytes:
        """Run one step."""
        return self._codec.encode_output(self._worker.execute(self._codec.decode_step(step)))

    def shutdown(self) -> None:
        """Let transfers end."""
        self._worker.shutdown()
