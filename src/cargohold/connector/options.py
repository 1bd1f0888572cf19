"""Parses connector options from an untyped mapping: a JSON object in a configuration file or on a command line.

::

    {"host_bytes": "8GiB"}                                          eager: the fields of OffloadConfig
    {"mode": "lazy", "host_bytes": "8GiB"}                          the fields of LazyOffloadConfig
    {"host_bytes": "8GiB", "tiers": [{"kind": "disk", "directory": "/var/kv", "max_bytes": "200GiB"}]}
                                                                    with tiers: the fields of DiskTierConfig, SharedTierConfig
    {"mode": "multi", "connectors": [{...}, {"mode": "lazy", ...}]}  several, most preferred first
    {"connector": "MODULE:FACTORY", ...}                            somebody else's connector, with options of its own
    {"host_bytes": "8GiB", "tiers": [{"kind": "MODULE:CLASS", ...}]}  somebody else's tier: the fields of its TierConfig

An option that is unknown or has a value of the wrong type is refused by name. One that vLLM or LMCache has is refused with its
name here. Modules are imported because the operator's configuration names them: never pass on what a client sent.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from inspect import isabstract, signature
from types import MappingProxyType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cargohold.cache.policies.registry import POLICY_NAMES
from cargohold.connector.config import HintConfig, TenantQuota
from cargohold.connector.factory import Offload
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.offloading.lazy import LazyOffloadConfig
from cargohold.errors import ConfigError, one_line, option_path
from cargohold.option_values import import_named
from cargohold.protocol import KVConnectorFactory
from cargohold.tiers import DiskTierConfig, SharedTierConfig, TierConfig

MODES: Final[Mapping[str, type[OffloadConfig | LazyOffloadConfig]]] = {
    "eager": OffloadConfig,
    "lazy": LazyOffloadConfig,
}
MULTI: Final = "multi"
CONNECTOR: Final = "connector"
TIERS: Final[Mapping[str, type[TierConfig]]] = {tier.kind: tier for tier in (DiskTierConfig, SharedTierConfig)}

_DISK: Final = '{"kind": "disk", "directory": "/nvme/kv", "max_bytes": "200GiB"}'

NAMES_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        # vLLM's OffloadingConnector and SimpleCPUOffloadConnector
        "backpressure": "nothing to set: a tier that cannot keep up gets fewer chunks",
        "block_size": "blocks_per_chunk, which counts blocks of the device pool, not tokens",
        "cache_policy_module_path": "the first half of policy=MODULE:CLASS",
        "canonical_layout": "nothing to set: each split of a model finds its own chunks",
        "cpu_bytes_to_use": "host_bytes, for all workers together: a number of bytes, or a size such as 8GiB",
        "cpu_bytes_to_use_per_rank": "host_bytes, for all workers together: a number of bytes, or a size such as 8GiB",
        "disk_buffer_slots": "nothing to set: each of a disk tier's num_threads has its own buffer",
        "disk_capacity_bytes": f"max_bytes of a disk tier: tiers=[{_DISK}]",
        "disk_path": f"directory of a disk tier: tiers=[{_DISK}]",
        "eviction_policy": f"policy, one of {POLICY_NAMES}",
        "kv_offload_backend": f"a disk tier below host memory: tiers=[{_DISK}]",
        "kv_offloading_size": "host_bytes: a number of bytes, or a size such as 8GiB, not a number of GiB",
        "lazy_offload": "mode=lazy",
        "max_tracker_size": "nothing to set: a policy limits what it remembers of absent chunks",
        "num_cpu_blocks": "host_bytes: a number of bytes, or a size such as 8GiB, not a number of blocks",
        "offload_prompt_only": "store_generated, the other way round: by default, answers are kept too",
        "secondary_tiers": f"tiers, with other options: tiers=[{_DISK}]",
        "self_describing_kv_events": "nothing to set: events about chunks that the device computed carry their tokens",
        "shared_storage_path": 'url of a shared tier: tiers=[{"kind": "shared", "url": "file:///mnt/kv"}]',
        "spec_module_path": "the first half of connector=MODULE:FACTORY",
        "spec_name": "the second half of connector=MODULE:FACTORY for a connector of your own; leave it out for ours",
        "store_threshold": "admission=reused of a tier, for a threshold of 2; in host memory, the policy decides what stays",
        "use_page_cache": "direct_io of a disk tier, the other way round",
        # LMCache, whose names may also stand behind "lmcache."
        "cache_policy": f"policy, one of {POLICY_NAMES}",
        "chunk_size": "blocks_per_chunk, which counts blocks of the device pool, not tokens",
        "local_cpu": "host_bytes; host memory is always used",
        "local_disk": f"directory of a disk tier: tiers=[{_DISK}]",
        "max_local_cpu_size": "host_bytes, for all workers together: a number of bytes, or a size such as 8GiB, not GB",
        "max_local_disk_size": f"max_bytes of a disk tier, a number of bytes or a size, not GB: tiers=[{_DISK}]",
        "remote_url": 'url of a shared tier: tiers=[{"kind": "shared", "url": "redis://host:6379/0"}]',
        "save_decode_cache": "store_generated",
    }
)
"""What options of vLLM's own connectors and of LMCache are called here: ``here that is ...``."""

