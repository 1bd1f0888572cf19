"""Containment on the worker side: a connector that raises is stopped, and the step is reported as not to be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

from cargohold.protocol.connector import KVConnectorWorker
from cargohold.protocol.messages import ConnectorMetadata, FinishedTransfers, KVConnectorOutput, Stats
from cargohold.protocol.null import NullConnectorWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerConnectorGuard:
    """One worker side, contained. Its methods are those that a worker calls in a step, in order.

    Args:
        inner: the connector.
    """

    def __init__(self, inner: KVConnectorWorker) -> None:
        self._inner = inner
        self.name = inner.name
        self.metadata_type = inner.metadata_type
        self._error: str | None = None
        self._step_failed = False

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

    def register_kv_caches(self, kv_caches: Sequence[Any]) -> None:
        """Pass on."""
        self._call(self._inner.register_kv_caches, None, kv_caches)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Pass on."""
        self._call(self._inner.bind_connector_metadata, None, metadata)

    def handle_preemptions(self) -> None:
        """Pass on."""
        self._call(self._inner.handle_preemptions, None)

    def start_load_kv(self) -> None:
        """Pass on."""
        self._call(self._inner.start_load_kv, None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass on."""
        self._call(self._inner.wait_for_layer_load, None, layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Pass on."""
        self._call(self._inner.save_kv_layer, None, layer_name)

    def wait_for_save(self) -> None:
        """Pass on."""
        self._call(self._inner.wait_for_save, None)

    def collect(self, finished_req_ids: AbstractSet[str]) -> KVConnectorOutput:
        """What ended, what failed, and what the connector wants to say: the calls between stores and the end of the step."""
        stats: Stats = {}
        no_blocks: AbstractSet[int] = frozenset()
        finished = self._call(self._inner.get_finished, FinishedTransfers(), finished_req_ids)
        output = KVConnectorOutput(
            finished=finished,
            invalid_block_ids=frozenset(self._call(self._inner.get_block_ids_with_load_errors, no_blocks)),
            stats=self._call(self._inner.get_stats, stats),
            worker_meta=self._call(self._inner.build_connector_worker_meta, None),
        )
        if self._step_failed:
            # It may have raised before or while the model ran, and with it may be lost what it was to load.
            self._step_failed = False
            output = replace(output, finished=replace(finished, step_failed=True))
        return output

    def clear_connector_metadata(self) -> None:
        """Pass on. Always the last call of a step."""
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
            self._step_failed = True
            self._error = f"its worker side raised {error!r} in {getattr(call, '__name__', 'a call')}"
            self.stop()
            return otherwise
