"""An executor that runs several workers in one thread; the engine's own aggregator merges their outputs."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.executor import Worker
from cargohold.engine.executor.merge import merge_outputs
from cargohold.protocol import OutputAggregator


class SimulatedExecutor:
    """Runs each step on one worker after the other. Satisfies ``Executor``.

    Args:
        workers: by rank.
        expected_finished_count: the connector's answer to ``KVConnectorScheduler.get_finished_count``.

    Attributes:
        workers: by rank.
        aggregator: merges the workers' reports.
    """

    def __init__(self, workers: Sequence[Worker], expected_finished_count: int | None = None) -> None:
        self.workers = workers
        self.aggregator = OutputAggregator(len(workers), expected_finished_count)

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step."""
        return merge_outputs(self.aggregator, [worker.execute(step) for worker in self.workers])

    def shutdown(self) -> None:
        """Stop all workers."""
        for worker in self.workers:
            worker.shutdown()
