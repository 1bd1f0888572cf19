"""The offloading connector over simulated copies and a tier that outlives engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from cargohold.cache import OffloadManager, make_manager
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler, OffloadingWorker
from cargohold.connector.offloading.lazy import LazyStores
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.shared import Shared
from cargohold.connector.offloading.stores import EagerStores, StorePlanner
from cargohold.protocol import SchedulerEnvironment, WorkerEnvironment
from cargohold.testing.simulation.transfers import ByteRows, HeldTransfers, as_array
from cargohold.transfer import TransferWorker

MakeTransfers: TypeAlias = Callable[[ByteRows, ByteRows, WorkerEnvironment], Any]
"""Makes a worker's transfers from its paged KV, its shard of the tier, and its environment."""


class SimulatedOffloading:
    """Makes offloading connectors whose copies a test controls. Satisfies ``KVConnectorFactory``.

    Engines made with the same object share one tier, as several engines share a store; it outlives them.

    Args:
        num_slots: chunks that the tier holds.
        lookahead: blocks ahead of eviction that a lazy connector copies; ``None`` for an eager one.
        make_transfers: makes the workers' transfers; by default, ``HeldTransfers``.
        wrap_manager: puts a wrapper around the manager.
        record_events: whether the manager records events, for engines that emit them.
        options: fields of ``OffloadConfig``; ``host_bytes`` means nothing here.

    Attributes:
        manager: the tier's manager.
        transfers: the transfers of every worker side made so far, in order.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        lookahead: int | None = None,
        make_transfers: MakeTransfers | None = None,
        wrap_manager: Callable[[OffloadManager], OffloadManager] = lambda manager: manager,
        record_events: bool = True,
        **options: Any,
    ) -> None:
        self.config = OffloadConfig(host_bytes=1, **options)
        self.num_slots = num_slots
        self.lookahead = lookahead
        self._make_stores: Callable[[Shared, Mapping[str, RequestState]], StorePlanner]
        self._make_stores = EagerStores if lookahead is None else partial(LazyStores, lookahead=lookahead)
        policy = self.config.policy if lookahead is None else "lru"
        self.manager = wrap_manager(make_manager(policy, num_slots, record_events=record_events))
        self.transfers: list[Any] = []
        self._make_transfers = make_transfers or held_transfers
        self._rows: dict[int, ByteRows] = {}

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """A scheduler side over the shared manager."""
        side = OffloadingScheduler(self.config, environment, self.manager, make_stores=self._make_stores)
        if self.lookahead is not None:
            side.name = "lazy"
        return side

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """A worker side over the shared memory."""

        def make_transfers(regions: Sequence[Any]) -> TransferWorker:
            rows = self.rows(environment.rank, environment.layout.block_bytes)
            transfers: TransferWorker = self._make_transfers(as_array(regions[0]), rows, environment)
            self.transfers.append(transfers)
            return transfers

        return OffloadingWorker(make_transfers)

    def open_namespace(self) -> None:
        """Make the tier empty for engines made from now on. No engine that still reads or writes may be left."""
        if not self.manager.reset():
            raise RuntimeError("somebody still writes to the tier")

    def rows(self, rank: int, row_bytes: int) -> ByteRows:
        """One worker's shard of the tier."""
        if rank not in self._rows:
            self._rows[rank] = np.zeros((self.num_slots * self.config.blocks_per_chunk, row_bytes), dtype=np.uint8)
        return self._rows[rank]


def held_transfers(region: ByteRows, rows: ByteRows, environment: WorkerEnvironment) -> HeldTransfers:
    """Transfers that carry out copies at the next poll, or only when a test says so."""
    return HeldTransfers(region, rows, environment.clock)
