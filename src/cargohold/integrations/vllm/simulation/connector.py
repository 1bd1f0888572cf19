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
    """While this lasts, connectors that vLLM makes stand on these: it has no way to hand them through."""
    token = _GROUND.set((factory, clock))
    try:
        yield
    finally:
        _GROUND.reset(token)


class SimulatedConnector(CargoholdConnector):
    """The adapter itself; only what it stands on is simulated."""

    def _factory(self) -> KVConnectorFactory:
        return _GROUND.get()[0]

    def _clock(self) -> Clock:
        return _GROUND.get()[1]
