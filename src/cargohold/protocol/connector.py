"""The two sides of a KV connector, as base classes with safe defaults.

A connector keeps KV blocks somewhere else and brings them back. It comes as two classes: the *scheduler side* lives in the
scheduler's thread, one per engine replica, and decides; the *worker side* lives in each worker and moves bytes. They talk
only through messages that ride on the engine's own step messages.

One step, as the engine runs it::

    scheduler side                          worker side, in every step, also without tokens and when the forward raises
    --------------                          --------------------------------------------------------------------------
    get_num_new_matched_tokens  (a request
    update_state_after_alloc     waits)
    build_connector_meta        ------->    bind_connector_metadata
                                            handle_preemptions
                                            start_load_kv
                                              (forward: per layer wait_for_layer_load, save_kv_layer)
                                            wait_for_save
                                            get_finished
                                            get_block_ids_with_load_errors
                                            build_connector_worker_meta
    update_connector_output     <-------    clear_connector_metadata
    report_to_scheduler
    request_finished            (a request ended)
    take_events

``on_hints`` comes when a client gives hints: right after ``on_new_request``, or between two steps.

A connector must never cause a wrong token; it may answer "nothing here" at any time. Any exception that it raises is
contained: the engine turns the connector off with one log line and goes on without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from cargohold.protocol.contents import TierContents
from cargohold.protocol.hints import Hint, HintEvent, HintOutcome, answers_to
from cargohold.protocol.kv_cache import BlockIds
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    CacheReport,
    ConnectorMetadata,
    EmptyMetadata,
    FinishedTransfers,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    KVEvent,
    WorkerMetadata,
)
from cargohold.protocol.request import RequestView, SchedulerContext, StepView
from cargohold.protocol.stats import Outage, Stats


class KVConnectorScheduler(ABC):
    """Scheduler side. Every method is called in the scheduler's thread and must not block.

    Attributes:
        name: the connector's name in log lines, metrics and errors.
        worker_metadata_type: concrete type of the metadata that its workers send back; a frozen dataclass (see
            ``WorkerMetadata``). Executors with workers in other processes need it to decode the metadata.
    """

    name: str = "connector"
    worker_metadata_type: type = EmptyMetadata

    def bind_scheduler_context(self, context: SchedulerContext) -> None:  # noqa: B027  # a default, not an omission
        """Take the engine's view of its block pool. Called once, before any request; never called by engines without one.

        The default ignores the context. A connector that keeps it may ``touch`` blocks while it copies them. Without a
        context, a connector protects them with the locks of ``report_to_scheduler`` or, as a last resort, by returning
        ``True`` from ``request_finished``.
        """

    def on_new_request(self, request: RequestView) -> None:  # noqa: B027  # a default, not an omission
        """Learn of a new request. Raise ``RequestError`` to refuse it, for its ``kv_transfer_params`` say: only it fails."""

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Carry out what a client or router asks of the cache, as far as that is allowed.

        A hint changes no token and fails no request. It acts only on chunks of the same salt and tenant.

        Args:
            request: a request that ``on_new_request`` has announced and that has not ended; or a ``Prefix``, without a request.
            hints: what is asked.

        Returns:
            One outcome per hint, in their order. What becomes of those that go on is told by ``take_hint_events``.
        """
        return answers_to(hints, reason=f"the connector {self.name} takes no hints")

    def take_hint_events(self) -> Iterable[HintEvent]:
        """Return how hints have ended since the last call: each that was accepted, clipped or deferred ends once."""
        return ()

    @abstractmethod
    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the ``num_computed_tokens`` already in the device pool can be loaded.

        Called every time the scheduler considers a waiting request, so it must be cheap and repeatable: it may change nothing
        that the engine or other requests can observe. Count only whole chunks that can be loaded now. The number plus
        ``num_computed_tokens`` may reach ``request.num_tokens``, but not exceed it.

        Returns:
            The number, and whether the load is asynchronous (the request waits for it outside the running batch).
            ``(None, False)`` means "not known yet": the request stays at the front of the queue, and is asked for again later.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Plan the load of ``num_external_tokens`` into ``blocks``, the whole block tables that the request was allocated.

        Decide by ``num_external_tokens``, not by ``blocks``: 0 means that nothing is to be loaded. For an asynchronous load
        this method is called a second time, with 0, when the loaded request starts to run.
        """

    @abstractmethod
    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Return the message to the workers for this step, with its jobs. Called once in every step.

        The connector starts anew to collect jobs for the next step. ``step`` is read-only. A store planned here may read
        blocks that this very step writes, so workers start it after the forward pass.
        """

    def update_connector_output(self, output: KVConnectorOutput) -> None:  # noqa: B027  # a default, not an omission
        """Learn which transfers finished or failed, over all workers. Called after each step whose output is not empty."""

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Return the blocks to lock and to unlock; ``None`` if there are none.

        Called after every step, right after ``update_connector_output`` if that is called. Locks are references: they survive
        the request. Unlocking a block that this connector has not locked is an error.
        """
        return None

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Learn that a request ended or was aborted. Called once, before its blocks are freed.

        Returns:
            Whether to keep the blocks until the workers report the request id in ``finished_sending``, and the parameters
            that go back to the client with the response, or ``None``.
        """
        return False, None

    def explain(self, request_id: str) -> CacheReport:
        """Return why the request hit or missed. Called once, when the request ends, right after ``request_finished``."""
        return CacheReport()

    def take_events(self) -> Iterable[KVEvent]:
        """Return the KV events since the last call, in order."""
        return ()

    def has_pending_work(self) -> bool:
        """Whether transfers or locks are pending: the engine then keeps stepping, with empty batches if need be."""
        return False

    def num_stuck_references(self) -> int:
        """Return how many of the references that it holds on blocks are for copies that did not end in time.

        They are given back when such a copy has ended, which may be never: the engine does not step on for that.
        """
        return 0

    def reset_cache(self) -> bool:
        """Drop all chunks kept. Return ``False`` if a transfer in flight forbids it: some or all may then still be found."""
        return True

    def get_stats(self) -> Stats:
        """Counters since the last call; see ``Stats``."""
        return {}

    def get_outages(self) -> Sequence[Outage]:
        """Return what of it is out of use now, because it has failed: for people, who see it in metrics and on pages."""
        return ()

    def get_contents(self) -> Sequence[TierContents]:
        """Return what it keeps, tier by tier: for people, who ask a few times a minute.

        Called between two steps, so it must be cheap: it walks over no tier, and the number of prefixes that it tells of is
        limited. It changes nothing, and has no prompt in it.
        """
        return ()

    def get_finished_count(self) -> int | None:
        """Return how many workers must report an id before it counts as finished; ``None`` for all of them."""
        return None

    def shutdown(self) -> None:  # noqa: B027  # a default, not an omission
        """Release all memory, files and threads. Called once; no other method is called after it."""


