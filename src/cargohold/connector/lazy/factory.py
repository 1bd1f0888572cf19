"""Makes both sides of the lazy offloading connector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cargohold.connector.lazy.config import LazyOffloadConfig
from cargohold.connector.lazy.stores import LazyStores
from cargohold.connector.offloading.factory import OffloadingFactory, scheduler_side
from cargohold.connector.offloading.make_tiers import tier_options
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.errors import ConfigError
from cargohold.offload.manager.block_pool import BlockPoolManager
from cargohold.protocol import SchedulerEnvironment, WorkerEnvironment


@dataclass(frozen=True, slots=True)
class LazyOffloadingFactory:
    """Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Loads, and the workers' side, are the eager connector's; what differs is which blocks are stored, and that the host side
    is a block pool like the device's.

    Attributes:
        config: options.
    """

    config: LazyOffloadConfig

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """The scheduler side. Raises ``ConfigError`` if the tier cannot hold a block, or nothing would ever be evicted."""
        if not environment.prefix_caching:
            raise ConfigError(
                "prefix_caching", value=False, expected="lazy offloading keeps what the prefix cache evicts"
            )
        common = self.config.common()
        num_slots = OffloadingFactory(common).num_slots(environment.layout)
        host = BlockPoolManager(num_slots, record_events=environment.emits_events)
        scheduler = scheduler_side(
            common,
            environment,
            host,
            tier_options(common, environment.layout),
            make_stores=partial(LazyStores, lookahead=self.config.lookahead(environment)),
        )
        scheduler.name = "lazy"
        return scheduler

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """The worker side: the eager connector's."""
        return OffloadingFactory(self.config.common()).make_worker_side(environment)
