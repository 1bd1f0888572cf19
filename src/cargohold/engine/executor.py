"""Executors: how the steps of a scheduler reach the workers, what a worker does in a step, and how their outputs become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.errors import ContractError
from cargohold.protocol import KVConnectorOutput, KVConnectorWorker, OutputAggregator, WorkerConnectorGuard


class LayerHooks(Protocol):
    """Hooks that are called around each layer's attention. A KV connector's worker side has them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer reads its KV."""

    def save_kv_layer(self, layer_name: str) -> None:
        """After a layer's KV of this step is written."""


class ModelRunner(Protocol):
    """Computes a step's tokens on paged KV memory that it owns."""

    def kv_regions(self) -> Sequence[Sequence[Any]]:
        """The paged KV memory, per group; see ``KVConnectorWorker.register_kv_caches``."""

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int | None]:
        """Run the model on the step's batch, writing KV into its blocks; returns sampled tokens by request id.

        Of several ranks only rank 0 need return tokens. Every rank returns ``None`` for each request for which it computed
        numbers that are not finite, whether or not the request was to get a token.

        Args:
            step: the batch; not empty.
            hooks: to be called around every layer's attention; ``None`` without a listener.
        """


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


# --- a worker ---------------------------------------------------------------------------------------------------------


class Worker:
    """Runs steps in the order that the contract prescribes.

    Args:
        runner: computes tokens.
        connector: worker side of the KV connector; it is given the runner's KV memory.
    """

    def __init__(self, runner: ModelRunner, connector: KVConnectorWorker) -> None:
        self._runner = runner
        self._connector = WorkerConnectorGuard(connector)
        connector.register_kv_caches(runner.kv_regions())

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step. Whatever happens, the last call is the one that makes the connector forget its message."""
        connector = self._connector
        if step.drop_connector:
            connector.stop()
        try:
            connector.begin(step.connector_metadata)
            hooks = connector if connector.listens_to_layers else None
            sampled = self._runner.execute(step, hooks) if step.scheduled else {}
            connector.wait_for_save()
            report = connector.collect(step.finished_req_ids)
        finally:
            connector.clear_connector_metadata()
        return StepOutput(sampled=sampled, connector=report, connector_error=connector.take_error())

    def shutdown(self) -> None:
        """Wait for the connector's transfers and let it go."""
        self._connector.stop()


class Executor(Protocol):
    """Runs steps on all workers. An executor knows nothing of what a connector is."""

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step on every worker and merge their outputs.

        Raises:
            EngineDeadError: a worker cannot go on; the executor is shut down.
        """

    def shutdown(self) -> None:
        """Stop the workers, letting their transfers end. May be called twice."""


# --- merges all workers' outputs of a step into one -------------------------------------------------------------------


def merge_outputs(aggregator: OutputAggregator, outputs: Sequence[StepOutput]) -> StepOutput:
    """Merge the outputs of one step, indexed by rank.

    Every rank samples the same tokens, so rank 0 speaks for all; but numbers that are not finite may be in one rank's part of
    the model.

    Mutates ``aggregator``. If a worker's connector broke a rule of reporting, the merged output carries that as the
    connector's error instead of its reports.
    """
    if len(outputs) == 1 and outputs[0].connector.is_empty() and not outputs[0].connector_error:
        return outputs[0]  # as in most steps of an engine with one worker
    sampled = _merge_sampled(outputs)
    errors = [f"worker {rank}: {out.connector_error}" for rank, out in enumerate(outputs) if out.connector_error]
    try:
        connector = aggregator.aggregate([output.connector for output in outputs])
    except ContractError as error:
        # The reports said which loads failed. Without them, nothing of the step can be trusted.
        failed = KVConnectorOutput(step_failed=True)
        return StepOutput(sampled=sampled, connector=failed, connector_error=error.rule)
    return StepOutput(sampled=sampled, connector=connector, connector_error="; ".join(errors) or None)


def _merge_sampled(outputs: Sequence[StepOutput]) -> Mapping[str, int | None]:
    not_finite = [name for output in outputs[1:] for name, token in output.sampled.items() if token is None]
    return {**outputs[0].sampled, **dict.fromkeys(not_finite)} if not_finite else outputs[0].sampled


# --- one worker -------------------------------------------------------------------------------------------------------


class InlineExecutor:
    """Runs each step where it is called.

    Args:
        worker: the one worker.
        expected_finished_count: the connector's answer to ``KVConnectorScheduler.get_finished_count``.
        connector: the connector's name, for errors.
    """

    def __init__(
        self, worker: Worker, expected_finished_count: int | None = None, connector: str = "connector"
    ) -> None:
        self._worker = worker
        self._aggregator = OutputAggregator(1, expected_finished_count, connector)
        self._is_shut_down = False

    def execute(self, step: SchedulerStep) -> StepOutput:
        return merge_outputs(self._aggregator, [self._worker.execute(step)])

    def shutdown(self) -> None:
        """Stop the worker."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._worker.shutdown()
