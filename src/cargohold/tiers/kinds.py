"""The kinds of tiers: the one table of them, how options name them, and which of them a place belongs to.

A kind is a class derived from ``TierConfig``, which says all that is its own: options, how it is opened and checked, and what
is in a place of it. All else is written once for all kinds.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cargohold.errors import ConfigError, option_path
from cargohold.option_values import import_class, somebody_elses
from cargohold.options import list_of, made, refuse_names_elsewhere
from cargohold.tiers.config import NAMES_ELSEWHERE, TierConfig
from cargohold.tiers.disk.kind import DiskTierConfig
from cargohold.tiers.disk.root import bytes_in
from cargohold.tiers.inventory import Inventory
from cargohold.tiers.places import is_url
from cargohold.tiers.stores.kind import SharedTierConfig

KINDS: Final[Mapping[str, type[TierConfig]]] = {kind.kind: kind for kind in (DiskTierConfig, SharedTierConfig)}
"""The kinds that come with the library, by name."""


def read_tier(key: str, value: Any) -> TierConfig:
    """Read a tier's options: an object of their class, or a mapping with its ``kind``.

    Raises:
        ConfigError: there is no such kind, or it refuses its options.
    """
    if isinstance(value, TierConfig):
        return value
    if not isinstance(value, Mapping):
        names = ", ".join(kind.__name__ for kind in KINDS.values())
        raise ConfigError(
            key, value, f"it must be an object with options: {names}, or what else derives from TierConfig"
        )
    kind = value.get("kind")
    own = {name: of for name, of in value.items() if name != "kind"}
    if isinstance(kind, str) and ":" in kind:
        with somebody_elses(f"{key}.kind", kind):
            named: type[TierConfig] = import_class(
                f"{key}.kind", kind, TierConfig, "a dataclass derived from cargohold.tiers.TierConfig"
            )
            return made(named, own, f"{key}.", beside=["kind"])
    if not isinstance(kind, str) or kind not in KINDS:
        with option_path(f"{key}."):
            refuse_names_elsewhere(own, NAMES_ELSEWHERE, own)
            raise ConfigError("kind", kind, f"it must be one of {', '.join(KINDS)}, or MODULE:CLASS")
    return made(KINDS[kind], own, f"{key}.", beside=["kind"])


TIERS: Final = list_of(read_tier)
"""Reads a list of tiers' options."""


def open_inventory(place: str) -> Inventory:
    """Open the inventory of one place.

    Args:
        place: the directory of a disk tier, or the URL of a shared one.

    Raises:
        ConfigError: nothing is named, there is no such directory, a shared store is named by its path alone, the scheme is
            unknown, or a package is not installed.
        TierError: a directory cannot be listed.
    """
    # An empty path would be the current directory: an unset variable in a script must not delete there.
    expected = "it must be a directory, or the URL of a shared store; . is the current directory"
    for kind in KINDS.values() if place else ():
        inventory = kind.inventory_of(place)
        if inventory is not None:
            return inventory
    raise ConfigError("PLACE", place, expected)


def options_of(place: str) -> TierConfig:
    """Return options with which one place is opened, so large that nothing which is there is deleted.

    Args:
        place: see ``open_inventory``; it has an inventory.
    """
    if is_url(place):
        return SharedTierConfig(url=place)
    directory = Path(place)
    max_bytes = min(2 * bytes_in(directory), shutil.disk_usage(directory).total)
    return DiskTierConfig(directory=directory, max_bytes=max_bytes, reserve_bytes=0)
