"""The two sides of a KV connector, as base classes with safe defaults, and the factory that makes them.

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
                                            get_transfer_results
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from cargohold.protocol.engine_view import (
    AttentionKind,
    BlockIds,
    KVCacheLayout,
    RequestView,
    SchedulerContext,
    StepView,
)
from cargohold.protocol.hints import Hint, HintEvent, HintOutcome, answers_to
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    CacheReport,
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVEvent,
)
from cargohold.protocol.metrics import Stats
from cargohold.protocol.reports import Episode, Outage, TierContents


class KVConnectorScheduler(ABC):
    """Scheduler side. Every method is called in the scheduler's thread and must not block.

    Attributes:
        name: the connector's name in log lines, metrics and errors.
        worker_metadata_type: concrete type of the metadata that its workers send back; a frozen dataclass (see
            ``KVConnectorWorkerMetadata``). Executors with workers in other processes need it to decode the metadata.
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
        """Take a new request. Raise ``RequestError`` to refuse it, for its ``kv_transfer_params`` say: only it fails."""

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Carry out what a client or router asks of the cache, as far as that is allowed.

        A hint changes no token and fails no request. It acts only on chunks of the same salt and tenant.

        Args:
            request: a request that ``on_new_request`` has announced and that has not ended; or a ``Prefix``, without a request.
            hints: what is asked.

        Returns:
            One outcome per hint, in their order. ``take_hint_events`` reports how those that go on end.
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

    def get_shared_prefix_end(self, request: RequestView) -> int:
        """Return at which of a request's tokens other requests could go on if windows and states that end there were kept.

        That is how far the groups are kept that keep all blocks; 0 if all groups are kept as far. Asked after
        ``get_num_new_matched_tokens`` has answered. An engine may then end a step there, and keep what ends there in its
        prefix cache.
        """
        return 0

    def expect_tokens(self, request: RequestView, num_tokens: int) -> None:  # noqa: B027  # a default, not an omission
        """Note that another connector may load a request's first ``num_tokens`` tokens, into blocks that are allocated now.

        Called right after ``get_num_new_matched_tokens``, whether that was asked here or not.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Plan the load of ``num_external_tokens`` into ``blocks``, the whole block tables that the request was allocated.

        Decide by ``num_external_tokens``, not by ``blocks``: 0 means that nothing is to be loaded. For an asynchronous load
        this method is called a second time, with 0, when the loaded request starts to run.
        """

    @abstractmethod
    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Return the message to the workers for this step, with its jobs. Called once in every step.

        The connector starts over to collect jobs for the next step. ``step`` is read-only. A store planned here may read
        blocks that this very step writes, so workers start it after the forward pass.
        """

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027  # a default, not an omission
        """Process the transfers that finished or failed, over all workers. Called after each step whose output is not empty."""

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Return the blocks to lock and to unlock; ``None`` if there are none.

        Called after every step, right after ``update_connector_output`` if that is called. Locks are references: they survive
        the request. Unlocking a block that this connector has not locked is an error.
        """
        return None

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Note that a request ended, and how: ``request.turn_end``. Called once, before its blocks are freed.

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

    def on_pause(self, request_ids: Iterable[str]) -> None:  # noqa: B027  # a default, not an omission
        """Note that these requests are paused, and that the engine may forget what the device holds before they go on.

        May be called again during the same pause. Steps without tokens follow while ``has_pending_work`` is true.
        """

    def give_up_transfers(self) -> None:  # noqa: B027  # a default, not an omission
        """Let go of every block that a store reads, at once: what is copied from them is void, and must never be found.

        Loads are void, too: their requests use nothing of them. Hold the blocks that they fill until they have ended.

        Called when the engine forgets what its blocks hold, before ``reset_cache`` if that follows.
        """

    def reset_cache(self) -> bool:
        """Drop all chunks kept. Return ``False`` if a transfer in flight forbids it: some or all may then still be found."""
        return True

    def use_weights(self, name: str) -> bool:
        """Note that the model computes with these weights from now on, whose KV must be kept apart from that of all others.

        Called after the engine has forgotten what its blocks hold, before anything is computed. By default, all is dropped.

        Args:
            name: equal for equal weights; empty for those with which the engine has started, which its model's files have. If
                the engine ``keeps_weights``, made of what they are, so that it is the same after a restart.

        Returns:
            ``False`` if a transfer in flight forbids it: call it again, and do not look up or store anything until then.
        """
        return self.reset_cache()

    def get_kv_connector_stats(self) -> Stats:
        """Counters since the last call; see ``Stats``."""
        return {}

    def get_outages(self) -> Sequence[Outage]:
        """Return what of it is out of use now, because it has failed: for people, who see it in metrics and on pages."""
        return ()

    def get_contents(self) -> Sequence[TierContents]:
        """Return what it keeps, tier by tier: for people, who ask a few times a minute.

        Called between two steps, so it must be cheap: it walks over no tier, and the number of prefixes that it reports is
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
            ``KVConnectorMetadata``). Executors with workers in other processes need it to decode the metadata.
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

    def unregister_kv_caches(self) -> None:  # noqa: B027  # a default, not an omission
        """Touch the paged KV memory no more from when this returns: the device sleeps. May be called again. Steps may come."""

    def restore_kv_caches(self) -> None:  # noqa: B027  # a default, not an omission
        """Use the same tensors again: their memory is there, wherever it is, and holds anything. May be called again."""

    @abstractmethod
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
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

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        """Return the asynchronous transfers that ended since the last call.

        Args:
            finished_req_ids: requests that ended since the last step, as the scheduler saw it.
        """
        return NOTHING_ENDED

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Return the ids of blocks whose load failed since the last call."""
        return frozenset()

    def get_kv_connector_stats(self) -> Stats:
        """Return counters since the last call; see ``Stats``."""
        return {}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this step's message to the scheduler side, opaque to the engine; ``None`` if there is none."""
        return None

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """Forget this step's message. The last call in every step, whatever happened before."""

    def shutdown(self) -> None:  # noqa: B027  # a default, not an omission
        """Wait for the transfers in flight, then release all memory, files and threads. Called once."""


