"""Opens the inventory of a place that a user names."""

from __future__ import annotations

from cargohold.errors import ConfigError
from cargohold.option_values import parse_path
from cargohold.tiers.config import SharedTierConfig, needs_extra
from cargohold.tiers.inventory.base import Inventory
from cargohold.tiers.inventory.disk import DiskInventory
from cargohold.tiers.stores.base import REDIS_SCHEMES, SCHEMES

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
            from cargohold.tiers.inventory.stores import RedisInventory  # noqa: PLC0415  # an optional package
            from cargohold.tiers.stores.redis import open_client  # noqa: PLC0415  # an optional package

        return RedisInventory(open_client(config))
    if config.directory is not None and not config.directory.is_dir():
        raise ConfigError("url", config.url, "there is no such directory")  # a tier would create it
    with needs_extra(config):
        from cargohold.tiers.inventory.stores import ObjectInventory  # noqa: PLC0415  # an optional package
        from cargohold.tiers.stores.objects import open_store  # noqa: PLC0415  # an optional package

    return ObjectInventory(open_store(config))
