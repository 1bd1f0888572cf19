"""Servers that only tests of tiers need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Server, azure_server


@pytest.fixture(scope="session")
def azure() -> Iterator[Server]:
    """A server of Azurite; it takes seconds to start."""
    with azure_server() as server:
        yield server
