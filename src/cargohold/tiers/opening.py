"""Checks tiers by their options, and opens them."""

from __future__ import annotations

import time
from collections.abc import Callable

from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.config import TierConfig
from cargohold.tiers.encryption import read_key, require_package
from cargohold.tiers.namespace import Namespace
from cargohold.tiers.port import Tier


def require_packages(config: TierConfig) -> None:
    """Raise ``ConfigError`` if a package for a tier is missing. Touches no medium, so it may run on any machine."""
    if config.encryption_key is not None:
        require_package()
    config.require_packages()


def check_place_here(config: TierConfig) -> None:
    """Raise ``ConfigError`` for what can be seen, without changing anything, on the machine where a tier will be opened."""
    if config.encryption_key is not None:
        read_key(config.encryption_key)
    config.require_place()


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
    config.require_sizes(chunk_bytes, num_shards)
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
    config.require_sizes(chunk_bytes, num_shards)
    return config.open(_codec(config, namespace, time_ns), chunk_bytes, num_shards)


def namespace_in(config: TierConfig, namespace: Namespace) -> Namespace:
    """Return the namespace of chunks in a tier: the given one, with the id of the tier's encryption key."""
    return _codec(config, namespace, time.time_ns).namespace


def _codec(config: TierConfig, namespace: Namespace, time_ns: Callable[[], int]) -> ChunkCodec:
    key = None if config.encryption_key is None else read_key(config.encryption_key)
    return ChunkCodec(namespace, key, time_ns)
