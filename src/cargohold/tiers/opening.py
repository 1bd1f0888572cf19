"""Opens tiers by their options, and the inventory of a place that a user names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cargohold.errors import ConfigError
from cargohold.option_values import parse_path
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.config import DiskOptions, SharedOptions, TierConfig
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.inventory import DiskInventory
from cargohold.tiers.disk.shard import check_place, require_place
from cargohold.tiers.encryption import read_key, require_package
from cargohold.tiers.inventory import Inventory
from cargohold.tiers.namespace import Namespace
from cargohold.tiers.places import REDIS_SCHEMES, SCHEMES, place_of
from cargohold.tiers.port import Tier

if TYPE_CHECKING:
    from cargohold.tiers.stores.objects import ObjectTier
    from cargohold.tiers.stores.redis import RedisTier


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig(DiskOptions):
    """A disk tier's options, which are in ``DiskOptions``, and what opens it."""

    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """See ``TierConfig``. Refuses an unwritable directory, one in use, and a budget above the disk or below one chunk."""
        self.require_sizes(chunk_bytes, num_shards)
        return DiskTier(self, codec, chunk_bytes, num_shards)

    def require_place(self) -> None:
        """Refuse a directory that cannot be made or written to, and a budget above the file system."""
        require_place(self)

    def check(self, chunk_bytes: int, num_shards: int) -> None:
        """Refuse a directory that cannot be used, an impossible budget, and chunks that can never be written."""
        self.require_sizes(chunk_bytes, num_shards)
        check_place(self, chunk_bytes, num_shards)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SharedTierConfig(SharedOptions):
    """A shared tier's options, which are in ``SharedOptions``, and what opens it."""

    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """See ``TierConfig``. Refuses missing or wrong credentials, a bucket that is not there, and a missing package."""
        self.require_sizes(chunk_bytes, num_shards)
        return self._tier_class()(self, codec, chunk_bytes, num_shards)

    def require_packages(self) -> None:
        """See ``TierConfig``. Each kind of store needs a package."""
        self._tier_class()

    def require_place(self) -> None:
        """Refuse a directory that cannot be made or written to."""
        if self.directory is not None:
            try:
                place_of(self.directory)
            except OSError as error:
                raise ConfigError("url", self.shown_url, f"the store cannot be used: {error}") from error

    def check(self, chunk_bytes: int, num_shards: int) -> None:
        """Refuse what can be refused without asking the store: a missing package, an incomplete URL, impossible sizes."""
        self.require_sizes(chunk_bytes, num_shards)
        self._tier_class().check_place(self)

    def _tier_class(self) -> type[RedisTier | ObjectTier]:
        """Return the class of the tier. Raises ``ConfigError`` if its package is not installed."""
        with _needs_extra(self):
            if self.scheme in REDIS_SCHEMES:
                from cargohold.tiers.stores.redis import RedisTier  # noqa: PLC0415  # an optional package

                return RedisTier
            from cargohold.tiers.stores.objects import ObjectTier  # noqa: PLC0415  # an optional package

            return ObjectTier


@contextmanager
def _needs_extra(config: SharedTierConfig) -> Iterator[None]:
    """Turn an ``ImportError`` inside the ``with`` into a ``ConfigError`` that says how to install the store's package."""
    try:
        yield
    except ImportError as error:
        extra = "redis" if config.scheme in REDIS_SCHEMES else "objects"
        raise ConfigError(
            "url", config.shown_url, f"{config.scheme} needs an extra: pip install 'cargohold[{extra}]'"
        ) from error


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
        with _needs_extra(config):
            from cargohold.tiers.stores.redis import open_client  # noqa: PLC0415  # an optional package
            from cargohold.tiers.stores.redis_inventory import RedisInventory  # noqa: PLC0415  # an optional package

        return RedisInventory(open_client(config))
    if config.directory is not None and not config.directory.is_dir():
        raise ConfigError("url", config.url, "there is no such directory")  # a tier would create it
    with _needs_extra(config):
        from cargohold.tiers.stores.inventory import ObjectInventory  # noqa: PLC0415  # an optional package
        from cargohold.tiers.stores.objects import open_store  # noqa: PLC0415  # an optional package

    return ObjectInventory(open_store(config))
