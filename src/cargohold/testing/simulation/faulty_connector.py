"""Faults of a connector itself: wrappers around its two sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import wraps
from inspect import isfunction
from typing import Any, Final, Protocol, TypeVar

from cargohold.protocol import (
    ConnectorMetadata,
    FinishedTransfers,
    ForwardingScheduler,
    KVConnectorFactory,
    KVConnectorScheduler,
    KVConnectorWorker,
    SchedulerEnvironment,
    Stats,
    WorkerEnvironment,
    WorkerMetadata,
)
from cargohold.testing.simulation.faults import Fault, FaultSource


class SimulatedMishapError(Exception):
    """The exception that a faulty connector raises."""


_START_AND_END: Final = frozenset({"bind_scheduler_context", "get_finished_count", "register_kv_caches", "shutdown"})
"""Hooks that are not called in steps. A connector that raises there is refused at start, or has ended anyhow."""


class _Side(Protocol):
    def maybe_raise(self) -> None:
        """Raise ``SimulatedMishapError`` if ``Fault.RAISES`` strikes."""


T = TypeVar("T", bound=_Side)


def _raises_around(contract: type) -> Callable[[type[T]], type[T]]:
    """Class decorator: lets a side raise before and after every hook that steps call."""

    def around(hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def call(self: T, *args: Any) -> Any:
            self.maybe_raise()
            answer = hook(self, *args)
            self.maybe_raise()
            return answer

        return call

    def decorate(side: type[T]) -> type[T]:
        for name, hook in vars(contract).items():
            if isfunction(hook) and name not in _START_AND_END:
                setattr(side, name, around(getattr(side, name)))
        return side

    return decorate


@_raises_around(KVConnectorScheduler)
class FaultyScheduler(ForwardingScheduler):
    """A scheduler side that raises now and then.

    Args:
        inner: the connector.
        source: decides when a fault strikes.
    """

    def __init__(self, inner: KVConnectorScheduler, source: FaultSource) -> None:
        super().__init__(inner)
        self._source = source

    def maybe_raise(self) -> None:
        """Raise, if that fault strikes."""
        if self._source.strikes(Fault.RAISES):
            raise SimulatedMishapError("in the scheduler")


@_raises_around(KVConnectorWorker)
class FaultyWorker(KVConnectorWorker):
    """A worker side that raises now and then, or reports ended transfers some steps late.

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
        self.inner.handle_preemptions()

    def start_load_kv(self) -> None:
        """Pass on."""
        self.inner.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass on."""
        self.inner.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Pass on."""
        self.inner.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """Pass on."""
        self.inner.wait_for_save()

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """Pass on; if this worker is late, the report is held back for some steps."""
        finished = merged(self._held_back, self.inner.get_finished(finished_req_ids))
        if self._steps_late == 0 and self._source.strikes(Fault.LATE_WORKER):
            self._steps_late = self._source.random.randint(1, 4)
        if self._steps_late:
            self._steps_late -= 1
            # The report that this very step has failed cannot wait.
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

    def maybe_raise(self) -> None:
        """Raise, if that fault strikes."""
        if self._source.strikes(Fault.RAISES):
            raise SimulatedMishapError("on a worker")


def merged(earlier: FinishedTransfers, later: FinishedTransfers) -> FinishedTransfers:
    """Merge two reports of a worker, the earlier one first."""
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
