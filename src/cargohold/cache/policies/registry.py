"""Policies by name: those of this library, and other classes as ``MODULE:CLASS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from cargohold.cache.policies.arc import ARCPolicy
from cargohold.cache.policies.base import FIFOPolicy, LRUPolicy, ReplacementPolicy
from cargohold.cache.policies.reuse_index import ReuseIndexPolicy
from cargohold.errors import ConfigError
from cargohold.option_values import import_class
from cargohold.options import Reader, checked

POLICIES: Final[Mapping[str, type[ReplacementPolicy]]] = MappingProxyType(
    {policy.name: policy for policy in (ARCPolicy, FIFOPolicy, LRUPolicy, ReuseIndexPolicy)}
)
"""The policies that come with the library, by name."""

POLICY_NAMES: Final = f"{', '.join(sorted(POLICIES))}, or MODULE:CLASS"
"""The names that an option may have, for messages."""

DEFAULT_POLICY: Final = ReuseIndexPolicy.name


def find_policy(name: object, key: str = "policy", *, besides: Sequence[str] = ()) -> type[ReplacementPolicy]:
    """Return the class of the policy that an option names.

    Args:
        name: one of ``POLICIES``, or ``MODULE:CLASS``, such as ``my_package.policies:Mine``; the module is imported.
        key: name of the option, for errors.
        besides: other values that the option may have, for errors.

    Raises:
        ConfigError: there is no such policy, or it cannot be imported.
    """
    if not isinstance(name, str) or (name not in POLICIES and ":" not in name):
        raise ConfigError(key, name, f"it must be one of {', '.join([*besides, POLICY_NAMES])} for a class of your own")
    if name in POLICIES:
        return POLICIES[name]
    found: type[ReplacementPolicy] = import_class(
        key, name, ReplacementPolicy, "a class derived from cargohold.cache.policies.ReplacementPolicy"
    )
    return found


POLICY: Final[Reader] = checked(lambda key, name: find_policy(name, key))
"""Reads an option that names a policy."""
