"""Faults of a connector itself: wrappers around its two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from cargohold.protocol import (
    BlockIds,
    ConnectorMetadata,
    FinishedTransfers,
    ForwardingScheduler,
    KVConnectorFactory,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    Stats,
    StepView,
    WorkerEnvironment,
    WorkerMetadata,
)
from cargohold.simulation.faults import Fault, FaultSource


class SimulatedMishapError(Exception):
    """What a faulty connector raises."""


class FaultyScheduler(ForwardingScheduler):
    """A scheduler side that raises now and then.

    Args:
        inner: the connector.
        source: decides when a fault strikes.
    """

    def __init__(self, inner: KVConnectorScheduler, source: FaultSource) -> None:
        super().__init__(inner)
        self._source = source

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Pass on."""
        self._maybe_raise()
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Pass on."""
        self._maybe_raise()
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
        self._maybe_raise()

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Pass on."""
        self._maybe_raise()
        metadata = self.inner.build_connector_meta(step)
        self._maybe_raise()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Pass on."""
        self._maybe_raise()
        self.inner.update_connector_output(output)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Pass on."""
        self._maybe_raise()
        return self.inner.request_finished(request, block_ids)

    def _maybe_raise(self) -> None:
        if self._source.strikes(Fault.RAISES):
            raise SimulatedMishapError("in the scheduler")


class FaultyWorker(KVConnectorWorker):
    """A worker side that raises now and then, or reports what has ended some steps late.

    Args:
        inner: the connector.
        source: decides when a fault strikes.
    """

    def __init__(self, inner: KVConnectorWorker, source: FaultSource) -> None:
        self.inner = inner
        self.name = inner.name
        self.metadata_type = inner.metadata_type
        self._source = source
        self._held_back = FinishedTransfers()
        self._steps_late = 0

    def register_kv_caches(self, kv_caches: Sequence[Any]) -> None:
        """Pass on."""
        self.inner.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Pass on."""
        self.inner.bind_connector_metadata(metadata)

    def handle_preemptions(self) -> None:
        """Pass on."""
        self._maybe_raise()
        self.inner.handle_preemptions()

    def start_load_kv(self) -> None:
        """Pass on."""
        self._maybe_raise()
        self.inner.start_load_kv()
        self._maybe_raise()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass on."""
        self.inner.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Pass on."""
        self.inner.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """Pass on."""
        self._maybe_raise()
        self.inner.wait_for_save()

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """What has ended; held back for some steps if this worker is late."""
        self._maybe_raise()
        finished = merged(self._held_back, self.inner.get_finished(finished_req_ids))
        if self._steps_late == 0 and self._source.strikes(Fault.LATE_WORKER):
            self._steps_late = self._source.random.randint(1, 4)
        if self._steps_late:
            self._steps_late -= 1
            # That this very step is not to be trusted cannot wait.
            self._held_back = replace(finished, step_failed=False)
            return FinishedTransfers(step_failed=finished.step_failed)
        self._held_back = FinishedTransfers()
        return finished

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Pass on: bad blocks are named no later than the end of their load, so earlier is right too."""
        return self.inner.get_block_ids_with_load_errors()

    def get_stats(self) -> Stats:
        """Pass on."""
        return self.inner.get_stats()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Pass on."""
        return self.inner.build_connector_worker_meta()

    def clear_connector_metadata(self) -> None:
        """Pass on."""
        self.inner.clear_connector_metadata()

    def shutdown(self) -> None:
        """Pass on."""
        self.inner.shutdown()

    def _maybe_raise(self) -> None:
        if self._source.strikes(Fault.RAISES):
            raise SimulatedMishapError("on a worker")


def merged(earlier: FinishedTransfers, later: FinishedTransfers) -> FinishedTransfers:
    """Both reports as one."""
    if earlier == FinishedTransfers():
        return later
    return replace(
        later,
        finished_sending=earlier.finished_sending | later.finished_sending,
        finished_recving=earlier.finished_recving | later.finished_recving,
        failed_recving=earlier.failed_recving | later.failed_recving,
        jobs={**earlier.jobs, **later.jobs},
        step_failed=earlier.step_failed or later.step_failed,
    )


class FaultyFactory:
    """Makes faulty sides of another factory's connectors. Satisfies ``KVConnectorFactory``.

    Args:
        inner: the other factory.
        source: decides when a fault strikes.
    """

    def __init__(self, inner: KVConnectorFactory, source: FaultSource) -> None:
        self._inner = inner
        self._source = source

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """A scheduler side; wrapped only if it may raise."""
        inner = self._inner.make_scheduler_side(environment)
        return FaultyScheduler(inner, self._source) if self._source.is_possible([Fault.RAISES]) else inner

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """A worker side; wrapped only if something may happen to it."""
        inner = self._inner.make_worker_side(environment)
        faults = (Fault.RAISES, Fault.LATE_WORKER)
        return FaultyWorker(inner, self._source) if self._source.is_possible(faults) else inner
