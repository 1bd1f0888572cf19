"""Opens the tiers that options describe."""

from __future__ import annotations

import time
from collections.abc import Callable

from cargohold.offload.tier.base import Tier
from cargohold.offload.tier.codec import ChunkCodec
from cargohold.offload.tier.config import REDIS_SCHEMES, DiskTierConfig, TierConfig, needs_extra
from cargohold.offload.tier.encryption import read_key
from cargohold.offload.tier.namespace import Namespace


def check_tier(config: TierConfig, chunk_bytes: int, num_shards: int) -> None:
    """Refuse, on the machine where it will be opened, a tier that ``open_tier`` would; what is asked of a server is left to it.

    Args:
        config: what and where.
        chunk_bytes: bytes of the largest chunk of one worker.
        num_shards: workers that share the limits in ``config``.

    Raises:
        ConfigError: the directory or its budget cannot be, or there is no key for encryption.
    """
    if config.encryption_key is not None:
        read_key(config.encryption_key)
    if isinstance(config, DiskTierConfig):
        from cargohold.offload.tier.disk.shard import check_place  # noqa: PLC0415  # only what is used is imported

        check_place(config, chunk_bytes, num_shards)


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
        ConfigError: it cannot be: an unwritable directory, one in use by another process, a budget above the disk or below
            one chunk, a package that is not installed, missing or wrong credentials, no key for encryption. A store that
            does not answer is no such error: it may come back.
    """
    key = None if config.encryption_key is None else read_key(config.encryption_key)
    codec = ChunkCodec(namespace, key, time_ns)
    if isinstance(config, DiskTierConfig):
        from cargohold.offload.tier.disk import DiskTier  # noqa: PLC0415  # only what is used is imported

        return DiskTier(config, codec, chunk_bytes, num_shards)
    if config.scheme in REDIS_SCHEMES:
        with needs_extra(config):
            from cargohold.offload.tier.redis_tier import RedisTier  # noqa: PLC0415  # an optional package

        return RedisTier(config, codec, chunk_bytes)
    with needs_extra(config):
        from cargohold.offload.tier.object_tier import ObjectTier  # noqa: PLC0415  # an optional package

    return ObjectTier(config, codec, chunk_bytes)
