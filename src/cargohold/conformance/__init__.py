"""Suites of tests for connectors of others: subclass one, name your class, and pytest runs them all.

They need pytest. ``docs/conformance.md`` shows how, with a connector that passes.
"""

from cargohold.conformance.connector import ConnectorConformance
from cargohold.conformance.policy import PolicyConformance

__all__ = ["ConnectorConformance", "PolicyConformance"]
