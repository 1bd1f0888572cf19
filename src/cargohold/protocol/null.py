"""A connector that keeps nothing. Engines run with it when they have no connector, or when theirs was turned off."""

from __future__ import annotations

from cargohold.protocol.connector import KVConnectorScheduler, KVConnectorWorker
from cargohold.protocol.factory import ClassFactory, SchedulerEnvironment, WorkerEnvironment
from cargohold.protocol.kv_cache import BlockIds
from cargohold.protocol.messages import ConnectorMetadata, EmptyMetadata
from cargohold.protocol.request import RequestView, StepView


class NullConnectorScheduler(KVConnectorScheduler):
    """Scheduler side that finds nothing to load and stores nothing."""

    name = "null"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return ``(0, False)``: nothing can be loaded."""
        return 0, False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Do nothing: no tokens were promised, so there is no load to plan."""

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Return an empty message: there are no jobs."""
        return EmptyMetadata()


class NullConnectorWorker(KVConnectorWorker):
    """Worker side that copies nothing."""

    name = "null"

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Ignore the message."""

    def start_load_kv(self) -> None:
        """Do nothing: there is nothing to load."""

    def wait_for_save(self) -> None:
        """Do nothing: there is nothing to store."""

    def clear_connector_metadata(self) -> None:
        """Do nothing: no message was kept."""


def _make_scheduler_side(_: SchedulerEnvironment) -> NullConnectorScheduler:
    return NullConnectorScheduler()


def _make_worker_side(_: WorkerEnvironment) -> NullConnectorWorker:
    return NullConnectorWorker()


NULL_CONNECTOR = ClassFactory(_make_scheduler_side, _make_worker_side)
"""Factory of the connector that keeps nothing."""
