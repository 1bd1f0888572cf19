"""The offloading connector over simulated copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cargohold.connector.lazy.stores import LazyStores
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler, OffloadingWorker
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.shared import Shared
from cargohold.connector.offloading.stores import EagerStores, StorePlanner
from cargohold.offload.manager import OffloadManager, make_manager
from cargohold.offload.manager.block_pool import BlockPoolManager
from cargohold.offload.transfer import TransferWorker
from cargohold.protocol import SchedulerEnvironment, WorkerEnvironment
from cargohold.simulation.transfers import ByteRows, HeldTransfers


class SimulatedOffloading:
    """Makes offloading connectors whose copies a test controls. Satisfies ``KVConnectorFactory``.

    Engines made with the same object share one tier, as several engines share a store.

    Args:
        num_slots: chunks that the tier holds.
        lookahead: blocks ahead of eviction that a lazy connector keeps safe; ``None`` for an eager one.
        options: fields of ``OffloadConfig``; ``host_bytes`` means nothing here.

    Attributes:
        manager: what the tier holds.
        transfers: the copies of each worker made so far, in order.
    """

    def __init__(self, num_slots: int, *, lookahead: int | None = None, **options: Any) -> None:
        self.config = OffloadConfig(host_bytes=1, **options)
        self.num_slots = num_slots
        self.manager: OffloadManager
        self._make_stores: Callable[[Shared, Mapping[str, RequestState]], StorePlanner]
        if lookahead is None:
            self.manager = make_manager(self.config.policy, num_slots, record_events=True)
            self._make_stores = EagerStores
        else:
            self.manager = BlockPoolManager(num_slots, record_events=True)
            self._make_stores = partial(LazyStores, lookahead=lookahead)
        self.transfers: list[HeldTransfers] = []
        self._rows: ByteRows | None = None

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """A scheduler side over the shared manager."""
        return OffloadingScheduler(self.config, environment, self.manager, make_stores=self._make_stores)

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """A worker side over the shared memory."""

        def make_transfers(regions: Sequence[Any]) -> TransferWorker:
            if self._rows is None:
                num_rows = self.num_slots * self.config.blocks_per_chunk
                self._rows = np.zeros((num_rows, environment.layout.block_bytes), dtype=np.uint8)
            transfers = HeldTransfers(regions[0], self._rows, environment.clock)
            self.transfers.append(transfers)
            return transfers

        return OffloadingWorker(make_transfers)
