"""Lazy offloading: copies down only blocks that are about to be evicted."""

from cargohold.connector.lazy.config import LazyOffloadConfig
from cargohold.connector.lazy.factory import LazyOffloadingFactory

__all__ = ["LazyOffloadConfig", "LazyOffloadingFactory"]
