"""An executor with one Ray actor per rank, on one machine or several."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from cargohold.engine.executor import RankPlace
from cargohold.engine.ranks.rank import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    FramedRank,
    RanksExecutor,
    RankSpec,
    describe_silence,
    open_frame,
)
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.errors import ConfigError, EngineDeadError
from cargohold.protocol import OutputAggregator


class RankActor(FramedRank):
    """A rank as a Ray actor."""

    def choose_rendezvous(self) -> str:
        """An address on this actor's node at which all ranks can meet."""
        import ray  # noqa: PLC0415  # an optional extra

        with socket.socket() as probe:
            probe.bind(("", 0))
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no annotations here
            return f"tcp://{address}:{probe.getsockname()[1]}"


class RayExecutor(RanksExecutor):
    """One Ray actor per rank.

    Args:
        spec: what each rank is made of.
        world_size: ranks.
        codec, aggregator, step_timeout_s: see ``RanksExecutor``.
        num_gpus: GPUs that each rank needs.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has not enough room.
        CargoholdError: a rank could not start; none is left running.
    """

    def __init__(  # one place where all of it meets
        self,
        spec: RankSpec,
        world_size: int,
        codec: StepCodec,
        aggregator: OutputAggregator,
        *,
        num_gpus: int = 0,
        step_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(codec, aggregator, step_timeout_s)
        self._actors: list[Any] = []
        self._group: Any = None
        self._ray, self._owns_cluster = _connect()
        try:
            self._start(spec, world_size, num_gpus)
        except BaseException:
            self._kill()
            raise

    def shutdown(self) -> None:
        """Let transfers end, then the actors."""
        if self._actors:
            stopping = [actor.shutdown.remote() for actor in self._actors]
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        self._kill()

    def _start(self, spec: RankSpec, world_size: int, num_gpus: int) -> None:
        ray = self._ray
        needs = {"CPU": 1, **({"GPU": num_gpus} if num_gpus else {})}
        self._group = ray.util.placement_group([needs] * world_size, strategy="PACK")
        if not self._group.wait(timeout_seconds=STOP_TIMEOUT_S):
            raise ConfigError(
                "tensor_parallel_size", world_size, f"the Ray cluster has no room for so many workers of {needs} each"
            )
        actor_class = ray.remote(RankActor)
        for rank in range(world_size):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank
            )
            options = actor_class.options(
                scheduling_strategy=strategy, num_cpus=1, num_gpus=num_gpus, max_restarts=0, max_task_retries=0
            )
            self._actors.append(options.remote())
        rendezvous = ray.get(self._actors[0].choose_rendezvous.remote(), timeout=START_TIMEOUT_S)
        places = [RankPlace(rank, world_size, rendezvous, sees_own_device_only=True) for rank in range(world_size)]
        starts = [actor.start.remote(spec, place) for actor, place in zip(self._actors, places, strict=True)]
        self._gather(starts, START_TIMEOUT_S)

    def _answers(self, frame: bytes) -> list[bytes]:
        return self._gather([actor.execute.remote(frame) for actor in self._actors], self._step_timeout_s)

    def _gather(self, pending: Sequence[Any], timeout_s: float) -> list[bytes]:
        """The content of each rank's frame, in rank order.

        Raises:
            EngineDeadError: a rank failed or did not answer. Named is the one that failed first: others may wait for it.
        """
        ray = self._ray
        frames: dict[int, bytes] = {}
        ranks = {reference: rank for rank, reference in enumerate(pending)}
        waiting = list(pending)
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineDeadError(describe_silence(sorted(ranks[reference] for reference in waiting), timeout_s))
            rank = ranks[ready[0]]
            try:
                frames[rank] = open_frame(rank, ray.get(ready[0]))
            except ray.exceptions.RayActorError as error:
                raise EngineDeadError(f"worker {rank} died: {_first_line(error)}") from error
        return [frames[rank] for rank in range(len(pending))]

    def _kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._owns_cluster:
            self._owns_cluster = False
            self._ray.shutdown()


def _connect() -> tuple[Any, bool]:
    """Ray, connected as ``ray.init`` does by itself (``RAY_ADDRESS``), and whether the connection is our own to end."""
    try:
        import ray  # noqa: PLC0415  # an optional extra
        import ray.util.scheduling_strategies  # noqa: PLC0415  # not imported by ray itself
    except ImportError as error:
        raise ConfigError("executor", "ray", "install what it needs: pip install 'cargohold[ray]'") from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError("executor", "ray", f"no Ray cluster answers: {_first_line(error)}") from error
    return ray, True


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
