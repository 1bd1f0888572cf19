"""Adapters that carry the connectors into other engines, one package per engine."""
