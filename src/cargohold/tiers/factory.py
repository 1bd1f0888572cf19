"""Opens the tiers that options describe, and the inventory of a place that a user names."""

from __future__ import annotations

import time
from collections.abc import Callable

from cargohold.errors import ConfigError
from cargohold.option_values import parse_path
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.config import SharedTierConfig, TierConfig, needs_extra
from cargohold.tiers.disk.inventory import DiskInventory
from cargohold.tiers.encryption import read_key, require_package
from cargohold.tiers.inventory import Inventory
from cargohold.tiers.namespace import Namespace
from cargohold.tiers.port import Tier
from cargohold.tiers.stores.base import REDIS_SCHEMES, SCHEMES


def require_packages(config: TierConfig) -> None:
    """Raise ``ConfigError`` if a package for a tier is missing. Touches no medium, so it may run on any machine."""
    if config.encryption_key is not None:
        require_package()
    config.require_packages()


def check_tier(config: TierConfig, chunk_bytes: int, num_shards: int) -> None:
    """Check options on the machine where the tier will be opened. Asks no server; ``open_tier`` does.

    Args:
        config: the tier's options.
        chunk_bytes: bytes of the largest chunk of one worker.
        num_shards: number of workers that share the limits in ``config``.

    Raises:
        ConfigError: the medium cannot be used like this, there is no key for encryption, or a package is not installed.
    """
    if config.encryption_key is not None:
        read_key(config.encryption_key).cipher(b"")  # fails if the package for encryption is not installed
    config.check(chunk_bytes, num_shards)


def open_tier(
    config: TierConfig,
    namespace: Namespace,
    chunk_bytes: int,
    num_shards: int = 1,
    time_ns: Callable[[], int] = time.time_ns,
) -> Tier:
    """Open one worker's shard of a tier.

    Args:
        config: the tier's options.
        namespace: what the chunks' bytes depend on. Each worker has its own: they differ in ``split``.
        chunk_bytes: bytes of the largest chunk of this worker.
        num_shards: number of workers that share the limits in ``config``.
        time_ns: gives the time of day, in nanoseconds since 1970.

    Raises:
        ConfigError: the medium cannot be used with these options, there is no key for encryption, or a package is not
            installed. A store that does not answer is no error: it may come back.
    """
    return config.open(_codec(config, namespace, time_ns), chunk_bytes, num_shards)


def namespace_in(config: TierConfig, namespace: Namespace) -> Namespace:
    """Return the namespace of chunks in a tier: the given one, with the id of the tier's encryption key."""
    return _codec(config, namespace, time.time_ns).namespace


def _codec(config: TierConfig, namespace: Namespace, time_ns: Callable[[], int]) -> ChunkCodec:
    key = None if config.encryption_key is None else read_key(config.encryption_key)
    return ChunkCodec(namespace, key, time_ns)


_STARTS_OF_URLS = tuple(f"{scheme}:" for scheme in SCHEMES)
"""A place that begins with one of these, without ``://``, is a URL whose slashes were forgotten, and not a path."""


def open_inventory(place: str) -> Inventory:
    """Open the inventory of one place.

    Args:
        place: the directory of a disk tier, or the URL of a shared one.

    Raises:
        ConfigError: nothing is named, there is no such directory, a shared store is named by its path alone, the scheme is
            unknown, or a package is not installed.
        TierError: a directory cannot be listed.
    """
    if not place:
        # An empty path would be the current directory: an unset variable in a script must not delete there.
        raise ConfigError(
            "PLACE", place, "it must be a directory, or the URL of a shared store; . is the current directory"
        )
    if "://" not in place and not place.startswith(_STARTS_OF_URLS):
        return DiskInventory(parse_path("PLACE", place).absolute())
    try:
        return _shared_inventory(SharedTierConfig(url=place))
    except ConfigError as error:
        raise ConfigError("PLACE", error.value, error.expected) from error  # the user gave a PLACE, not the option url


def _shared_inventory(config: SharedTierConfig) -> Inventory:
    if config.scheme in REDIS_SCHEMES:
        with needs_extra(config):
            from cargohold.tiers.stores.inventory import RedisInventory  # noqa: PLC0415  # an optional package
            from cargohold.tiers.stores.redis import open_client  # noqa: PLC0415  # an optional package

        return RedisInventory(open_client(config))
    if config.directory is not None and not config.directory.is_dir():
        raise ConfigError("url", config.url, "there is no such directory")  # a tier would create it
    with needs_extra(config):
        from cargohold.tiers.stores.inventory import ObjectInventory  # noqa: PLC0415  # an optional package
        from cargohold.tiers.stores.objects import open_store  # noqa: PLC0415  # an optional package

    return ObjectInventory(open_store(config))
