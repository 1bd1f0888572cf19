"""Parses connector options from an untyped mapping: a JSON object in a configuration file or on a command line.

::

    {"host_bytes": "8GiB"}                                          eager: the fields of OffloadConfig
    {"mode": "lazy", "host_bytes": "8GiB"}                          the fields of LazyOffloadConfig
    {"host_bytes": "8GiB", "tiers": [{"kind": "disk", "directory": "/var/kv", "max_bytes": "200GiB"}]}
                                                                    with tiers: the fields of DiskTierConfig, SharedTierConfig
    {"mode": "multi", "connectors": [{...}, {"mode": "lazy", ...}]}  several, most preferred first

An option that is unknown or has a value of the wrong type is refused by name.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cargohold.connector.factory import Offload
from cargohold.connector.lazy import LazyOffloadConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.errors import ConfigError
from cargohold.offload.tier import DiskTierConfig, SharedTierConfig, TierConfig

MODES: Mapping[str, type[OffloadConfig | LazyOffloadConfig]] = {"eager": OffloadConfig, "lazy": LazyOffloadConfig}
MULTI = "multi"
TIERS: Mapping[str, type[TierConfig]] = {tier.kind: tier for tier in (DiskTierConfig, SharedTierConfig)}

T = TypeVar("T")


def parse_offload(
    options: Mapping[str, Any], path: str = "", *, beside: Collection[str] = ()
) -> Offload | Sequence[Offload]:
    """Parse options into the typed configuration that ``connector_factory`` takes.

    Args:
        options: the untyped options.
        path: prefix of the option names in errors, such as ``connectors[1].``.
        beside: names of the caller's own options that may stand beside these, for suggestions in errors.

    Raises:
        ConfigError: a key is unknown or missing, or its value is invalid.
    """
    mode = options.get("mode", "eager")
    if mode == MULTI:
        return _several(options, path, beside)
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigError(f"{path}mode", mode, f"it must be one of {', '.join((*MODES, MULTI))}")
    own = {key: value for key, value in options.items() if key != "mode"}
    for key in own.keys() - _names(MODES[mode]):
        others = [other for other in MODES if key in _names(MODES[other])]
        if others:
            raise ConfigError(f"{path}{key}", own[key], f"that is an option of mode={others[0]}, and this is {mode}")
    if "tiers" in own:
        own["tiers"] = _tiers(own["tiers"], f"{path}tiers")
    return cast("Offload", parse_dataclass(MODES[mode], own, path, beside=["mode", *beside]))


def parse_dataclass(kind: type[T], options: Mapping[str, Any], path: str = "", *, beside: Collection[str] = ()) -> T:
    """Make a configuration dataclass from a mapping of its fields, whose values must have the annotated types.

    Args:
        kind: the dataclass.
        options: its fields, by name.
        path: prefix of the option names in errors.
        beside: names of other options that may stand beside these, for suggestions in errors.

    Raises:
        ConfigError: a key is unknown or missing, or its value is of the wrong type or refused by the dataclass.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass, says the contract
    hints = get_type_hints(kind)
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{path}{key}", value, f"there is no such option; {_suggest(key, [*known, *beside])}")
        if not _fits(value, hints[key]):
            raise ConfigError(f"{path}{key}", value, f"it must be {_describe(hints[key])}")
    for name, field in known.items():
        if name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{path}{name}", None, "it must be given")
    try:
        return kind(**options)
    except ConfigError as error:
        raise ConfigError(f"{path}{error.key}", error.value, error.expected) from None


def _tiers(tiers: object, path: str) -> tuple[TierConfig, ...]:
    if not isinstance(tiers, list | tuple):
        raise ConfigError(path, tiers, "it must be a list of objects with options")
    return tuple(_tier(tier, f"{path}[{at}]") for at, tier in enumerate(tiers))


def _tier(options: object, path: str) -> TierConfig:
    if not isinstance(options, Mapping):
        raise ConfigError(path, options, "it must be an object with options")
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in TIERS:
        raise ConfigError(f"{path}.kind", kind, f"it must be one of {', '.join(TIERS)}")
    own = {key: value for key, value in options.items() if key != "kind"}
    return parse_dataclass(TIERS[kind], own, f"{path}.", beside=["kind"])


def _several(options: Mapping[str, Any], path: str, beside: Collection[str]) -> list[Offload]:
    for key, value in options.items():
        if key in {"mode", "connectors"}:
            continue
        is_childs = any(key in _names(kind) for kind in MODES.values())
        expected = f"there is no such option; {_suggest(key, ['mode', 'connectors', *beside])}"
        raise ConfigError(
            f"{path}{key}", value, "with mode=multi it belongs into one of connectors" if is_childs else expected
        )
    children = options.get("connectors")
    if not isinstance(children, list) or not children:
        raise ConfigError(f"{path}connectors", children, "with mode=multi it must be a list of options, one at least")
    parsed = []
    for at, child in enumerate(children):
        place = f"{path}connectors[{at}]"
        if not isinstance(child, Mapping):
            raise ConfigError(place, child, "it must be an object with options")
        if child.get("mode") == MULTI:
            raise ConfigError(f"{place}.mode", MULTI, "put the connectors of the inner list into the outer one")
        parsed.append(cast("Offload", parse_offload(child, f"{place}.")))
    return parsed


def _names(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind)}


def _suggest(key: object, known: Sequence[str]) -> str:
    close = get_close_matches(str(key), known, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known))}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(alternative) or alternative for alternative in alternatives)


def _fits(value: object, hint: Any) -> bool:
    allowed = tuple(kind for kind in _alternatives(hint) if isinstance(kind, type))
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) or (isinstance(value, int) and float in allowed)


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    kinds = [kind for kind in _alternatives(hint) if kind is not os.PathLike]  # JSON has no such values
    return " or ".join(names.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