class KVConnectorWorker(ABC):
    """Worker side. Every method is called in the worker's thread, in the order of the module's drawing.

    Attributes:
        name: the connector's name in log lines, metrics and errors.
        metadata_type: concrete type of the metadata that its scheduler side sends; a frozen dataclass (see
            ``ConnectorMetadata``). Executors with workers in other processes need it to decode the metadata.
    """

    name: str = "connector"
    metadata_type: type = EmptyMetadata

    def register_kv_caches(self, kv_caches: Sequence[Any]) -> None:  # noqa: B027  # a default, not an omission
        """Take the paged KV memory. Called once, before the first step.

        Args:
            kv_caches: per KV-cache group, a sequence of *regions*: two-dimensional ``uint8`` tensors of shape
                ``(num_blocks, region_bytes)`` with unit stride along the second dimension. Row ``block_id`` of all regions
                together is the block. Groups may share regions. The tensors are the engine's own memory: reading and writing
                them reads and writes the cache.
        """

    @abstractmethod
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Take this step's message from the scheduler side."""

    def handle_preemptions(self) -> None:  # noqa: B027  # a default, not an omission
        """Finish or abandon copies that read blocks of preempted requests: this step may overwrite them after this returns."""

    @abstractmethod
    def start_load_kv(self) -> None:
        """Start this step's loads. Synchronous loads of a layer must be complete when its ``wait_for_layer_load`` returns."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027  # a default, not an omission
        """Wait until this layer's synchronous loads are complete. Called before the layer's attention reads its KV."""

    def save_kv_layer(self, layer_name: str) -> None:  # noqa: B027  # a default, not an omission
        """Start layer-wise stores of this layer, if there are any. Called after the layer's KV of this step is written."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Start this step's stores; wait only for those that cannot run in the background. Called after the forward pass."""

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """Return the asynchronous transfers that ended since the last call.

        Args:
            finished_req_ids: requests that ended since the last step, as the scheduler saw it.
        """
        return NOTHING_ENDED

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Return the ids of blocks whose load failed since the last call."""
        return frozenset()

    def get_stats(self) -> Stats:
        """Return counters since the last call; see ``Stats``."""
        return {}

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Return this step's message to the scheduler side, opaque to the engine; ``None`` if there is none."""
        return None

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """Forget this step's message. The last call in every step, whatever happened before."""

    def shutdown(self) -> None:  # noqa: B027  # a default, not an omission
        """Wait for the transfers in flight, then release all memory, files and threads. Called once."""


# --- a scheduler side that forwards every call to another -------------------------------------------------------------


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

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:  # noqa: D102
        return self.inner.on_hints(request, hints)

    def take_hint_events(self) -> Iterable[HintEvent]:  # noqa: D102
        return self.inner.take_hint_events()

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

    def get_outages(self) -> Sequence[Outage]:  # noqa: D102
        return self.inner.get_outages()

    def get_contents(self) -> Sequence[TierContents]:  # noqa: D102
        return self.inner.get_contents()

    def get_finished_count(self) -> int | None:  # noqa: D102
        return self.inner.get_finished_count()

    def shutdown(self) -> None:  # noqa: D102
        self.inner.shutdown()
