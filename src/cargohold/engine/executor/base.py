"""The executor port: how a scheduler's steps reach the workers, and how their outputs become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.executor.worker import Worker
from cargohold.errors import ContractError
from cargohold.protocol import FinishedTransfers, KVConnectorOutput, OutputAggregator


class Executor(Protocol):
    """Runs steps on all workers. An executor knows nothing of what a connector is."""

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step on every worker and merge their outputs.

        Raises:
            EngineDeadError: a worker cannot go on; the executor is shut down.
        """
        ...

    def shutdown(self) -> None:
        """Stop the workers, letting their transfers end. May be called twice."""
        ...


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
        failed = KVConnectorOutput(finished=FinishedTransfers(step_failed=True))
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
        """Run one step."""
        return merge_outputs(self._aggregator, [self._worker.execute(step)])

    def shutdown(self) -> None:
        """Stop the worker."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._worker.shutdown()
