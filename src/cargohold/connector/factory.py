"""The connector that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.connector.lazy import LazyOffloadConfig, LazyOffloadingFactory
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.connector.offloading.make_tiers import check_tiers
from cargohold.protocol import NULL_CONNECTOR, KVCacheLayout, KVConnectorFactory

Offload = OffloadConfig | LazyOffloadConfig | KVConnectorFactory


def check_places(offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout) -> None:
    """Refuse tiers that cannot be opened on this machine. Knows nothing of other people's connectors.

    Raises:
        ConfigError: a directory, its budget or a URL cannot be, there is no key for encryption, or a package is missing.
    """
    match offload:
        case OffloadConfig():
            check_tiers(offload, layout)
        case LazyOffloadConfig():
            check_tiers(offload.common(), layout)
        case Sequence():
            for child in offload:
                check_places(child, layout)


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
