"""The scheduler side of the tiers below host memory: their known contents, and which chunks to fetch and to write down."""

from cargohold.offload.tier.config import Admission, WriteMode
from cargohold.offload.tiering.dispatch import random_epoch
from cargohold.offload.tiering.fetches import Chain, Fetch
from cargohold.offload.tiering.lower_tiers import LowerTiers
from cargohold.offload.tiering.manager import TieringManager
from cargohold.offload.tiering.options import TieringConfig, TierOptions
from cargohold.offload.tiering.pace import Pace
from cargohold.offload.tiering.tasks import TierCommand, TierTask
from cargohold.offload.tiering.tier_state import UNKNOWN

__all__ = [
    "UNKNOWN",
    "Admission",
    "Chain",
    "Fetch",
    "LowerTiers",
    "Pace",
    "TierCommand",
    "TierOptions",
    "TierTask",
    "TieringConfig",
    "TieringManager",
    "WriteMode",
    "random_epoch",
]
