"""The server's own options, and who its clients are."""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from cargohold.cache.policies import RunsPolicy, find_policy
from cargohold.cache.shares import MAX_SHARES
from cargohold.connector.offloading import HintConfig, OffloadConfig, TenantQuota
from cargohold.errors import ConfigError, one_line
from cargohold.option_values import MAX_TIMEOUT_S, is_int, is_number, is_positive_int

DEFAULT_BODY_BYTES = 8 * 1024**2
"""Largest body of a request by default: the text of some two million tokens."""
_SALT_BYTES = 16
_NUM_SCRYPT_BLOCKS = 2**14
"""What a guess of a key costs whoever has a salt: 16 MiB, and tens of milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Somebody with a key, and a share of host memory. Checked when made; raises ``ConfigError`` naming the option.

    Attributes:
        name: what metrics, people and salts call the tenant.
        key: what its clients send.
        reserved, soft, hard: see ``TenantQuota``.
        hints: which hints of its clients are carried out: ``all``, ``retain``, or ``off``; ``None`` for the server's default.
    """

    name: str
    key: str
    reserved: int | str = 0
    soft: int | str | None = None
    hard: int | str | None = None
    hints: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise ConfigError("--tenants", self.name, "its key must be text")
        if not self.name or not self.name.isprintable() or "/" in self.name:
            raise ConfigError("--tenants", self.name, "a tenant's name must be printable text without a slash")
        self.quota()
        HintConfig(allow_of={} if self.hints is None else {self.name: self.hints})

    def quota(self) -> TenantQuota:
        """Its share, for the connector."""
        name = self.name
        return TenantQuota(tenant=name, label=name, reserved=self.reserved, soft=self.soft, hard=self.hard)

    @classmethod
    def read(cls, file: str) -> tuple[Self, ...]:
        """Read tenants from a file: a JSON object with their options by name. Raises ``ConfigError`` if it has others."""
        known = [field.name for field in fields(cls) if field.name != "name"]
        try:
            named = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("--tenants", file, f"it must be a file of JSON ({one_line(error)})") from error
        expected = f'it must be an object such as {{"acme": {{"key": "..."}}}}; there are {", ".join(known)}'
        if not isinstance(named, dict) or not all(isinstance(options, dict) for options in named.values()):
            raise ConfigError("--tenants", file, expected)
        for name, options in named.items():
            if "key" not in options or options.keys() - known:
                raise ConfigError("--tenants", name, expected)
        return tuple(cls(name=name, **options) for name, options in named.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of the server. Checked when made; raises ``ConfigError`` naming the option.

    Attributes:
        host, port: where it listens; port 0 takes any free one.
        api_keys: each is a tenant, whose requests share cached KV with nobody else's. None lets everybody in.
        tenants: the same, with names and shares of host memory.
        admin_key: may see everybody's requests, and reset the cache. Without one, nobody may reset it.
        metrics_key: may read metrics, and nothing else. Without one, everybody may read those that name no tenant.
        allowed_hosts: names that clients may call the server by where it listens for its own machine alone, besides
            ``localhost`` and its address; ``*`` for any.
        served_names: names that clients may ask for the model by, the first of which is shown.
        max_queue: requests that wait beside those that the engine runs at the same time; more are refused.
        max_body_bytes: largest body of a request.
        max_connections: requests that are open; more are refused. There may be a few more connections: then the one that has
            been idle longest is closed.
        header_timeout_s: a connection that has not said what it wants after so many seconds is closed.
        read_timeout_s: a request whose body has not come after so many seconds is refused.
        write_timeout_s: a client that takes nothing for so many seconds is taken to be gone.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    admin_key: str | None = None
    metrics_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_connections: int = 1024
    header_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self._require("port", is_int(self.port) and 0 <= self.port <= 65535, "a number from 0 (any free port) to 65535")
        self._require("max_queue", is_int(self.max_queue) and self.max_queue >= 0, "an integer from 0")
        for key in ("max_body_bytes", "max_connections"):
            self._require(key, is_positive_int(getattr(self, key)), "an integer from 1")
        for key in ("header_timeout_s", "read_timeout_s", "write_timeout_s"):
            value = getattr(self, key)
            self._require(key, is_number(value) and 0 < value <= MAX_TIMEOUT_S, "a number of seconds above 0")
        of_clients = [*self.api_keys, *(tenant.key for tenant in self.tenants)]
        of_others = {"--admin-key": self.admin_key, "--metrics-key": self.metrics_key}
        for name, keys in (
            ("--api-key", self.api_keys),
            ("--tenants", tuple(tenant.key for tenant in self.tenants)),
            *((name, (key,)) for name, key in of_others.items() if key is not None),
        ):
            if not all(key and key.isascii() and key.isprintable() for key in keys):
                raise ConfigError(name, "***", "a key must be printable ASCII, as headers are")
        for name, known in (("--admin-key", of_clients), ("--metrics-key", [*of_clients, self.admin_key])):
            if of_others[name] is not None and of_others[name] in known:
                raise ConfigError(name, "***", "it must not be another key, too: others know that, or it may do more")
        if len(set(of_clients)) < len(of_clients):
            raise ConfigError("--api-key", "***", "a key must not be given twice: each is one tenant's")

    def label_of(self, tenant: str | None) -> str | None:
        """What people and metrics are told in place of a tenant: of a key its place, such as ``key/2``."""
        places = (f"key/{at}" for at, key in enumerate(self.api_keys, 1) if tenant_of(key) == tenant)
        return next(places, tenant)

    @property
    def num_tenants(self) -> int:
        """How many clients are told apart, the admin included. All that need no key are one."""
        num_keys = len(self.api_keys) + len(self.tenants)
        return num_keys + (self.admin_key is not None) if num_keys else 1

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(field, getattr(self, field), f"it must be {expected}")


@dataclass(frozen=True, slots=True)
class Client:
    """Whoever sends a request.

    Attributes:
        tenant: its identity, which is in the salt of its requests; ``None`` for a client without an API key.
        is_admin: whether it has shown the admin key.
        is_scraper: whether it has shown the key for metrics.
    """

    tenant: str | None = None
    is_admin: bool = False
    is_scraper: bool = False

    @property
    def reads_all_metrics(self) -> bool:
        """Whether it may see those of tenants."""
        return self.is_admin or self.is_scraper

    def sees(self, tenant: str | None) -> bool:
        """Whether it may see what is a tenant's: its own, or as the admin everybody's."""
        return self.is_admin or self.tenant == tenant

    def salt(self, cache_salt: str | None) -> str | None:
        """The salt of a request: the tenant's own, and within it the client's."""
        if self.tenant is None:
            return cache_salt
        return self.tenant if cache_salt is None else f"{self.tenant}/{cache_salt}"


class Keys:
    """Knows clients by their keys.

    Args:
        config: with the keys.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._clients = [(key.encode(), Client(tenant_of(key))) for key in config.api_keys]
        self._clients += [(tenant.key.encode(), Client(tenant.name)) for tenant in config.tenants]
        self.has_tenants = bool(self._clients)
        self.has_admin = config.admin_key is not None
        self.has_scraper = config.metrics_key is not None
        if config.admin_key is not None:
            self._clients.append((config.admin_key.encode(), Client(is_admin=True)))
        if config.metrics_key is not None:
            self._clients.append((config.metrics_key.encode(), Client(is_scraper=True)))

    def client(self, key: bytes | None) -> Client | None:
        """Whose key it is; ``None`` if nobody's."""
        found = None
        for known, client in self._clients:  # all of them, so that the time tells nothing
            if key is not None and secrets.compare_digest(known, key):
                found = client
        return found


def with_shares(offload: OffloadConfig | None, config: ServeConfig) -> OffloadConfig | None:
    """Options of the connector, in which each tenant has its share. Raises ``ConfigError`` if there is nothing to share.

    Keys without options are tenants without limits. They are counted, too, where there may be so many shares, and the policy
    has shares at all.
    """
    tenants = config.tenants
    if offload is None:
        if tenants:
            names = [tenant.name for tenant in tenants]
            raise ConfigError("--tenants", names, "shares of host memory need --host-bytes")
        return None
    allowed: Mapping[str, Any] = {tenant.name: tenant.hints for tenant in tenants if tenant.hints is not None}
    hints = replace(offload.hints, allow_of={**offload.hints.allow_of, **allowed})
    quotas = [*offload.quotas, *(tenant.quota() for tenant in tenants)]
    identities = map(tenant_of, config.api_keys)
    counted = [TenantQuota(tenant=identity, label=config.label_of(identity)) for identity in identities]
    if len(quotas) + len(counted) < MAX_SHARES and issubclass(find_policy(offload.policy), RunsPolicy):
        quotas += counted
    return replace(offload, quotas=quotas, hints=hints)


@functools.lru_cache(maxsize=1024)
def tenant_of(key: str) -> str:
    """The identity of whoever has a key. It is part of salts, so of KV events, and chunks on disk are found under it again.

    Nothing random is in it, so whoever reads it can try keys: each guess is made to cost what ``scrypt`` costs (RFC 7914).
    """
    made = hashlib.scrypt(key.encode(), salt=b"cargohold-tenant", n=_NUM_SCRYPT_BLOCKS, r=8, p=1, dklen=_SALT_BYTES)
    return made.hex()
