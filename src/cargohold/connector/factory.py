"""Makes the factory of the connector that options ask for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from cargohold.connector.lazy import LazyOffloadConfig, LazyOffloadingFactory
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.connector.offloading.make_tiers import check_tiers
from cargohold.errors import ConfigError
from cargohold.offload.tier import DiskTierConfig
from cargohold.protocol import NULL_CONNECTOR, KVCacheLayout, KVConnectorFactory

Offload = OffloadConfig | LazyOffloadConfig | KVConnectorFactory


def check_places(offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout) -> None:
    """Check that the tiers in ``offload`` can be opened on this machine. Third parties' connectors are not checked.

    Raises:
        ConfigError: a directory, its budget or a URL cannot be used, the encryption key or a package is missing.
    """
    match offload:
        case OffloadConfig():
            check_tiers(offload, layout)
        case LazyOffloadConfig():
            check_tiers(offload.common(), layout)
        case Sequence():
            for child in offload:
                check_places(child, layout)


def host_bytes_of(offload: Offload | Sequence[Offload] | None) -> int:
    """Return the host memory that ``offload`` asks for in all. Third parties' connectors are not counted."""
    match offload:
        case OffloadConfig():
            return offload.num_host_bytes
        case LazyOffloadConfig():
            return offload.common().num_host_bytes
        case Sequence():
            return sum(map(host_bytes_of, offload))
        case _:
            return 0


def check_apart(offload: Offload | Sequence[Offload] | None) -> None:
    """Check that no two tiers in ``offload`` would use the same files: the second could not open them, late in the start.

    Raises:
        ConfigError: two of them would.
    """
    uses = Counter(_files(offload))
    for (directory, _, _), count in uses.items():
        if count > 1:
            raise ConfigError(
                "directory", directory, f"{count} tiers of this engine would use it; give each a directory of its own"
            )


def connector_factory(offload: Offload | Sequence[Offload] | None) -> KVConnectorFactory:
    """Return the factory of the connector for ``offload``: one configuration, several in order of preference, or ``None``.

    Raises:
        ConfigError: two tiers would use the same files.
    """
    check_apart(offload)
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


def _files(offload: Offload | Sequence[Offload] | None) -> Iterator[tuple[str, int, str | None]]:
    """Yield what decides which files each disk tier in ``offload`` uses: directory, chunk size and key."""
    match offload:
        case OffloadConfig():
            for tier in offload.tiers:
                if isinstance(tier, DiskTierConfig):
                    yield os.path.realpath(tier.directory), offload.blocks_per_chunk, tier.encryption_key
        case LazyOffloadConfig():
            yield from _files(offload.common())
        case Sequence():
            for child in offload:
                yield from _files(child)
