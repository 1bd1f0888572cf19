"""Suites of tests for connectors, policies and tiers of others: subclass one, name your class, and pytest runs them all.

They need pytest. ``docs/conformance.md`` shows how, with a connector that passes.
"""

from cargohold.conformance.connector import ConnectorConformance
from cargohold.conformance.policy import PolicyConformance
from cargohold.conformance.tier import TierConformance

__all__ = ["ConnectorConformance", "PolicyConformance", "TierConformance"]
