"""Servers that take long to start are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.offload.tier.servers import Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server
