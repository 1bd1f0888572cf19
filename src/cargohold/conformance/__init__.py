"""Suites of tests for connectors, policies and tiers of others: subclass one, name your class, and pytest runs them all.

They need pytest. ``docs/conformance.md`` shows how, with a connector that passes.
"""

import pytest

# Before they are imported: by itself pytest rewrites assertions in files of tests alone; others fail without showing a value.
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in ("connector", "policy", "strict", "tier")))

from cargohold.conformance.connector import ConnectorConformance  # noqa: E402  # see above
from cargohold.conformance.policy import PolicyConformance  # noqa: E402  # see above
from cargohold.conformance.tier import TierConformance  # noqa: E402  # see above

__all__ = ["ConnectorConformance", "PolicyConformance", "TierConformance"]
