"""Makes managers."""

from __future__ import annotations

from cargohold.cache.policies import find_policy
from cargohold.offload.manager.tier_manager import TierManager


def make_manager(policy: str, capacity: int, *, record_events: bool = False) -> TierManager:
    """Make the manager of a tier.

    Args:
        policy: name of the eviction policy; see ``cargohold.cache.policies.find_policy``.
        capacity: number of slots.
        record_events: whether to record events for ``take_events``.

    Raises:
        ConfigError: there is no such policy, or no slot.
    """
    return TierManager(capacity, find_policy(policy), record_events=record_events)
