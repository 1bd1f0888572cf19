"""A server that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from cargohold.serve.server import Server
from tests.serve.running import running


@pytest.fixture(scope="module")
def server(chat_model: str) -> Iterator[Server]:
    with running(chat_model) as server:
        yield server
