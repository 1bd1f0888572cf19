"""One worker, in this process and thread."""

from __future__ import annotations

from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.executor.merge import merge_outputs
from cargohold.engine.executor.worker import Worker
from cargohold.protocol import OutputAggregator


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
