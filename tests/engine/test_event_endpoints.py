"""Ports that ZeroMQ would take for other ones."""

from __future__ import annotations

import pytest

from cargohold import ConfigError
from cargohold.engine.config import EngineConfig


@pytest.mark.parametrize("port", ["99999", "65536", "-5", "5557x", "http", "", "\u0661"])
def test_what_is_no_port_is_refused(port: str) -> None:
    """Found by a newcomer: with port 99999 the engine listened on port 34463."""
    with pytest.raises(ConfigError, match=r"kv_events_endpoint='tcp://127\.0\.0\.1:.* a port from 1 to 65535"):
        EngineConfig(model="m", kv_events_endpoint=f"tcp://127.0.0.1:{port}")


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="a port from 1 to 65535"):
        EngineConfig(model="m", kv_events_endpoint="tcp://127.0.0.1")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:1",
        "tcp://*:65535",
        "tcp://[::1]:5557",
        "tcp://*:*",
        "tcp://*:0",
        "ipc:///run/a:99999",
        "inproc://a",
    ],
)
def test_what_can_be_bound_is_not_refused(endpoint: str) -> None:
    assert EngineConfig(model="m", kv_events_endpoint=endpoint).kv_events_endpoint == endpoint
