"""Makes both sides of the lazy offloading connector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from cargohold.connector.lazy.config import LazyOffloadConfig
from cargohold.connector.lazy.stores import LazyStores
from cargohold.connector.offloading.factory import OffloadingFactory, scheduler_side
from cargohold.connector.offloading.make_tiers import tier_options
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.errors import ConfigError
from cargohold.offload.manager import make_manager
from cargohold.protocol import SchedulerEnvironment, WorkerEnvironment

_NAME: Final = "lazy"
"""Name of both sides: a composed connector puts it in front of their counters."""


@dataclass(frozen=True, slots=True)
class LazyOffloadingFactory:
    """Makes the lazy offloading connector. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Loads, the worker side and the manager of host memory are those of the eager connector. What differs is which blocks are
    stored, and when.

    Attributes:
        config: options.
    """

    config: LazyOffloadConfig

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """Make the scheduler side. Raises ``ConfigError`` if host memory cannot hold a block, or prefix caching is off."""
        if not environment.prefix_caching:
            raise ConfigError(
                "prefix_caching", value=False, expected="lazy offloading keeps what the prefix cache evicts"
            )
        common = self.config.common()
        num_slots = OffloadingFactory(common).num_slots(environment.layout)
        host = make_manager(common.policy, num_slots, record_events=environment.emits_events)
        scheduler = scheduler_side(
            common,
            environment,
            host,
            tier_options(common, environment.layout),
            make_stores=partial(LazyStores, lookahead=self.config.lookahead(environment)),
        )
        scheduler.name = _NAME
        return scheduler

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """Make the worker side, which is the eager connector's under another name."""
        worker = OffloadingFactory(self.config.common()).make_worker_side(environment)
        worker.name = _NAME
        return worker
