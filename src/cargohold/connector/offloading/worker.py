"""The offloading connector's worker side: the kernel's, with the messages of lower tiers."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.connector.kernel.jobs import OffloadingMetadata
from cargohold.connector.kernel.worker import KernelWorker
from cargohold.tiers.messages import TierMessage


@dataclass(frozen=True, slots=True)
class TieredMetadata(OffloadingMetadata):
    """One step's jobs, and the message to the worker's part of lower tiers: processes decode this type."""

    worker_message: TierMessage | None = None


class OffloadingWorker(KernelWorker):
    """Moves blocks between one worker's paged KV and its shard of host memory, and chunks between that and lower tiers."""

    metadata_type = TieredMetadata
