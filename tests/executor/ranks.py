"""Ranks for tests: workers in other processes that run no model, and connectors that remember how they were called.

Nothing here imports PyTorch, which would take each of these processes seconds.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np

from cargohold.engine.core.request import SchedulerStep
from cargohold.engine.executor import LayerHooks, ModelRunner, RankPlace
from cargohold.errors import UnsupportedModelError
from cargohold.protocol import (
    KVCacheLayout,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorker,
    KVConnectorWorkerMetadata,
    NullConnectorScheduler,
    SchedulerEnvironment,
    Stats,
    StepView,
    TransferOutcome,
    WorkerEnvironment,
)
from cargohold.protocol.metrics import counter

RANKS = counter("ranks", "ranks", "How many have counted.").of()


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, where and when.

    Attributes:
        what: ``kill``, ``hang``, ``raise``, ``refuse``, or empty for nothing.
        where: ``start``, ``begin`` or ``forward``.
        rank: the rank in which it goes wrong.
        step: the step in which it goes wrong, from 0.
    """

    what: str = ""
    where: str = ""
    rank: int = -1
    step: int = -1

    def strike(self, where: str, rank: int, step: int) -> None:
        """Let it go wrong, if this is the place and time."""
        if (where, rank, step) != (self.where, self.rank, self.step):
            return
        match self.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise RuntimeError("the model broke")
            case "refuse":
                raise UnsupportedModelError("some model", "it cannot be served")


@dataclass(frozen=True)
class StubRunners:
    """Makes runners whose next token is the number of tokens so far."""

    layout: KVCacheLayout
    trouble: Trouble = Trouble()

    def make_runner(self, place: RankPlace) -> ModelRunner:
        self.trouble.strike("start", place.rank, -1)
        return StubRunner(self, place)


class StubRunner:
    def __init__(self, spec: StubRunners, place: RankPlace) -> None:
        self.spec, self.place = spec, place
        self.num_steps = 0
        self.memory = np.zeros((spec.layout.num_blocks, spec.layout.block_bytes), dtype=np.uint8)

    def kv_regions(self) -> Sequence[Sequence[Any]]:
        return [[self.memory] for _ in self.spec.layout.groups]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self.spec.trouble.strike("forward", self.place.rank, number)
        for group in self.spec.layout.groups:
            for name in group.layer_names:
                if hooks is not None:
                    hooks.wait_for_layer_load(name)
                    hooks.save_kv_layer(name)
        return {
            share.request_id: share.num_computed_tokens + share.num_scheduled_tokens
            for share in step.scheduled
            if share.sample is not None
        }


@dataclass(frozen=True)
class Calls:
    """The calls of a probing connector's worker sides, rank by rank."""

    by_rank: tuple[tuple[str, ...], ...]

    def aggregate(self, other: Calls) -> Calls:
        return Calls(self.by_rank + other.by_rank)


@dataclass(frozen=True)
class ProbeMetadata:
    """One step's message to the probing workers: which jobs to report, and when."""

    number: int = 0


class ProbingWorker(KVConnectorWorker):
    """Records every call, and sends the calls with its next report. Rank ``n`` reports a step's job ``n`` steps late."""

    name = "probe"
    metadata_type = ProbeMetadata

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.rank = environment.rank
        self.calls: list[str] = []
        self.jobs: list[tuple[int, int]] = []
        self.metadata: ProbeMetadata | None = None

    def register_kv_caches(self, kv_caches: Sequence[Any]) -> None:
        self.calls.append("register_kv_caches")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, ProbeMetadata)
        assert self.metadata is None
        self.metadata = connector_metadata
        self.jobs.append((connector_metadata.number + self.rank, connector_metadata.number))
        self.calls.append("bind_connector_metadata")

    def handle_preemptions(self) -> None:
        self.calls.append("handle_preemptions")

    def start_load_kv(self) -> None:
        self.calls.append("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"wait_for_layer_load {layer_name}")

    def save_kv_layer(self, layer_name: str) -> None:
        self.calls.append(f"save_kv_layer {layer_name}")

    def wait_for_save(self) -> None:
        self.calls.append("wait_for_save")

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        self.calls.append("get_transfer_results")
        assert self.metadata is not None
        due = {job: TransferOutcome.DONE for at, job in self.jobs if at == self.metadata.number}
        return KVConnectorTransferResults(jobs=due)

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        self.calls.append("get_block_ids_with_load_errors")
        return frozenset()

    def get_kv_connector_stats(self) -> Stats:
        self.calls.append("get_kv_connector_stats")
        return {RANKS: 1}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        self.calls.append("build_connector_worker_meta")
        calls, self.calls = tuple(self.calls), []
        return Calls((calls,))

    def clear_connector_metadata(self) -> None:
        self.metadata = None
        self.calls.append("clear_connector_metadata")


class ProbingScheduler(NullConnectorScheduler):
    name = "probe"
    worker_metadata_type = Calls

    def __init__(self) -> None:
        self.number = 0

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        self.number += 1
        return ProbeMetadata(self.number - 1)


@dataclass(frozen=True)
class Probing:
    """Makes probing connectors, with worker sides of a kind."""

    worker: type[ProbingWorker] = ProbingWorker

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> ProbingScheduler:
        return ProbingScheduler()

    def make_worker_side(self, environment: WorkerEnvironment) -> ProbingWorker:
        return self.worker(environment)


class Opaque:
    """A message that cannot be encoded as bytes."""

    def aggregate(self, other: Opaque) -> Opaque:
        return self


class OpaqueWorker(ProbingWorker):
    """Sends a message that cannot be carried to another process."""

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return Opaque()


class UndeclaredWorker(ProbingWorker):
    """Sends a message of another type than its scheduler side declares."""

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return Undeclared()


class CountlessWorker(ProbingWorker):
    """Reports a job whose number is too large for any message."""

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(jobs={2**70: TransferOutcome.DONE})


class NumpyWorker(ProbingWorker):
    """Reports counters as numbers of numpy."""

    def get_kv_connector_stats(self) -> Stats:
        return {RANKS: np.float64(1)}


class CollectorWorker(ProbingWorker):
    """Reports whether the garbage collector was on when it was made, is on now, and looks at what was made before it."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        super().__init__(environment)
        self.calls.append(f"made while it is {'on' if gc.isenabled() else 'off'}")

    def start_load_kv(self) -> None:
        everything = gc.get_objects()
        self.calls.append(f"now it is {'on' if gc.isenabled() else 'off'}")
        self.calls.append(
            f"it looks at {'this worker' if any(seen is self for seen in everything) else 'later objects'}"
        )


@dataclass(frozen=True)
class Undeclared:
    """A message of another type than was declared."""

    number: str = "one"

    def aggregate(self, other: Undeclared) -> Undeclared:
        return self
