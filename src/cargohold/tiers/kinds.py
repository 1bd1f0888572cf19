"""The kinds of tiers that options may name, in the one table of them, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isabstract
from typing import Any, Final

from cargohold.errors import ConfigError, option_path
from cargohold.option_values import import_named, somebody_elses
from cargohold.options import list_of, made, refuse_names_elsewhere
from cargohold.tiers.config import NAMES_ELSEWHERE, TierConfig
from cargohold.tiers.opening import DiskTierConfig, SharedTierConfig

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
            return made(_named(f"{key}.kind", kind), own, f"{key}.", beside=["kind"])
    if not isinstance(kind, str) or kind not in KINDS:
        with option_path(f"{key}."):
            refuse_names_elsewhere(own, NAMES_ELSEWHERE, own)
            raise ConfigError("kind", kind, f"it must be one of {', '.join(KINDS)}, or MODULE:CLASS")
    return made(KINDS[kind], own, f"{key}.", beside=["kind"])


TIERS: Final = list_of(read_tier)
"""Reads a list of tiers' options."""


def _named(key: str, name: str) -> type[TierConfig]:
    """Import somebody else's kind. Raises ``ConfigError`` if it is none."""
    found = import_named(key, name)
    if not isinstance(found, type) or not issubclass(found, TierConfig):
        raise ConfigError(key, name, "it must be a dataclass derived from cargohold.tiers.TierConfig")
    if isabstract(found):
        raise ConfigError(key, name, f"the class lacks {', '.join(sorted(found.__abstractmethods__))}")
    return found
