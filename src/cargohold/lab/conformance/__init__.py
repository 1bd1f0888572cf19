"""Conformance suites for what users bring, from connectors to tiers: pytest runs a suite's tests on your subclass of it.

The suites need pytest. ``docs/conformance.md`` shows how to use them, with a connector that passes.
"""

import pytest

# Must precede the imports. By itself, pytest rewrites assertions only in test files; assertions elsewhere fail without showing
# the values compared.
pytest.register_assert_rewrite(
    *(f"{__name__}.{suite}" for suite in ("connector", "guest", "manager", "policy", "strict", "tier", "transfer"))
)

from cargohold.lab.conformance.connector import ConnectorConformance  # noqa: E402  # see above
from cargohold.lab.conformance.guest import GuestConformance  # noqa: E402  # see above
from cargohold.lab.conformance.manager import ManagerConformance  # noqa: E402  # see above
from cargohold.lab.conformance.policy import PolicyConformance  # noqa: E402  # see above
from cargohold.lab.conformance.tier import TierConformance  # noqa: E402  # see above

__all__ = [
    "ConnectorConformance",
    "GuestConformance",
    "ManagerConformance",
    "PolicyConformance",
    "TierConformance",
]
