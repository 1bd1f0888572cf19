"""Media that hold chunks."""

from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier, TierUsage
from cargohold.offload.tier.breaker import BreakerConfig, BreakerState
from cargohold.offload.tier.health import QueueConfig, TierHealth, TierState
from cargohold.offload.tier.host import ByteRows, HostMemory
from cargohold.offload.tier.jobs import Answer, JobKind, JobStatus, TierJob, TierResult
from cargohold.offload.tier.memory import MemoryTier, NullTier
from cargohold.offload.tier.queue import TierQueue
from cargohold.offload.tier.wrappers import CountingTier, FaultyTier, SlowTier

__all__ = [
    "Answer",
    "BreakerConfig",
    "BreakerState",
    "ByteRows",
    "CountingTier",
    "FaultyTier",
    "HostMemory",
    "JobKind",
    "JobStatus",
    "LoadOutcome",
    "MemoryTier",
    "NullTier",
    "QueueConfig",
    "SlowTier",
    "StoreOutcome",
    "Tier",
    "TierHealth",
    "TierJob",
    "TierQueue",
    "TierResult",
    "TierState",
    "TierUsage",
]
