"""What a tier's medium holds, without an engine: namespaces to list, verify and delete."""

from cargohold.offload.tier.inventory.base import Finding, Holding, Inventory
from cargohold.offload.tier.inventory.factory import open_inventory

__all__ = ["Finding", "Holding", "Inventory", "open_inventory"]
