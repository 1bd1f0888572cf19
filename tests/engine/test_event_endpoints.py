"""Ports that ZeroMQ would take for other ones."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_events_topic", 5),
        ("kv_events_wire", "list"),
        ("kv_events_salted", "no"),
        ("kv_events_replay_endpoint", "tcp://127.0.0.1"),
        ("kv_events_replay_endpoint", "inproc://replay"),
        ("kv_events_replay_endpoint", "tcp://127.0.0.1:5557"),
    ],
)
def test_impossible_options_of_publishing_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        EngineConfig(**{"model": "m", "kv_events_endpoint": "tcp://127.0.0.1:5557", key: value})


def test_nothing_is_replayed_that_was_not_published() -> None:
    with pytest.raises(ConfigError, match="kv_events_replay_endpoint"):
        EngineConfig(model="m", kv_events_replay_endpoint="tcp://127.0.0.1:5558")
