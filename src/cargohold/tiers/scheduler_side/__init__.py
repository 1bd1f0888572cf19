"""The scheduler side of the tiers below host memory: their known contents, and which chunks to fetch and to write down."""

from cargohold.tiers.config import Admission, WriteMode
from cargohold.tiers.scheduler_side.fetches import Chain, Fetch
from cargohold.tiers.scheduler_side.lower_tiers import LowerTiers
from cargohold.tiers.scheduler_side.plan import Wanted, sources_per_token
from cargohold.tiers.scheduler_side.prefetch import Ahead, Prefetcher, Prefetches
from cargohold.tiers.scheduler_side.promises import Promises
from cargohold.tiers.scheduler_side.tasks import TierTask, random_epoch
from cargohold.tiers.scheduler_side.tier_state import (
    MAX_ANNOUNCED,
    UNKNOWN,
    AllChunksRemoved,
    ChunksFound,
    TierEvent,
    TieringConfig,
    TierOptions,
)
from cargohold.tiers.scheduler_side.waiting import Waiting

__all__ = [
    "MAX_ANNOUNCED",
    "UNKNOWN",
    "Admission",
    "Ahead",
    "AllChunksRemoved",
    "Chain",
    "ChunksFound",
    "Fetch",
    "LowerTiers",
    "Prefetcher",
    "Prefetches",
    "Promises",
    "TierEvent",
    "TierOptions",
    "TierTask",
    "TieringConfig",
    "Waiting",
    "Wanted",
    "WriteMode",
    "random_epoch",
    "sources_per_token",
]
