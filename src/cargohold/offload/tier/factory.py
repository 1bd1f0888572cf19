"""Opens the tiers that options describe."""

from __future__ import annotations

import time
from collections.abc import Callable

from cargohold.offload.tier.base import Tier
from cargohold.offload.tier.codec import ChunkCodec
from cargohold.offload.tier.config import TierConfig
from cargohold.offload.tier.encryption import read_key, require_package
from cargohold.offload.tier.namespace import Namespace


def require_packages(config: TierConfig) -> None:
    """Refuse a tier that a package is missing for, wherever it will be opened: no medium is touched. Raises ``ConfigError``."""
    if config.encryption_key is not None:
        require_package()
    config.require_packages()


def check_tier(config: TierConfig, chunk_bytes: int, num_shards: int) -> None:
    """Refuse, on the machine where it will be opened, a tier that ``open_tier`` would; what is asked of a server is left to it.

    Args:
        config: what and where.
        chunk_bytes: bytes of the largest chunk of one worker.
        num_shards: workers that share the limits in ``config``.

    Raises:
        ConfigError: the medium cannot be used like this, there is no key for encryption, or a package is not installed.
    """
    if config.encryption_key is not None:
        read_key(config.encryption_key).cipher(b"")  # with the package for it
    config.check(chunk_bytes, num_shards)


def open_tier(
    config: TierConfig,
    namespace: Namespace,
    chunk_bytes: int,
    num_shards: int = 1,
    time_ns: Callable[[], int] = time.time_ns,
) -> Tier:
    """One worker's shard of a tier.

    Args:
        config: what and where.
        namespace: what the bytes depend on. Workers have different ones: ``split`` says which part is whose.
        chunk_bytes: bytes of the largest chunk of this worker.
        num_shards: workers that share the limits in ``config``.
        time_ns: the time of day, in nanoseconds since 1970.

    Raises:
        ConfigError: it cannot be, for what the medium says, or there is no key for encryption. A store that does not answer
            is no such error: it may come back.
    """
    key = None if config.encryption_key is None else read_key(config.encryption_key)
    return config.open(ChunkCodec(namespace, key, time_ns), chunk_bytes, num_shards)
