"""The former name of the suites, for one release."""

from __future__ import annotations

from cargohold import conformance
from cargohold.testing import conformance as suites


def test_the_suites_have_their_former_names_too() -> None:
    assert conformance.__all__ == suites.__all__
    assert all(getattr(conformance, name) is getattr(suites, name) for name in suites.__all__)
