"""A worker: one model shard, its paged KV, and the worker side of the connector, stepped together."""

from __future__ import annotations

from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.executor.runner import ModelRunner
from cargohold.protocol import KVConnectorWorker, WorkerConnectorGuard


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
