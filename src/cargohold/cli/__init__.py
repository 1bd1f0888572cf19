"""The cargohold command."""

from cargohold.cli.app import main

__all__ = ["main"]
