"""Replacement policies."""

from cargohold.offload.policy.base import Offer, OneByOnePolicy, ReplacementPolicy, Room
from cargohold.offload.policy.registry import DEFAULT_POLICY, POLICIES, make_policy

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Offer",
    "OneByOnePolicy",
    "ReplacementPolicy",
    "Room",
    "make_policy",
]
