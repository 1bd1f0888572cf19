"""Makes the factory of the connector that options ask for."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from cargohold.connector.lazy import LazyOffloadConfig, LazyOffloadingFactory
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.connector.offloading.make_tiers import check_tiers
from cargohold.errors import ConfigError
from cargohold.offload.tier import DiskTierConfig, SharedTierConfig, TierConfig
from cargohold.offload.tier.namespace import ID_PATTERN
from cargohold.protocol import NULL_CONNECTOR, KVCacheLayout, KVConnectorFactory
from cargohold.units import parse_path

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
    """Check that no two disk tiers in ``offload`` would use the same files, and no shared tier a disk tier's room.

    The second disk tier could not open the files, late in the start. A shared tier's chunks in a disk tier's directory would
    use up its budget, and it can neither read nor evict them.

    Raises:
        ConfigError: two of them would.
    """
    uses = Counter(_files(offload))
    for (directory, _, _), count in uses.items():
        if count > 1:
            raise ConfigError(
                "directory",
                str(directory),
                f"{count} tiers of this engine would use it; give each a directory of its own",
            )
    for (directory, _, _), shared in product(uses, _shared_directories(offload)):
        if _is_in_the_way(shared, directory):
            reason = f"the shared tier of this engine in {shared} would be in its way; give each a directory of its own"
            raise ConfigError("directory", str(directory), reason)


def check_chunks(offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout, max_model_len: int) -> None:
    """Check that requests can be as long as the chunks that ``offload`` asks for.

    Args:
        offload: the connectors' options; those of third parties are not looked at.
        layout: the paged KV.
        max_model_len: tokens of the longest sequence.

    Raises:
        ConfigError: no request can ever fill a chunk, so nothing would be kept.
    """
    match offload:
        case OffloadConfig():
            offload.check_chunks_can_be_filled(layout, max_model_len)
        case Sequence():
            for child in offload:
                check_chunks(child, layout, max_model_len)


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


def _files(offload: Offload | Sequence[Offload] | None) -> Iterator[tuple[Path, int, str | None]]:
    """Yield what decides which files each disk tier in ``offload`` uses: directory, chunk size and key."""
    for tier, blocks_per_chunk in _tiers(offload):
        if isinstance(tier, DiskTierConfig):
            yield _real(parse_path("directory", tier.directory)), blocks_per_chunk, tier.encryption_key


def _shared_directories(offload: Offload | Sequence[Offload] | None) -> Iterator[Path]:
    """Yield the directories of the shared tiers in ``offload`` that have one."""
    for tier, _ in _tiers(offload):
        if isinstance(tier, SharedTierConfig) and tier.directory is not None:
            yield _real(tier.directory)


def _tiers(offload: Offload | Sequence[Offload] | None) -> Iterator[tuple[TierConfig, int]]:
    """Yield the lower tiers in ``offload``, each with its number of blocks per chunk; third parties' connectors have none."""
    match offload:
        case OffloadConfig():
            for tier in offload.tiers:
                yield tier, offload.blocks_per_chunk
        case LazyOffloadConfig():
            yield from _tiers(offload.common())
        case Sequence():
            for child in offload:
                yield from _tiers(child)


def _real(path: Path) -> Path:
    """Return the path without links and ``..``, whether or not it exists."""
    return Path(os.path.realpath(path))


def _is_in_the_way(shared: Path, disk: Path) -> bool:
    """Whether a shared directory would use up a disk tier's budget, which counts all that is below the disk tier's directory.

    A disk tier's directory may be below a shared one, where nobody looks at it, unless it is in a namespace of the shared one.
    """
    if shared.is_relative_to(disk):
        return True
    return disk.is_relative_to(shared) and re.fullmatch(ID_PATTERN, disk.relative_to(shared).parts[0]) is not None
