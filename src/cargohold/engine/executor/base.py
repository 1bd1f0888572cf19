"""The executor port: how a scheduler's steps reach the workers, and how their outputs become one."""

from __future__ import annotations

from typing import Protocol

from cargohold.engine.core.step import SchedulerStep, StepOutput


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
