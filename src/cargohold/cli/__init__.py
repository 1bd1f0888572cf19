"""The cargohold command."""
