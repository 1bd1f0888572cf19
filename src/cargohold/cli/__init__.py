"""The cargohold command."""

from cargohold.cli.main import main

__all__ = ["main"]
