"""The scheduler side of the tiers below host memory: their known contents, and which chunks to fetch and to write down."""

from cargohold.tiers.config import Admission, WriteMode
from cargohold.tiers.scheduler_side.fetches import Chain, Fetch
from cargohold.tiers.scheduler_side.known import Pace
from cargohold.tiers.scheduler_side.lower_tiers import LowerTiers
from cargohold.tiers.scheduler_side.manager import TieringManager
from cargohold.tiers.scheduler_side.promises import Promises
from cargohold.tiers.scheduler_side.tasks import TierCommand, TierTask
from cargohold.tiers.scheduler_side.tier_state import UNKNOWN, TieringConfig, TierOptions
from cargohold.tiers.scheduler_side.writing import random_epoch

__all__ = [
    "UNKNOWN",
    "Admission",
    "Chain",
    "Fetch",
    "LowerTiers",
    "Pace",
    "Promises",
    "TierCommand",
    "TierOptions",
    "TierTask",
    "TieringConfig",
    "TieringManager",
    "WriteMode",
    "random_epoch",
]
