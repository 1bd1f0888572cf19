"""The factory through which an engine gets its connector without naming one, and the facts that it gives to both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cargohold.protocol.connector import KVConnectorScheduler, KVConnectorWorker
from cargohold.protocol.kv_cache import AttentionKind, BlockIds, KVCacheLayout
from cargohold.protocol.messages import ConnectorMetadata, EmptyMetadata
from cargohold.protocol.request import RequestView, StepView
from cargohold.protocol.stats import Episode


class Clock(Protocol):
    """Monotonic time in seconds. Production passes ``time.monotonic``; a simulation passes its own."""

    def __call__(self) -> float:
        """Seconds since some fixed moment."""
        ...


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
        observe: called with what the connector did for a request, once that is over; ``None`` if nobody observes. It must not
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
    observe: Callable[[Episode], None] | None = None

    @property
    def finds_partial_loads(self) -> bool:
        """Whether a request can use the first blocks of a load that failed in part.

        The request finds them again in the prefix cache, so that must be on. All groups must be full attention: of a window
        group only the blocks of the last window are loaded, and a shorter hit would need earlier ones.
        """
        is_full = all(group.kind is AttentionKind.FULL for group in self.layout.groups)
        return self.keeps_partial_loads and self.prefix_caching and is_full


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Facts about a worker, for the worker side of a connector.

    Attributes:
        layout: the paged KV cache.
        rank: number of this worker, from 0 to ``layout.world_size - 1``.
        clock: monotonic time.
    """

    layout: KVCacheLayout
    rank: int
    clock: Clock


class KVConnectorFactory(Protocol):
    """Makes the two sides of a connector. It must be picklable, for ``spawn``: a worker may live in another process."""

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Make the scheduler side. Raises ``ConfigError`` if it cannot work in this environment."""
        ...

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Make the worker side of the same connector, for one worker."""
        ...


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
