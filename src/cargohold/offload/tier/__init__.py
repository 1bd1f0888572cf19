"""Media that hold chunks."""

from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier, TierUsage
from cargohold.offload.tier.config import DiskTierConfig, SharedTierConfig, TierConfig
from cargohold.offload.tier.encryption import EncryptionKey
from cargohold.offload.tier.factory import check_tier, open_tier, require_packages
from cargohold.offload.tier.health import BreakerConfig, BreakerState, TierHealth
from cargohold.offload.tier.host import ByteRows, HostMemory
from cargohold.offload.tier.jobs import Answer, JobKind, JobStatus, TierJob
from cargohold.offload.tier.memory import MemoryTier, NullTier
from cargohold.offload.tier.namespace import Namespace, digest_weights
from cargohold.offload.tier.queue import QueueConfig, TierQueue
from cargohold.offload.tier.wrappers import CountingTier, FaultyTier, SlowTier

__all__ = [
    "Answer",
    "BreakerConfig",
    "BreakerState",
    "ByteRows",
    "CountingTier",
    "DiskTierConfig",
    "EncryptionKey",
    "FaultyTier",
    "HostMemory",
    "JobKind",
    "JobStatus",
    "LoadOutcome",
    "MemoryTier",
    "Namespace",
    "NullTier",
    "QueueConfig",
    "SharedTierConfig",
    "SlowTier",
    "StoreOutcome",
    "Tier",
    "TierConfig",
    "TierHealth",
    "TierJob",
    "TierQueue",
    "TierUsage",
    "check_tier",
    "digest_weights",
    "open_tier",
    "require_packages",
]
