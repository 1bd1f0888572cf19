"""Wrappers pass on everything there is: a method added to a port must not be answered by the port's own default."""

from __future__ import annotations

from inspect import isfunction

import pytest

from cargohold.cache import ForwardingManager, OffloadManager
from cargohold.protocol import ForwardingScheduler, KVConnectorScheduler


@pytest.mark.parametrize(
    ("port", "wrapper"), [(KVConnectorScheduler, ForwardingScheduler), (OffloadManager, ForwardingManager)]
)
def test_nothing_is_left_to_the_ports_defaults(port: type, wrapper: type) -> None:
    members = {name for name, value in vars(port).items() if isfunction(value) or isinstance(value, property)}
    members = {name for name in members if not getattr(vars(port)[name], "__final__", False)}  # which call the others
    assert len(members) > 10
    assert members <= vars(wrapper).keys()
