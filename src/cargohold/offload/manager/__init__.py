"""Managers: which chunks a tier holds, and where."""

from cargohold.offload.manager.base import (
    ChunksRemoved,
    ChunksStored,
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
