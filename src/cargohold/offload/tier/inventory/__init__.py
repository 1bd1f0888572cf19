"""Inventories: list, verify and delete the namespaces on a tier's medium, without an engine."""

from cargohold.offload.tier.inventory.base import Finding, Holding, Inventory
from cargohold.offload.tier.inventory.dry_run import DryRun
from cargohold.offload.tier.inventory.factory import open_inventory

__all__ = ["DryRun", "Finding", "Holding", "Inventory", "open_inventory"]
