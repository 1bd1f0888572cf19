"""How an engine gets its connector without naming one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cargohold.protocol.connector import KVConnectorScheduler, KVConnectorWorker
from cargohold.protocol.kv_cache import AttentionKind, KVCacheLayout


class Clock(Protocol):
    """Monotonic time in seconds. Production passes ``time.monotonic``; a simulation passes its own."""

    def __call__(self) -> float:
        """Seconds since some fixed moment."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerEnvironment:
    """What the scheduler side of a connector is told of the engine it lives in.

    Attributes:
        layout: the paged KV cache.
        clock: monotonic time, for deadlines.
        max_step_tokens: tokens that one step computes at most, and so how many may need blocks at once.
        prefix_caching: whether the device pool keeps blocks for reuse. Without it, waiting for another request's load is
            pointless, for its blocks could not be shared.
        applies_locks: whether the engine applies ``report_to_scheduler``.
        emits_events: whether anyone listens to KV events.
        full_hits: whether a request may be hit as a whole. The engine then computes its last token again, for its logits, and
            does not write that token's KV a second time. Where it would, a recurrent state would take the token in twice, so
            a hit must end before the last token.
        keeps_partial_loads: whether what a failed load has brought before its first bad block is used. Where all of it is
            computed again, nothing was restored.
    """

    layout: KVCacheLayout
    clock: Clock
    max_step_tokens: int = 2048
    prefix_caching: bool = True
    applies_locks: bool = True
    emits_events: bool = False
    full_hits: bool = True
    keeps_partial_loads: bool = True

    @property
    def finds_partial_loads(self) -> bool:
        """Whether a request has something of a load that failed in part: what was kept must be found again.

        Behind a window's start nothing was loaded that a shorter hit could stand on.
        """
        is_full = all(group.kind is AttentionKind.FULL for group in self.layout.groups)
        return self.keeps_partial_loads and self.prefix_caching and is_full


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What the worker side of a connector is told of the worker it lives in.

    Attributes:
        layout: the paged KV cache.
        rank: which of the ``layout.world_size`` workers this is, from 0.
        clock: monotonic time.
    """

    layout: KVCacheLayout
    rank: int
    clock: Clock


class KVConnectorFactory(Protocol):
    """Makes the two sides. A worker may live in another process, so the factory itself must survive ``spawn``."""

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """The scheduler side. Raises ``ConfigError`` if it cannot work in this environment."""
        ...

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """The worker side of the same connector."""
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
