"""Chunks in files of a local directory."""

from cargohold.offload.tier.disk.tier import DiskTier

__all__ = ["DiskTier"]
