"""Eviction policies of a tier."""

from cargohold.offload.policy.base import Offer, OneByOnePolicy, ReplacementPolicy, Room
from cargohold.offload.policy.registry import DEFAULT_POLICY, POLICIES, POLICY_NAMES, find_policy, make_policy

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "POLICY_NAMES",
    "Offer",
    "OneByOnePolicy",
    "ReplacementPolicy",
    "Room",
    "find_policy",
    "make_policy",
]