NAMES_OF_TIERS_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "backpressure": NAMES_ELSEWHERE["backpressure"],
        "dir": "directory of kind=disk",
        "enable_kv_events": "nothing to set: there are events for all tiers if vLLM publishes events",
        "io_threads": "num_threads",
        "locality": "nothing to set: a disk is LOCAL and a shared store REMOTE",
        "module_path": "the first half of kind=MODULE:CLASS",
        "n_read_threads": "num_threads, which read and write",
        "n_write_threads": "num_threads, which read and write",
        "path": "directory of kind=disk, or, if engines share it, url=file:///mnt/kv of kind=shared",
        "prefix": "the end of url, such as s3://bucket/prefix",
        "root_dir": "directory of kind=disk, or, if engines share it, url=file:///mnt/kv of kind=shared",
        "store_config": "url of kind=shared, such as s3://bucket/prefix; credentials come from the environment",
        "type": f"kind, one of {', '.join(TIERS)}, or MODULE:CLASS",
    }
)
"""The same for options of a single tier."""

_JSON_KINDS: Final = frozenset({int, float, str, bool, types.NoneType, list, dict, Sequence, Mapping, os.PathLike})

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
        ConfigError: a key is unknown or missing, or its value is invalid, or somebody else's class cannot be imported.
    """
    if CONNECTOR in options:
        return named_factory(options[CONNECTOR], {key: options[key] for key in options if key != CONNECTOR}, path)
    _refuse_names_elsewhere(options, NAMES_ELSEWHERE, path)
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
        own["tiers"] = parse_tiers(own["tiers"], f"{path}tiers")
    if isinstance(own.get("hints"), Mapping):
        own["hints"] = parse_dataclass(HintConfig, own["hints"], f"{path}hints.")
    if isinstance(own.get("quotas"), list):
        own["quotas"] = [
            parse_dataclass(TenantQuota, quota, f"{path}quotas[{at}].") if isinstance(quota, Mapping) else quota
            for at, quota in enumerate(own["quotas"])
        ]
    return cast("Offload", parse_dataclass(MODES[mode], own, path, beside=["mode", *beside]))


def named_factory(
    name: object, options: Mapping[str, Any] = MappingProxyType({}), path: str = ""
) -> KVConnectorFactory:
    """Return the factory of somebody else's connector, ``MODULE:FACTORY``.

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
    with _somebody_elses(key, name):
        factory = _made(found, options, path)
    if not _is_factory(factory):
        raise ConfigError(key, name, f"{expected}, and what it returned is of type {type(factory).__name__}")
    return cast("KVConnectorFactory", factory)


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
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]  # a dataclass, says the contract
    hints = get_type_hints(kind)
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{path}{key}", value, f"there is no such option; {_suggest(key, [*known, *beside])}")
        if not _fits(value, hints[key]):
            raise ConfigError(f"{path}{key}", value, f"it must be {_describe(hints[key])}")
    for name, field in known.items():
        if name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{path}{name}", None, "it must be given")
    with option_path(path):
        return kind(**options)


