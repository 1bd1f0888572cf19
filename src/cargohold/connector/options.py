"""Parses connector options from an untyped mapping: a JSON object in a configuration file or on a command line.

::

    {"host_bytes": "8GiB"}                                          eager: the fields of OffloadConfig
    {"mode": "lazy", "host_bytes": "8GiB"}                          the same, with another way of storing
    {"host_bytes": "8GiB", "tiers": [{"kind": "disk", "directory": "/var/kv", "max_bytes": "200GiB"}]}
                                                                    with tiers: the fields of DiskTierConfig, SharedTierConfig
    {"mode": "multi", "connectors": [{...}, {"mode": "lazy", ...}]}  several, most preferred first
    {"connector": "MODULE:FACTORY", ...}                            a third-party connector, with options of its own
    {"host_bytes": "8GiB", "tiers": [{"kind": "MODULE:CLASS", ...}]}  a third-party tier: the fields of its TierConfig

An option that is unknown or has a value of the wrong type is refused by name. One that vLLM, LMCache or KVBM has is refused
with its name here. Modules are imported because the operator's configuration names them: never pass on what a client sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, cast

from cargohold.connector.config import OffloadConfig
from cargohold.connector.factory import Offload
from cargohold.errors import ConfigError, option_path
from cargohold.option_values import import_named, somebody_elses
from cargohold.options import declared, made, no_such_option, refuse_names_elsewhere
from cargohold.protocol import KVConnectorFactory

MULTI: Final = "multi"
CONNECTOR: Final = "connector"


def parse_offload(
    options: Mapping[str, Any], path: str = "", *, beside: Collection[str] = ()
) -> Offload | Sequence[Offload]:
    """Parse options into the typed configuration that ``connector_factory`` takes.

    Args:
        options: the untyped options.
        path: prefix of the option names in errors, such as ``connectors[1].``.
        beside: names of the caller's own options that may stand next to these, for suggestions in errors.

    Raises:
        ConfigError: a key is unknown or missing, or its value is invalid, or a third-party class cannot be imported.
    """
    if CONNECTOR in options:
        return named_factory(options[CONNECTOR], {key: options[key] for key in options if key != CONNECTOR}, path)
    if options.get("mode") == MULTI:
        with option_path(path):
            return _several(options, beside)
    return made(OffloadConfig, options, path, beside=beside)


def named_factory(
    name: object, options: Mapping[str, Any] = MappingProxyType({}), path: str = ""
) -> KVConnectorFactory:
    """Return the factory of a third-party connector, ``MODULE:FACTORY``.

    ``FACTORY`` is a ``KVConnectorFactory``, which takes no options, or a callable that takes the options as keyword arguments
    and returns one. Of a dataclass, the types of the options are checked, too.

    Args:
        name: the name.
        options: the connector's own options.
        path: prefix of the option names in errors.

    Raises:
        ConfigError: it cannot be imported, is something else, or refuses the options.
    """
    key = f"{path}{CONNECTOR}"
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(key, name, "it must be MODULE:FACTORY, such as my_package.my_module:FACTORY")
    found = import_named(key, name)
    if _is_factory(found):
        if options:
            option, value = next(iter(options.items()))
            raise ConfigError(f"{path}{option}", value, f"{name} takes no options: it is a factory, not a callable")
        return cast("KVConnectorFactory", found)
    expected = "it must be a KVConnectorFactory, or a callable that takes options and returns one"
    if not callable(found):
        raise ConfigError(key, name, expected)
    with somebody_elses(key, name):
        factory = _made(found, options, path)
    if not _is_factory(factory):
        raise ConfigError(key, name, f"{expected}, and what it returned is of type {type(factory).__name__}")
    return cast("KVConnectorFactory", factory)


def _several(options: Mapping[str, Any], beside: Collection[str]) -> list[Offload]:
    refuse_names_elsewhere(options, OffloadConfig.names_elsewhere, options)
    for key, value in options.items():
        if key in {"mode", "connectors"}:
            continue
        if key in declared(OffloadConfig):
            raise ConfigError(key, value, "with mode=multi it belongs to one of connectors")
        raise no_such_option(key, value, ["mode", "connectors", *beside])
    children = options.get("connectors")
    if not isinstance(children, list) or not children:
        raise ConfigError("connectors", children, "with mode=multi it must be a list of options, one at least")
    parsed = []
    for at, child in enumerate(children):
        place = f"connectors[{at}]"
        if not isinstance(child, Mapping):
            raise ConfigError(place, child, "it must be an object with options")
        if child.get("mode") == MULTI:
            raise ConfigError(f"{place}.mode", MULTI, "put the connectors of the inner list into the outer one")
        parsed.append(cast("Offload", parse_offload(child, f"{place}.")))
    return parsed


def _is_factory(value: object) -> bool:
    sides = ("make_scheduler_side", "make_worker_side")
    return not isinstance(value, type) and all(callable(getattr(value, side, None)) for side in sides)


def _made(kind: Any, options: Mapping[str, Any], path: str) -> object:
    """Call a third-party class or function with the options that it takes."""
    if is_dataclass(kind) and isinstance(kind, type):
        return made(kind, options, path, beside=[CONNECTOR])
    signature(kind).bind(**options)  # raises TypeError; a TypeError of the call itself could be a bug anywhere
    return kind(**options)
