"""The kind of tier that keeps chunks in a store that several engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cargohold.errors import ConfigError
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.inventory import Inventory
from cargohold.tiers.places import REDIS_SCHEMES, is_url, place_of
from cargohold.tiers.port import Tier
from cargohold.tiers.stores.options import SharedOptions

if TYPE_CHECKING:
    from cargohold.tiers.stores.objects import ObjectTier
    from cargohold.tiers.stores.redis import RedisTier


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SharedTierConfig(SharedOptions):
    """A shared tier's options, which are in ``SharedOptions``, and what opens it."""

    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """See ``TierConfig``. Refuses missing or wrong credentials, a bucket that is not there, and a missing package."""
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
        """Refuse what can be refused without asking the store: a missing package, an incomplete URL."""
        self._tier_class().check_place(self)

    def _tier_class(self) -> type[RedisTier | ObjectTier]:
        """Return the class of the tier. Raises ``ConfigError`` if its package is not installed."""
        with _needs_extra(self):
            if self.scheme in REDIS_SCHEMES:
                from cargohold.tiers.stores.redis import RedisTier  # noqa: PLC0415  # an optional package

                return RedisTier
            from cargohold.tiers.stores.objects import ObjectTier  # noqa: PLC0415  # an optional package

            return ObjectTier

    @classmethod
    def inventory_of(cls, place: str) -> Inventory | None:
        """See ``TierConfig``. A store is named by its URL."""
        if not is_url(place):
            return None
        try:
            return _inventory(cls(url=place))
        except ConfigError as error:
            raise ConfigError(
                "PLACE", error.value, error.expected
            ) from error  # the user gave a PLACE, not the option url


@contextmanager
def _needs_extra(config: SharedOptions) -> Iterator[None]:
    """Turn an ``ImportError`` inside the ``with`` into a ``ConfigError`` that says how to install the store's package."""
    try:
        yield
    except ImportError as error:
        extra = "redis" if config.scheme in REDIS_SCHEMES else "objects"
        raise ConfigError(
            "url", config.shown_url, f"{config.scheme} needs an extra: pip install 'cargohold[{extra}]'"
        ) from error


def _inventory(config: SharedOptions) -> Inventory:
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
