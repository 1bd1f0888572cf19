"""A scheduler side that forwards every call to another, as a base class for wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cargohold.protocol.connector import KVConnectorScheduler
from cargohold.protocol.context import SchedulerContext
from cargohold.protocol.events import KVEvent
from cargohold.protocol.kv_cache import BlockIds
from cargohold.protocol.messages import (
    CacheReport,
    ConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    Stats,
)
from cargohold.protocol.request import RequestView, StepView


class ForwardingScheduler(KVConnectorScheduler):
    """Passes every call on to an inner connector. Subclasses override the methods that they change.

    Args:
        inner: the connector that answers.
    """

    def __init__(self, inner: KVConnectorScheduler) -> None:
        self.inner = inner
        self.name = inner.name
        self.worker_metadata_type = inner.worker_metadata_type

    def bind_scheduler_context(self, context: SchedulerContext) -> None:  # noqa: D102
        self.inner.bind_scheduler_context(context)

    def on_new_request(self, request: RequestView) -> None:  # noqa: D102
        self.inner.on_new_request(request)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: D102
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:  # noqa: D102
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:  # noqa: D102
        return self.inner.build_connector_meta(step)

    def update_connector_output(self, output: KVConnectorOutput) -> None:  # noqa: D102
        self.inner.update_connector_output(output)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:  # noqa: D102
        return self.inner.report_to_scheduler()

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:  # noqa: D102
        return self.inner.request_finished(request, block_ids)

    def explain(self, request_id: str) -> CacheReport:  # noqa: D102
        return self.inner.explain(request_id)

    def take_events(self) -> Iterable[KVEvent]:  # noqa: D102
        return self.inner.take_events()

    def has_pending_work(self) -> bool:  # noqa: D102
        return self.inner.has_pending_work()

    def num_stuck_references(self) -> int:  # noqa: D102
        return self.inner.num_stuck_references()

    def reset_cache(self) -> bool:  # noqa: D102
        return self.inner.reset_cache()

    def get_stats(self) -> Stats:  # noqa: D102
        return self.inner.get_stats()

    def get_finished_count(self) -> int | None:  # noqa: D102
        return self.inner.get_finished_count()

    def shutdown(self) -> None:  # noqa: D102
        self.inner.shutdown()
