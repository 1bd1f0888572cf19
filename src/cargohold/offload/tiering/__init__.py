"""Tiers below host memory, as the scheduler side sees them: what they hold, what to bring up and what to write down."""

from cargohold.offload.tier.config import Admission, WriteMode
from cargohold.offload.tiering.commands import TierCommand, TieringConfig, TierOptions
from cargohold.offload.tiering.dispatch import random_epoch
from cargohold.offload.tiering.lower_tier import UNKNOWN
from cargohold.offload.tiering.lower_tiers import LowerTiers
from cargohold.offload.tiering.manager import TieringManager
from cargohold.offload.tiering.pace import Pace
from cargohold.offload.tiering.promotion import Chain, Promotion
from cargohold.offload.tiering.task import TierTask

__all__ = [
    "UNKNOWN",
    "Admission",
    "Chain",
    "LowerTiers",
    "Pace",
    "Promotion",
    "TierCommand",
    "TierOptions",
    "TierTask",
    "TieringConfig",
    "TieringManager",
    "WriteMode",
    "random_epoch",
]