def parse_tiers(tiers: object, path: str) -> tuple[TierConfig, ...]:
    """Parse the options of tiers. Raises ``ConfigError``; ``path`` is the name of the list of options in errors."""
    if not isinstance(tiers, list | tuple):
        raise ConfigError(path, tiers, "it must be a list of objects with options")
    return tuple(_tier(tier, f"{path}[{at}]") for at, tier in enumerate(tiers))


def _tier(options: object, path: str) -> TierConfig:
    if not isinstance(options, Mapping):
        raise ConfigError(path, options, "it must be an object with options")
    kind = options.get("kind")
    own = {key: value for key, value in options.items() if key != "kind"}
    if isinstance(kind, str) and ":" in kind:
        with _somebody_elses(f"{path}.kind", kind):
            return parse_dataclass(_tier_class(f"{path}.kind", kind), own, f"{path}.", beside=["kind"])
    _refuse_names_elsewhere(own, NAMES_OF_TIERS_ELSEWHERE, f"{path}.")
    if not isinstance(kind, str) or kind not in TIERS:
        raise ConfigError(f"{path}.kind", kind, f"it must be one of {', '.join(TIERS)}, or MODULE:CLASS")
    return parse_dataclass(TIERS[kind], own, f"{path}.", beside=["kind"])


def _tier_class(key: str, name: str) -> type[TierConfig]:
    """Import somebody else's tier. Raises ``ConfigError`` if it is none."""
    found = import_named(key, name)
    if not isinstance(found, type) or not issubclass(found, TierConfig):
        raise ConfigError(key, name, "it must be a dataclass derived from cargohold.tiers.TierConfig")
    if isabstract(found):
        raise ConfigError(key, name, f"the class lacks {', '.join(sorted(found.__abstractmethods__))}")
    return found


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


def _is_factory(value: object) -> bool:
    sides = ("make_scheduler_side", "make_worker_side")
    return not isinstance(value, type) and all(callable(getattr(value, side, None)) for side in sides)


def _made(kind: Any, options: Mapping[str, Any], path: str) -> object:
    """Call somebody else's class or function with the options that it takes."""
    if is_dataclass(kind) and isinstance(kind, type):
        return parse_dataclass(kind, options, path, beside=[CONNECTOR])
    signature(kind).bind(**options)  # raises TypeError; a TypeError of the call itself could be a bug anywhere
    return kind(**options)


@contextmanager
def _somebody_elses(key: str, name: str) -> Iterator[None]:
    """Turn whatever somebody else's code raises inside the ``with`` into a ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # it may raise anything
        raise ConfigError(key, name, f"it refuses its options ({type(error).__name__}: {one_line(error)})") from error


def _refuse_names_elsewhere(options: Mapping[str, Any], names: Mapping[str, str], path: str) -> None:
    """Raise ``ConfigError`` for options under names that they have elsewhere; it tells the names of all of them here."""
    meant = {key: names[key.removeprefix("lmcache.")] for key in options if str(key).removeprefix("lmcache.") in names}
    if not meant:
        return
    (key, name), *others = meant.items()
    besides = "".join(f"; {other} is {its_name}" for other, its_name in others)
    value = options[key]
    # Objects may hold keys of a store.
    shown = value if isinstance(value, str | int | float | None) else "(not shown)"
    raise ConfigError(f"{path}{key}", shown, f"here that is {name}{besides}")


def _names(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind) if field.init}


def _suggest(key: object, known: Sequence[str]) -> str:
    close = get_close_matches(str(key), known, n=2)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known))}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(alternative) or alternative for alternative in alternatives)


def _fits(value: object, hint: Any) -> bool:
    allowed = _alternatives(hint)
    if not _JSON_KINDS.issuperset(allowed):
        return True  # somebody else's class, which has to check that itself
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) or (isinstance(value, int) and float in allowed)


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    kinds = [kind for kind in _alternatives(hint) if kind is not os.PathLike]  # JSON has no such values
    return " or ".join(names.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
