"""Puts both sides of the offloading connector together for an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.connector.offloading.config import OffloadConfig
from cargohold.connector.offloading.make_tiers import open_queues, tier_options
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.stores import EagerStores, MakeStores
from cargohold.connector.offloading.tier_worker import TierWorker
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.errors import ConfigError
from cargohold.offload.manager import OffloadManager, make_manager
from cargohold.offload.tier import HostMemory
from cargohold.offload.tiering import LowerTiers, TieringConfig, TieringManager, TierOptions, random_epoch
from cargohold.offload.transfer import TransferWorker
from cargohold.protocol import KVCacheLayout, SchedulerEnvironment, WorkerEnvironment
from cargohold.units import format_bytes


def scheduler_side(
    config: OffloadConfig,
    environment: SchedulerEnvironment,
    host: OffloadManager,
    tiers: Sequence[TierOptions] = (),
    *,
    make_stores: MakeStores = EagerStores,
    new_epoch: Callable[[], bytes] = random_epoch,
) -> OffloadingScheduler:
    """Make the scheduler side over host memory, and over tiers below it if there are any.

    Args:
        config: options.
        environment: facts about the engine.
        host: the manager of host memory.
        tiers: how each tier below host memory is to be used, the fastest first.
        make_stores: makes the planner that decides which chunks are copied down; by default all, as they are computed.
        new_epoch: makes a new name at each reset; it becomes part of the chunks' names in lower tiers.
    """
    if not tiers:
        return OffloadingScheduler(config, environment, host, make_stores=make_stores)
    tiering = TieringConfig(
        num_workers=environment.layout.world_size,
        restore_timeout_s=config.restore_timeout_s,
        store_timeout_s=config.transfer_timeout_s,
        record_events=environment.emits_events,
    )
    lower = LowerTiers(host, tiers, environment.clock, tiering, new_epoch=new_epoch)
    manager = TieringManager(host, lower)
    return OffloadingScheduler(config, environment, manager, make_stores=make_stores, lower=lower)


@dataclass(frozen=True, slots=True)
class OffloadingFactory:
    """Makes the offloading connector. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        config: options.
    """

    config: OffloadConfig

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """Make the scheduler side. Raises ``ConfigError`` if host memory cannot hold a single chunk."""
        host = make_manager(
            self.config.policy, self.num_slots(environment.layout), record_events=environment.emits_events
        )
        return scheduler_side(self.config, environment, host, tier_options(self.config, environment.layout))

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """Make the worker side, with this worker's shards of the tiers. Raises ``ConfigError`` if one cannot be opened."""
        layout, per_chunk = environment.layout, self.config.blocks_per_chunk
        memory = HostMemory(self.num_slots(layout) * per_chunk, layout.block_bytes)

        def make_transfers(regions: Sequence[Any]) -> TransferWorker:
            from cargohold.offload.transfer.factory import make_transfer_worker  # noqa: PLC0415  # imports torch

            return make_transfer_worker(regions, memory, environment.clock)

        if not self.config.tiers:
            return OffloadingWorker(make_transfers)
        queues = open_queues(self.config, environment)
        return OffloadingWorker(
            make_transfers, TierWorker(queues, memory.rows, per_chunk, environment.clock, environment.rank)
        )

    def num_slots(self, layout: KVCacheLayout) -> int:
        """Return the number of slots in host memory. Raises ``ConfigError`` if it cannot hold a single chunk."""
        chunk_bytes = layout.block_bytes * layout.world_size * self.config.blocks_per_chunk
        num_slots = self.config.num_host_bytes // chunk_bytes
        if num_slots < 1:
            raise ConfigError("host_bytes", self.config.host_bytes, f"one chunk takes {format_bytes(chunk_bytes)}")
        return num_slots
