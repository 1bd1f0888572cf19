"""Managers: which chunks a tier holds, and where."""

from cargohold.offload.manager.base import (
    CannotStore,
    ChunksRemoved,
    ChunksStored,
    JoinedStores,
    LoadHandle,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    StoreHandle,
    StoreOffer,
)
from cargohold.offload.manager.factory import make_manager
from cargohold.offload.manager.forwarding import ForwardingManager
from cargohold.offload.manager.tier_manager import TierManager

__all__ = [
    "CannotStore",
    "ChunksRemoved",
    "ChunksStored",
    "ForwardingManager",
    "JoinedStores",
    "LoadHandle",
    "ManagerEvent",
    "OffloadKey",
    "OffloadManager",
    "StoreHandle",
    "StoreOffer",
    "TierManager",
    "make_manager",
]
