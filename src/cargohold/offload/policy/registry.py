"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cargohold.errors import ConfigError
from cargohold.offload.policy.arc import ARCPolicy
from cargohold.offload.policy.base import ReplacementPolicy
from cargohold.offload.policy.fifo import FIFOPolicy
from cargohold.offload.policy.lru import LRUPolicy
from cargohold.offload.policy.reuse_index import ReuseIndexPolicy

POLICIES: Final[Mapping[str, type[ReplacementPolicy]]] = MappingProxyType(
    {policy.name: policy for policy in (ARCPolicy, FIFOPolicy, LRUPolicy, ReuseIndexPolicy)}
)
"""What can be chosen."""

DEFAULT_POLICY: Final = ReuseIndexPolicy.name


def make_policy(name: str, capacity: int) -> ReplacementPolicy:
    """The policy of that name for a tier of ``capacity`` slots.

    Raises:
        ConfigError: there is no such policy, or no slot.
    """
    if name not in POLICIES:
        raise ConfigError("policy", name, f"one of {', '.join(sorted(POLICIES))}")
    if capacity < 1:
        raise ConfigError("capacity", capacity, "at least one slot")
    return POLICIES[name](capacity)
