"""Executors with a rank per process: processes of this machine, or Ray actors on one or several; and which executor is made."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.engine.executor import Executor, InlineExecutor, RankPlace, Worker, merge_outputs
from cargohold.engine.frames import (
    Channel,
    ChannelClosedError,
    FramedRank,
    RankSpec,
    StepCodec,
    describe_silence,
    open_frame,
)
from cargohold.errors import ConfigError, EngineDeadError
from cargohold.protocol import KVConnectorScheduler, OutputAggregator, WorkerEnvironment

logger = logging.getLogger(__name__)

STOP = b""
"""The frame that ends a rank."""


def run_rank(spec: RankSpec, place: RankPlace, channel: Channel) -> None:
    """Serve steps until told to stop, or until the engine's process is gone."""
    # Ctrl-C reaches every process of the terminal; the engine decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:
        os.dup2(2, 1)  # standard output belongs to the engine's process, but torch 2.8 announces its peers there
    rank = FramedRank()
    try:
        channel.send(rank.start(spec, place))
        while (step := channel.receive()) != STOP:
            channel.send(rank.execute(step))
    except ChannelClosedError:
        pass  # the engine's process has ended: nobody is left to tell
    finally:
        rank.shutdown()


# --- one process per rank ---------------------------------------------------------------------------------------------

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
BLAME_WAIT_S = 0.2
KILL_WAIT_S = 30.0
"""Longest time to wait for killed processes. Giving back a lot of pinned memory takes a while; I/O that the kernel cannot break
off takes for ever."""
EXIT_WAIT_S = 5.0
"""Longest time to wait for each process when the program ends, which matters to nobody any more."""


