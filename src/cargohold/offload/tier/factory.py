"""Opens the tiers that options describe: ours, and those of others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

from cargohold.offload.tier.base import Tier
from cargohold.offload.tier.codec import ChunkCodec
from cargohold.offload.tier.config import (
    DiskTierConfig,
    SharedTierConfig,
    TierConfig,
    needs_extra,
    require_common_options,
)
from cargohold.offload.tier.encryption import read_key
from cargohold.offload.tier.namespace import Namespace
from cargohold.offload.tier.store_url import REDIS_SCHEMES


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomTierConfig(ABC):
    """Options of a tier of one's own: derive a frozen dataclass with further fields. It must pickle, as workers open the tier.

    Attributes:
        kind: what users call such a tier: in counters, reports and messages.
        has_index: that of its ``Tier``.
        admission: which chunks are written: ``all``, or only ``reused`` ones.
        write: when: ``through``, at once, or ``back``, when host memory fills up.
        encryption_key: ``file:PATH`` or ``env:NAME``, for the codec that ``open`` gets; ``None`` to leave chunks readable.
        num_threads: requests at the same time, per worker.
    """

    kind: ClassVar[str]
    has_index: ClassVar[bool] = False

    admission: str = "all"
    write: str = "through"
    encryption_key: str | None = None
    num_threads: int = 8

    def __post_init__(self) -> None:
        """Refuse options that cannot be. Call it first when you override it; as classes have slots, by the class's name."""
        require_common_options(self.admission, self.write, self.encryption_key, self.num_threads)

    @abstractmethod
    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """One worker's shard. Raises ``ConfigError`` if it cannot be; a medium that does not answer may come later.

        Args:
            codec: makes and checks headers; its ``namespace.id`` keeps what belongs to other models and workers apart.
            chunk_bytes: bytes of the largest chunk of this worker.
            num_shards: workers that share the limits in these options.
        """

    def check(self, chunk_bytes: int, num_shards: int) -> None:  # noqa: B027  # most have nothing to check
        """Refuse, before anything is loaded, what ``open`` would, with the same arguments."""

    def of_replica(self, replica: int) -> Self:
        """The same for one of several engine replicas with the same options, by its number from 0; shared unless it says so."""
        del replica
        return self

    def describe(self) -> str:
        """Where chunks go, for people; without secrets."""
        return self.kind


AnyTierConfig: TypeAlias = TierConfig | CustomTierConfig


def kind_of(config: AnyTierConfig) -> str:
    """What users call a tier with these options."""
    match config:
        case CustomTierConfig():
            return config.kind
        case DiskTierConfig():
            return "disk"
        case SharedTierConfig():
            return "shared"


def has_index(config: AnyTierConfig) -> bool:
    """Whether a tier with these options knows by itself what it holds."""
    return config.has_index if isinstance(config, CustomTierConfig) else isinstance(config, DiskTierConfig)


def check_tier(config: AnyTierConfig, chunk_bytes: int, num_shards: int) -> None:
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
    if isinstance(config, CustomTierConfig):
        config.check(chunk_bytes, num_shards)
    if isinstance(config, DiskTierConfig):
        from cargohold.offload.tier.disk.shard import check_place  # noqa: PLC0415  # only what is used is imported

        check_place(config, chunk_bytes, num_shards)


def open_tier(
    config: AnyTierConfig,
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
    if isinstance(config, CustomTierConfig):
        return config.open(codec, chunk_bytes, num_shards)
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
