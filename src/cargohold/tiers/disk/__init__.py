"""Chunks in files of a local directory."""

from cargohold.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
