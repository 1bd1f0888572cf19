"""Media that hold chunks."""

from cargohold.tiers.config import Opening, TierConfig, tier_names
from cargohold.tiers.disk.kind import DiskTierConfig
from cargohold.tiers.encryption import EncryptionKey
from cargohold.tiers.health import BreakerConfig, BreakerState, TierHealth
from cargohold.tiers.memory import ByteRows, HostMemory
from cargohold.tiers.namespace import Namespace, digest_weights
from cargohold.tiers.opening import check_place_here, check_tier, open_tier, require_packages
from cargohold.tiers.port import Answer, JobKind, JobStatus, LoadOutcome, StoreOutcome, Tier, TierJob, TierUsage
from cargohold.tiers.queue import QueueConfig, TierQueue
from cargohold.tiers.stores.kind import SharedTierConfig

__all__ = [
    "Answer",
    "BreakerConfig",
    "BreakerState",
    "ByteRows",
    "DiskTierConfig",
    "EncryptionKey",
    "HostMemory",
    "JobKind",
    "JobStatus",
    "LoadOutcome",
    "Namespace",
    "Opening",
    "QueueConfig",
    "SharedTierConfig",
    "StoreOutcome",
    "Tier",
    "TierConfig",
    "TierHealth",
    "TierJob",
    "TierQueue",
    "TierUsage",
    "check_place_here",
    "check_tier",
    "digest_weights",
    "open_tier",
    "require_packages",
    "tier_names",
]
