"""The model port: what a worker needs of whatever computes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cargohold.engine.core.step import SchedulerStep


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