class Clock(Protocol):
    """Monotonic time in seconds. Production passes ``time.monotonic``; a simulation passes its own."""

    def __call__(self) -> float:
        """Seconds since some fixed moment."""


@dataclass(frozen=True, slots=True)
class SchedulerEnvironment:
    """Facts about the engine, for the scheduler side of a connector.

    Attributes:
        layout: the paged KV cache.
        clock: monotonic time, for deadlines.
        max_step_tokens: maximum number of tokens that one step computes, so the maximum that may need blocks at once.
        max_num_seqs: maximum number of requests that run at the same time; ``None`` if the engine does not say.
        prefix_caching: whether the device pool keeps blocks for reuse. Without it, waiting for another request's load is
            pointless, because the blocks of that request could not be shared.
        shares_loads: whether the device pool keeps all blocks that were loaded for one request where others can find them.
        shares_load_ends: whether it keeps at least those with which others can continue where the load ends. Without it and
            ``shares_loads``, waiting for another request's load is pointless even with ``prefix_caching``.
        applies_locks: whether the engine applies the answers of ``report_to_scheduler``.
        emits_events: whether anyone listens to KV events.
        emits_salted_events: whether that includes events of salted requests' blocks.
        full_hits: whether a hit may cover all tokens of a request. The engine then computes the last token again, for its
            logits, without writing that token's KV a second time. ``False`` for an engine that would write it: a recurrent
            state would take the token in twice, so a hit must end before the last token.
        keeps_partial_loads: whether the engine uses the blocks that a failed load has filled before its first bad block. If
            not, it computes all tokens of that load again, and none of them counts as restored.
        give_up_loads_after_s: seconds after which a load may be reported as failed although its copy has not ended, if the
            connector holds its blocks by ``touch`` or locks: the engine then computes the tokens in other blocks. ``None`` if
            the engine would use the same blocks: then a load must not be reported before its copy has ended.
        loads_in_step: whether a request with a load that is not asynchronous is computed in the very step that begins the load.
        keeps_weights: whether chunks of weights that are not those of the model's files may outlive the engine, to be found
            when a later one is given the same weights.
        local_hashes: how those block hashes begin that only this process knows, such as of pictures that clients have named
            instead of hashed: chunks of such blocks stay in host memory. Empty if there are none.
        observe: called with what the connector did for a request, once that is over; ``None`` without an observer. It must not
            raise.
    """

    layout: KVCacheLayout
    clock: Clock
    max_step_tokens: int = 2048
    max_num_seqs: int | None = None
    prefix_caching: bool = True
    shares_loads: bool = True
    shares_load_ends: bool = True
    applies_locks: bool = True
    emits_events: bool = False
    emits_salted_events: bool = False
    full_hits: bool = True
    keeps_partial_loads: bool = True
    give_up_loads_after_s: float | None = None
    loads_in_step: bool = False
    keeps_weights: bool = False
    local_hashes: bytes = b""
    observe: Callable[[Episode], None] | None = None

    @property
    def finds_partial_loads(self) -> bool:
        """Whether a request can use the first blocks of a load that failed in part.

        The request finds them again in the prefix cache, so that must be on. All groups must be full attention: of a window
        group only the blocks of the last window are loaded, and a shorter hit would need earlier ones.
        """
        is_full = all(group.kind is AttentionKind.FULL for group in self.layout.groups)
        return self.keeps_partial_loads and self.prefix_caching and is_full


