"""Inventories: list, verify and delete the namespaces on a tier's medium, without an engine."""

from cargohold.tiers.inventory.base import DryRun, Finding, Holding, Inventory
from cargohold.tiers.inventory.factory import open_inventory

__all__ = ["DryRun", "Finding", "Holding", "Inventory", "open_inventory"]
