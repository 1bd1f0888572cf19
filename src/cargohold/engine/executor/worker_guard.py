"""Containment on the worker side: a connector that raises there is stopped, and the step is reported as not to be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TypeVar

from cargohold.protocol import (
    ConnectorMetadata,
    FinishedTransfers,
    KVConnectorOutput,
    KVConnectorWorker,
    NullConnectorWorker,
    Stats,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerConnectorGuard:
    """One worker side, contained. Its methods are those a worker calls in a step, in order.

    Args:
        inner: the connector.
    """

    def __init__(self, inner: KVConnectorWorker) -> None:
        self._inner = inner
        self._error: str | None = None

    @property
    def listens_to_layers(self) -> bool:
        """Whether the connector wants to be called around each layer."""
        kind = type(self._inner)
        return (
            kind.wait_for_layer_load is not KVConnectorWorker.wait_for_layer_load
            or kind.save_kv_layer is not KVConnectorWorker.save_kv_layer
        )

    def take_error(self) -> str | None:
        """What the connector raised since the last call, as a rule it broke; it has been stopped by then."""
        error, self._error = self._error, None
        return error

    def begin_step(self, metadata: ConnectorMetadata) -> None:
        """Hand over the scheduler side's message and start the loads."""
        self._call(self._inner.bind_connector_metadata, None, metadata)
        self._call(self._inner.handle_preemptions, None)
        self._call(self._inner.start_load_kv, None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass on."""
        self._call(self._inner.wait_for_layer_load, None, layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Pass on."""
        self._call(self._inner.save_kv_layer, None, layer_name)

    def end_forward(self, finished_req_ids: AbstractSet[str]) -> KVConnectorOutput:
        """The forward pass is over: start the stores and collect what ended."""
        self._call(self._inner.wait_for_save, None)
        stats: Stats = {}
        no_blocks: AbstractSet[int] = frozenset()
        return KVConnectorOutput(
            finished=self._call(self._inner.get_finished, FinishedTransfers(), finished_req_ids),
            invalid_block_ids=frozenset(self._call(self._inner.get_block_ids_with_load_errors, no_blocks)),
            stats=self._call(self._inner.get_stats, stats),
            worker_meta=self._call(self._inner.build_connector_worker_meta, None),
        )

    def end_step(self) -> None:
        """Forget the step's message. Always the last call of a step."""
        self._call(self._inner.clear_connector_metadata, None)

    def stop(self) -> None:
        """Let the connector finish what it has in flight, and do without it from now on."""
        inner, self._inner = self._inner, NullConnectorWorker()
        try:
            inner.shutdown()
        except Exception:  # a third party's code: its failure must not stop the worker
            logger.exception("connector %s raised while it was stopped", inner.name)

    def _call(self, call: Callable[..., T], otherwise: T, *args: object) -> T:
        try:
            return call(*args)
        except Exception as error:  # a third party's code: whatever it raises must not stop the worker
            name = self._inner.name
            logger.exception("connector %s raised on a worker and is stopped", name)
            self._error = f"its worker side raised {error!r} in {getattr(call, '__name__', 'a call')}"
            self.stop()
            return otherwise
