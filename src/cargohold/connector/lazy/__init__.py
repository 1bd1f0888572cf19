"""Copies down only what is about to be lost."""

from cargohold.connector.lazy.config import LazyOffloadConfig
from cargohold.connector.lazy.factory import LazyOffloadingFactory

__all__ = ["LazyOffloadConfig", "LazyOffloadingFactory"]
