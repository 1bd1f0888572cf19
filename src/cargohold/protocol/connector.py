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

What a connector must never do is make a token wrong: it may answer "nothing here" at any time. Whatever it raises is
contained: the engine turns it off with one log line and goes on without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from cargohold.protocol.context import SchedulerContext
from cargohold.protocol.events import KVEvent
from cargohold.protocol.kv_cache import BlockIds
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    CacheReport,
    ConnectorMetadata,
    EmptyMetadata,
    FinishedTransfers,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    Stats,
    WorkerMetadata,
)
from cargohold.protocol.request import RequestView, StepView


class KVConnectorScheduler(ABC):
    """Scheduler side. Every method is called in the scheduler's thread and must not block.

    Attributes:
        name: how log lines, metrics and errors call it.
        worker_metadata_type: concrete type of what its workers send back; a frozen dataclass (see ``WorkerMetadata``).
            Executors with workers in other processes decode by it.
    """

    name: str = "connector"
    worker_metadata_type: type = EmptyMetadata

    def bind_scheduler_context(self, context: SchedulerContext) -> None:  # noqa: B027  # a default, not an omission
        """Take the view of the block pool. Called once, before any request; never called where an engine has none.

        The default ignores it. A connector that keeps it may ``touch`` blocks to protect what it copies; without it the same
        is reached with ``report_to_scheduler`` or, last, by answering ``True`` from ``request_finished``.
        """

    def on_new_request(self, request: RequestView) -> None:  # noqa: B027  # a default, not an omission
        """A request arrived. Raise ``RequestError`` to refuse it (for its ``kv_transfer_params``, say): it alone fails."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the ``num_computed_tokens`` already in the device pool can be loaded.

        Asked every time the scheduler considers a waiting request, so it must be cheap and repeatable: nothing that others
        can observe may change. Only whole chunks that are really there count, and the sum may reach ``num_tokens``.

        Returns:
            The number, and whether the load is asynchronous (the request waits for it outside the running batch).
            ``(None, False)`` means "not known yet": the request goes back to the front of the queue and is asked again.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """The scheduler allocated ``blocks`` (the request's whole tables); plan the load of ``num_external_tokens`` into them.

        Decide by ``num_external_tokens``, not by ``blocks``: 0 means that nothing is to be loaded. For an asynchronous load it
        is called a second time, with 0, when the loaded request starts to run.
        """

    @abstractmethod
    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """The jobs for the workers in this step. Called in every step; resets what was collected for it; ``step`` is read-only.

        A store planned here may read blocks that this very step writes, so workers start it after the forward pass.
        """

    def update_connector_output(self, output: KVConnectorOutput) -> None:  # noqa: B027  # a default, not an omission
        """Learn what finished or failed, over all workers. Called after each step that returned something."""

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Blocks to lock and to unlock. Called after every step, right after ``update_connector_output`` where that is called.

        Locks are references: they survive the request. Unlocking what this connector has not locked is an error.
        """
        return None

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """A request ended, by itself or aborted. Called once, before its blocks are freed.

        Returns:
            ``True`` to keep the blocks until the request id comes back in ``finished_sending``, and parameters that go back
            to the client with the response.
        """
        return False, None

    def explain(self, request_id: str) -> CacheReport:
        """Why the request hit or missed. Called once, when the request ends, right after ``request_finished``."""
        return CacheReport()

    def take_events(self) -> Iterable[KVEvent]:
        """KV events since the last call, in order."""
        return ()

    def has_pending_work(self) -> bool:
        """True while transfers or locks are pending: the engine then keeps stepping, with empty batches if need be."""
        return False

    def reset_cache(self) -> bool:
        """Drop everything kept. ``False`` if something in flight forbids it: then all or part of it may still be found."""
        return True

    def get_stats(self) -> Stats:
        """Counters since the last call; see ``Stats``."""
        return {}

    def get_finished_count(self) -> int | None:
        """Workers that must report an id before it counts as finished; ``None`` for all of them."""
        return None

    def shutdown(self) -> None:  # noqa: B027  # a default, not an omission
        """Let go of everything. Called once; no other method is called after it."""


class KVConnectorWorker(ABC):
    """Worker side. Every method is called in the worker's thread, in the order of the module's drawing.

    Attributes:
        name: how log lines, metrics and errors call it.
        metadata_type: concrete type of what its scheduler side sends; a frozen dataclass (see ``ConnectorMetadata``).
            Executors with workers in other processes decode by it.
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
        """Blocks of preempted requests may be overwritten after this returns: finish or abandon copies that read them."""

    @abstractmethod
    def start_load_kv(self) -> None:
        """Start this step's loads. A synchronous load must have arrived when ``wait_for_layer_load`` returns."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027  # a default, not an omission
        """Called before a layer's attention reads its KV: return when this layer's synchronous loads have arrived."""

    def save_kv_layer(self, layer_name: str) -> None:  # noqa: B027  # a default, not an omission
        """Called after a layer's KV of this step is written: a layer-wise store may start to read it."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """The forward pass is over: start this step's stores, and wait only for those that cannot go on in the background."""

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """Asynchronous transfers that ended since the last call.

        Args:
            finished_req_ids: requests that ended since the last step, as the scheduler saw it.
        """
        return NOTHING_ENDED

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Blocks whose load failed since the last call."""
        return frozenset()

    def get_stats(self) -> Stats:
        """Counters since the last call."""
        return {}

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """This step's opaque message to the scheduler side."""
        return None

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """Forget this step's message. Last in every step, whatever happened before."""

    def shutdown(self) -> None:  # noqa: B027  # a default, not an omission
        """Wait for what is in flight, then let go of everything. Called once."""
