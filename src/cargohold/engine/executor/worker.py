"""A worker: one model shard, its paged KV, and the worker side of the connector, stepped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.protocol import KVConnectorWorker, WorkerConnectorGuard


class LayerHooks(Protocol):
    """Hooks that are called around each layer's attention. A KV connector's worker side has them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer reads its KV."""
        ...

    def save_kv_layer(self, layer_name: str) -> None:
        """After a layer's KV of this step is written."""
        ...


class ModelRunner(Protocol):
    """Computes a step's tokens on paged KV memory that it owns."""

    def kv_regions(self) -> Sequence[Sequence[Any]]:
        """The paged KV memory, per group; see ``KVConnectorWorker.register_kv_caches``."""
        ...

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int | None]:
        """Run the model on the step's batch, writing KV into its blocks; returns sampled tokens by request id.

        Of several ranks only rank 0 need return tokens. Every rank returns ``None`` for each request for which it computed
        numbers that are not finite, whether or not the request was to get a token.

        Args:
            step: the batch; not empty.
            hooks: to be called around every layer's attention; ``None`` if nobody listens.
        """
        ...


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
