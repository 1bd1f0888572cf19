"""The connector that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.connector.lazy import LazyOffloadConfig, LazyOffloadingFactory
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.protocol import NULL_CONNECTOR, KVConnectorFactory

Offload = OffloadConfig | LazyOffloadConfig | KVConnectorFactory


def connector_factory(offload: Offload | Sequence[Offload] | None) -> KVConnectorFactory:
    """What makes the connector for options, for several of them in order of preference, or for none."""
    match offload:
        case None:
            return NULL_CONNECTOR
        case OffloadConfig():
            return OffloadingFactory(offload)
        case LazyOffloadConfig():
            return LazyOffloadingFactory(offload)
        case Sequence():
            return MultiConnectorFactory(tuple(connector_factory(child) for child in offload))
        case _:
            return offload
