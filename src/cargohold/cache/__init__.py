"""Managers: which chunks a tier holds, and where."""

from cargohold.cache.manager import (
    ChunksRemoved,
    ChunksStored,
    ForwardingManager,
    LoadHandle,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    StoreHandle,
    StoreOffer,
)
from cargohold.cache.tier_manager import TierManager, make_manager

__all__ = [
    "ChunksRemoved",
    "ChunksStored",
    "ForwardingManager",
    "LoadHandle",
    "ManagerEvent",
    "OffloadKey",
    "OffloadManager",
    "StoreHandle",
    "StoreOffer",
    "TierManager",
    "make_manager",
]
