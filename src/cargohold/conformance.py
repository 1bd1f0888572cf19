"""The former name of ``cargohold.testing.conformance``, for one release."""

from cargohold.testing.conformance import ConnectorConformance, PolicyConformance, TierConformance

__all__ = ["ConnectorConformance", "PolicyConformance", "TierConformance"]
