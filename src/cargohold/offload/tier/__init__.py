"""Media that hold chunks."""

from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier, TierUsage
from cargohold.offload.tier.breaker import BreakerConfig, BreakerState
from cargohold.offload.tier.host import ByteRows, HostMemory
from cargohold.offload.tier.jobs import Answer, JobKind, JobStatus, TierJob, TierResult

__all__ = [
    "Answer",
    "BreakerConfig",
    "BreakerState",
    "ByteRows",
    "HostMemory",
    "JobKind",
    "JobStatus",
    "LoadOutcome",
    "StoreOutcome",
    "Tier",
    "TierJob",
    "TierResult",
    "TierUsage",
]
