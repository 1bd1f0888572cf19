"""Containment on the worker side: a connector that raises is stopped, and the step is reported as failed."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from cargohold.protocol.checks import checked_block_ids, checked_stats, checked_transfers
from cargohold.protocol.connector import KVConnectorWorker, NullConnectorWorker
from cargohold.protocol.guard import NOT_CONTAINED, describe_raised
from cargohold.protocol.hooks import Hook, WorkerHookDispatcher
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    NOTHING_TO_REPORT,
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
    UndeliveredMetadata,
)
from cargohold.protocol.metrics import Stats

logger = logging.getLogger(__name__)


class WorkerConnectorGuard(WorkerHookDispatcher):
    """Wraps one worker side: passes calls on, and stops the connector when it raises.

    In a step, ``begin`` and ``collect`` stand for the calls before the forward pass and after it.

    Args:
        inner: the connector.
    """

    def __init__(self, inner: KVConnectorWorker) -> None:
        self._inner = inner
        self.name = inner.name
        self.metadata_type = inner.metadata_type
        self._takes_messages = inner.metadata_type is not EmptyMetadata
        self._error: str | None = None
        self._step_failed = False
        self.is_stopped = False

    @property
    def listens_to_layers(self) -> bool:
        """Whether the connector wants to be called around each layer."""
        kind = type(self._inner)
        return (
            kind.wait_for_layer_load is not KVConnectorWorker.wait_for_layer_load
            or kind.save_kv_layer is not KVConnectorWorker.save_kv_layer
        )

    def take_error(self) -> str | None:
        """Return what the connector raised since the last call, as a sentence; ``None`` if nothing.

        The connector has been stopped by then.
        """
        error, self._error = self._error, None
        return error

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Pass the call on. One that raises is answered as by a connector that keeps nothing."""
        call = self._bind if hook.name == "bind_connector_metadata" else getattr(self._inner, hook.name)
        try:
            return call(*args)
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # a third party's code: whatever it raises must not stop the worker
            self._contain(error, hook.name)

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Pass on the three calls before the forward pass, for workers that do nothing of their own between them."""
        inner, name = self._inner, "bind_connector_metadata"
        try:
            self._bind(metadata)
            name = "handle_preemptions"
            inner.handle_preemptions()
            name = "start_load_kv"
            inner.start_load_kv()
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # a third party's code: whatever it raises must not stop the worker
            self._contain(error, name)

    def collect(self, finished_req_ids: AbstractSet[str]) -> KVConnectorOutput:
        """Make the calls between ``wait_for_save`` and the end of the step; return their answers as one output."""
        inner, name = self._inner, "get_transfer_results"
        finished = NOTHING_ENDED
        invalid_block_ids: frozenset[int] | None = None
        worker_meta: KVConnectorWorkerMetadata | None = None
        stats: Stats = {}
        try:
            # Answers given before the connector raised count.
            finished = checked_transfers(inner.get_transfer_results(finished_req_ids))
            name = "get_block_ids_with_load_errors"
            invalid_block_ids = checked_block_ids(inner.get_block_ids_with_load_errors())
            name = "get_kv_connector_stats"
            stats = checked_stats(inner.get_kv_connector_stats())
            name = "build_connector_worker_meta"
            worker_meta = inner.build_connector_worker_meta()
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # a third party's code: whatever it raises must not stop the worker
            self._contain(error, name)
        if invalid_block_ids is None:
            # The connector did not say which blocks of the loads that ended are bad: any of them may be.
            finished = replace(finished, failed_recving=finished.finished_recving)
            invalid_block_ids = frozenset()
        if self._step_failed:
            # The connector may have raised before or while the model ran, so loads of this step may be missing.
            self._step_failed = False
            finished = replace(finished, step_failed=True)
        if finished is NOTHING_ENDED and not invalid_block_ids and worker_meta is None and not stats:
            return NOTHING_TO_REPORT  # most steps
        return KVConnectorOutput.of(finished, invalid_block_ids, worker_meta, stats)

    def stop(self) -> None:
        """Shut the connector down, which lets its transfers in flight end, and go on without it."""
        inner, self._inner = self._inner, NullConnectorWorker()
        self.is_stopped = True
        self._takes_messages = True  # the null connector ignores whatever it gets
        try:
            inner.shutdown()
        except NOT_CONTAINED:
            raise
        except BaseException:  # a third party's code: its failure must not stop the worker
            logger.exception("connector %s raised while it was stopped", inner.name)

    def _bind(self, metadata: KVConnectorMetadata) -> None:
        # Raised here, so that it is contained as if the connector had raised it.
        if isinstance(metadata, UndeliveredMetadata):
            raise TypeError(metadata.reason)
        if not (self._takes_messages or isinstance(metadata, EmptyMetadata)):
            # A worker in another process would see an empty message instead, and load nothing.
            raise TypeError(f"it received a {type(metadata).__name__}, and declares no metadata_type")
        self._inner.bind_connector_metadata(metadata)

    def _contain(self, error: BaseException, name: str) -> None:
        logger.error("connector %s raised on a worker and is stopped", self._inner.name, exc_info=error)
        self._step_failed = True
        self._error = f"its worker side raised {describe_raised(error)} in {name}"
        self.stop()