class RankProcess(SpawnProcess):
    """A rank's process. Nobody waits for ever for its end, not even ``multiprocessing`` when the program ends.

    SIGKILL does not end a process while one of its threads is in I/O that cannot be broken off, as on a frozen file system or
    a network mount whose server is gone.
    """

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended: at most ``timeout`` seconds, or ``EXIT_WAIT_S``."""
        super().join(EXIT_WAIT_S if timeout is None else timeout)


class MultiprocessExecutor:
    """Runs each step on all ranks at once. Satisfies ``Executor``.

    A rank that dies, raises, or does not answer in time ends the engine: the others are killed, for they would wait for it in
    a collective for ever. A child that is forked from the engine's process has no ranks: ``execute`` raises there, and
    ``shutdown`` does nothing.

    Args:
        spec: what each rank is made of.
        world_size: ranks.
        codec: decodes the ranks' outputs.
        aggregator: merges what their connectors report.
        step_timeout_s: the longest that a step may take.

    Raises:
        ConfigError: the spec cannot travel to another process.
        CargoholdError: a rank could not start; none is left running.
    """

    def __init__(
        self,
        spec: RankSpec,
        world_size: int,
        codec: StepCodec,
        aggregator: OutputAggregator,
        step_timeout_s: float = 300.0,
    ) -> None:
        _check_can_travel(spec)
        self._codec = codec
        self._aggregator = aggregator
        self._step_timeout_s = step_timeout_s
        self._owner = os.getpid()
        self._processes: list[RankProcess] = []
        self._channels: list[Channel] = []
        scratch = Path(tempfile.mkdtemp(prefix="cargohold-"))  # readable by its owner alone
        try:
            self._start(spec, world_size, f"file://{scratch / 'rendezvous'}")
        except BaseException:
            self._kill()
            raise
        finally:
            # All ranks have met, or the start has failed: nothing in the directory is needed any more.
            shutil.rmtree(scratch, ignore_errors=True)

    @property
    def process_ids(self) -> list[int]:
        """The ranks' processes, in rank order; empty once they have been stopped."""
        return [process.pid for process in self._processes if process.pid is not None]

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step on every rank."""
        if os.getpid() != self._owner:
            raise EngineDeadError("its workers belong to the process from which this one was forked")
        frame = self._codec.encode_step(step)
        try:
            for rank, channel in enumerate(self._channels):
                self._send(rank, channel, frame)
            frames = self._gather(self._step_timeout_s)
        except EngineDeadError as error:
            blamed = self._blame(error)
            self._kill()
            raise blamed from error
        except BaseException:
            self._kill()
            raise
        return merge_outputs(self._aggregator, [self._codec.decode_output(content) for content in frames])

    def shutdown(self) -> None:
        """Let transfers end, then the processes; those that do not end in time are killed."""
        if os.getpid() != self._owner:
            return
        for channel in self._channels:
            try:
                channel.send(STOP, STOP_TIMEOUT_S)
            except (ChannelClosedError, TimeoutError):
                logger.warning("a worker did not take the message to stop")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self, spec: RankSpec, world_size: int, rendezvous: str) -> None:
        for rank in range(world_size):
            ours, theirs = Channel.pair()
            self._channels.append(ours)
            process = RankProcess(
                target=run_rank,
                args=(spec, RankPlace(rank, world_size, rendezvous), theirs),
                name=f"cargohold-worker-{rank}",
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            theirs.close()
        self._gather(START_TIMEOUT_S)

    def _send(self, rank: int, channel: Channel, frame: bytes) -> None:
        try:
            channel.send(frame, self._step_timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(f"worker {rank} does not take a step: it hangs") from error
        except ChannelClosedError as error:
            raise EngineDeadError(self._epitaph(rank)) from error

    def _gather(self, timeout_s: float) -> list[bytes]:
        """The content of each rank's frame, in rank order. Raises ``EngineDeadError`` if a rank fails or does not answer."""
        deadline = time.monotonic() + timeout_s
        frames: dict[int, bytes] = {}
        while len(frames) < len(self._channels):
            waiting = {self._channels[rank].fileno(): rank for rank in range(len(self._channels)) if rank not in frames}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineDeadError(describe_silence(list(waiting.values()), timeout_s))
            for rank in (rank for descriptor, rank in waiting.items() if descriptor in ready):
                frames[rank] = self._receive(rank, max(1.0, deadline - time.monotonic()))
        return [frames[rank] for rank in range(len(self._channels))]

    def _receive(self, rank: int, timeout_s: float) -> bytes:
        try:
            frame = self._channels[rank].receive(timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(f"worker {rank} stopped in the middle of its answer") from error
        except ChannelClosedError as error:
            raise EngineDeadError(self._epitaph(rank)) from error
        return open_frame(rank, frame)

    def _blame(self, error: EngineDeadError) -> EngineDeadError:
        """The error to report: if a rank has died, that is the cause, as the others then fail in their collectives."""
        for rank, process in enumerate(self._processes):
            process.join(BLAME_WAIT_S)
            if process.exitcode is not None and process.exitcode != 0:
                return EngineDeadError(self._epitaph(rank))
        return error

    def _epitaph(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(STOP_TIMEOUT_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"worker {rank} died: killed by {signal.Signals(-code).name}"
        return f"worker {rank} died with exit status {code}"

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        deadline = time.monotonic() + KILL_WAIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        left = [process.pid for process in self._processes if process.exitcode is None]
        if left:
            logger.error(
                "workers were killed and do not end: process ids %s. They wait for a medium that does not answer, and keep "
                "what they have locked until it does",
                ", ".join(map(str, left)),
            )
        for channel in self._channels:
            channel.close()
        self._processes.clear()
        self._channels.clear()


def _check_can_travel(spec: RankSpec) -> None:
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().name.startswith("cargohold-"):
        raise ConfigError(
            "executor",
            "multiprocess",
            'a worker must not start an engine: put the program\'s main part under if __name__ == "__main__":',
        )
    try:
        pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "offload", spec.connectors, f"it cannot be sent to workers in other processes: {error}"
        ) from error


logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 10.0


class RankActor(FramedRank):
    """A rank as a Ray actor."""

    def choose_rendezvous(self) -> str:
        """An address on this actor's node at which all ranks can meet."""
        import ray  # noqa: PLC0415  # an optional extra

        with socket.socket() as probe:
            probe.bind(("", 0))
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no annotations here
            return f"tcp://{address}:{probe.getsockname()[1]}"


class RayExecutor:
    """Runs each step on all actors at once. Satisfies ``Executor``.

    Args:
        spec: what each rank is made of.
        world_size: ranks.
        codec: decodes the ranks' outputs.
        aggregator: merges what their connectors report.
        address: the Ray cluster; ``None`` for the one that this program is connected to, or a local one of its own.
        num_gpus: GPUs that each rank needs.
        step_timeout_s: the longest that a step may take.

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
        address: str | None = None,
        num_gpus: int = 0,
        step_timeout_s: float = 300.0,
    ) -> None:
        self._codec = codec
        self._aggregator = aggregator
        self._step_timeout_s = step_timeout_s
        self._actors: list[Any] = []
        self._group: Any = None
        self._ray, self._owns_cluster = _connect(address)
        try:
            self._start(spec, world_size, num_gpus)
        except BaseException:
            self._kill()
            raise

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step on every rank."""
        frame = self._codec.encode_step(step)
        try:
            frames = self._gather([actor.execute.remote(frame) for actor in self._actors], self._step_timeout_s)
        except BaseException:
            self._kill()
            raise
        return merge_outputs(self._aggregator, [self._codec.decode_output(content) for content in frames])

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


def _connect(address: str | None) -> tuple[Any, bool]:
    """Ray, connected, and whether the cluster is our own to shut down."""
    try:
        import ray  # noqa: PLC0415  # an optional extra
        import ray.util.scheduling_strategies  # noqa: PLC0415  # not imported by ray itself
    except ImportError as error:
        raise ConfigError("executor", "ray", "install what it needs: pip install 'cargohold[ray]'") from error
    if ray.is_initialized():
        return ray, False
    if address is not None:
        _require_answer(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError("ray_address", address, f"no Ray cluster answers there: {_first_line(error)}") from error
    return ray, True


def _require_answer(address: str) -> None:
    """Raise ``ConfigError`` unless somebody takes connections there: Ray would try again for a quarter of an hour."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not separator or not port.isdecimal():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError("ray_address", address, f"no Ray cluster answers there: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]


# --- which of them ----------------------------------------------------------------------------------------------------


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
        ray_address: the Ray cluster; ``None`` for the one this program is connected to, or a local one of its own.
        gpus_per_worker: GPUs that Ray reserves for each worker.
    """

    kind: ExecutorKind = ExecutorKind.INLINE
    step_timeout_s: float = 300.0
    ray_address: str | None = None
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
            worker_side.shutdown()  # it may have opened tiers, which nobody else could use
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
        address=config.ray_address,
        num_gpus=config.gpus_per_worker,
        step_timeout_s=config.step_timeout_s,
    )
