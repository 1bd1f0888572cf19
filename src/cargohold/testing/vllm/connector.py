"""The adapter over simulated tiers, in virtual time. vLLM loads it by its module's path, as it loads any connector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from cargohold.integrations.vllm.connector import CargoholdConnector
from cargohold.protocol import Clock, KVConnectorFactory

NAME: Final = "SimulatedConnector"

_GROUND: ContextVar[tuple[KVConnectorFactory, Clock]] = ContextVar("ground")


@contextmanager
def standing_on(factory: KVConnectorFactory, clock: Clock) -> Iterator[None]:
    """Within the ``with`` block, connectors that vLLM makes use this factory and clock: vLLM itself cannot pass them on."""
    token = _GROUND.set((factory, clock))
    try:
        yield
    finally:
        _GROUND.reset(token)


class SimulatedConnector(CargoholdConnector):
    """The adapter, with a simulated factory and clock."""

    def _factory(self) -> KVConnectorFactory:
        return _GROUND.get()[0]

    def _clock(self) -> Clock:
        return _GROUND.get()[1]
