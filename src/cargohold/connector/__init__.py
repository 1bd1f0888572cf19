"""Connectors that implement the contract."""
