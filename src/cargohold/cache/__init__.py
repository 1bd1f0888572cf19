"""Managers: which chunks a tier holds, and where."""

from cargohold.cache.manager import (
    ChunkPins,
    ChunksRemoved,
    ChunksStored,
    ForwardingManager,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    SlotReservation,
    StoreOffer,
)
from cargohold.cache.tier_manager import TierManager, make_manager

__all__ = [
    "ChunkPins",
    "ChunksRemoved",
    "ChunksStored",
    "ForwardingManager",
    "ManagerEvent",
    "OffloadKey",
    "OffloadManager",
    "SlotReservation",
    "StoreOffer",
    "TierManager",
    "make_manager",
]
