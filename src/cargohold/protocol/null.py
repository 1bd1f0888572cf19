"""A connector that keeps nothing: what an engine runs with when there is none, or when one was turned off."""

from __future__ import annotations

from cargohold.protocol.connector import KVConnectorScheduler, KVConnectorWorker
from cargohold.protocol.factory import ClassFactory, SchedulerEnvironment, WorkerEnvironment
from cargohold.protocol.kv_cache import BlockIds
from cargohold.protocol.messages import ConnectorMetadata, EmptyMetadata
from cargohold.protocol.request import RequestView, StepView


class NullConnectorScheduler(KVConnectorScheduler):
    """Knows of nothing to load and stores nothing."""

    name = "null"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing."""
        return 0, False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Nothing was promised, so nothing is planned."""

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Nothing to do."""
        return EmptyMetadata()


class NullConnectorWorker(KVConnectorWorker):
    """Moves nothing."""

    name = "null"

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Nothing to do."""

    def start_load_kv(self) -> None:
        """Nothing to load."""

    def wait_for_save(self) -> None:
        """Nothing to store."""

    def clear_connector_metadata(self) -> None:
        """Nothing was kept."""


def _make_scheduler_side(_: SchedulerEnvironment) -> NullConnectorScheduler:
    return NullConnectorScheduler()


def _make_worker_side(_: WorkerEnvironment) -> NullConnectorWorker:
    return NullConnectorWorker()


NULL_CONNECTOR = ClassFactory(_make_scheduler_side, _make_worker_side)
"""Makes the connector that keeps nothing."""