class Exchange(Protocol):
    """Lets the workers that hold the same shard tell each other something. All of them call it, equally often."""

    def __call__(self, message: bytes) -> Sequence[bytes]:
        """Wait for the messages of all of them, and return these in the order of their ranks."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Facts about a worker, for the worker side of a connector.

    Attributes:
        layout: the paged KV cache.
        rank: number of this worker, from 0 to ``layout.world_size - 1``.
        clock: monotonic time.
        exchange: with which the workers that hold the same shard talk while they start; ``None`` if no others hold it.
    """

    layout: KVCacheLayout
    rank: int
    clock: Clock
    exchange: Exchange | None = None


class KVConnectorFactory(Protocol):
    """Makes the two sides of a connector. It must be picklable, for ``spawn``: a worker may live in another process."""

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Make the scheduler side. Raises ``ConfigError`` if it cannot work in this environment."""

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Make the worker side of the same connector, for one worker."""


@dataclass(frozen=True, slots=True)
class ClassFactory:
    """A factory from two callables: enough for a connector whose classes need nothing but their environment.

    Attributes:
        scheduler_side: called with the ``SchedulerEnvironment``.
        worker_side: called with the ``WorkerEnvironment``.
    """

    scheduler_side: Callable[[SchedulerEnvironment], KVConnectorScheduler] = field()
    worker_side: Callable[[WorkerEnvironment], KVConnectorWorker] = field()

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Call ``scheduler_side``."""
        return self.scheduler_side(environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Call ``worker_side``."""
        return self.worker_side(environment)


# --- a connector that keeps nothing -----------------------------------------------------------------------------------


class NullConnectorScheduler(KVConnectorScheduler):
    """Scheduler side that finds nothing to load and stores nothing."""

    name = "null"

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return ``(0, False)``: nothing can be loaded."""
        return 0, False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Do nothing: no tokens were promised, so there is no load to plan."""

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Return an empty message: there are no jobs."""
        return EmptyMetadata()


class NullConnectorWorker(KVConnectorWorker):
    """Worker side that copies nothing."""

    name = "null"

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
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
