"""Servers that only tests of tiers need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cargohold.deadlines import LOCK
from tests.servers import Server, azure_server


@pytest.fixture(scope="session")
def azure() -> Iterator[Server]:
    """A server of Azurite; it takes seconds to start."""
    with azure_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for another process to end, unless it says so."""
    monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=0.0))
