"""The server's own options."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Annotated, Final

from cargohold.connector.offloading import OffloadConfig, TenantQuota
from cargohold.connector.tenants import Tenant, check_keys, with_quotas
from cargohold.errors import ConfigError
from cargohold.option_values import is_int
from cargohold.options import INT_FROM_0, INT_FROM_1, SHORT_TIME, Options, must

DEFAULT_BODY_BYTES = 8 * 1024**2
"""Largest body of a request by default: the text of some two million tokens."""
_SALT_BYTES = 16
_NUM_SCRYPT_BLOCKS = 2**14
"""What a guess of a key costs anyone who has a salt: 16 MiB, and tens of milliseconds."""

_PORT: Final = must(lambda value: is_int(value) and 0 <= value <= 65535, "a number from 0 (any free port) to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(Options):
    """Options of the server. Checked when made; raises ``ConfigError`` naming the option.

    Attributes:
        host, port: where it listens; port 0 takes any free one.
        api_keys: each is a tenant, whose requests share cached KV with no other tenant. None lets everyone in.
        tenants: the same, with names and shares of host memory.
        admin_key: may see everyone's requests, and reset the cache. Without one, it can't be reset.
        metrics_key: may read metrics, and nothing else. Without one, everyone may read those that name no tenant.
        allowed_hosts: names that clients may call the server by where it listens for its own machine alone, besides
            ``localhost`` and its address; ``*`` for any.
        served_names: names that clients may ask for the model by, the first of which is shown.
        max_queue: requests that wait besides those that the engine runs at the same time; more are refused.
        max_body_bytes: largest body of a request.
        max_connections: requests that are open; more are refused. There may be a few more connections: then the one that has
            been idle longest is closed.
        header_timeout_s: a connection that has not said what it wants after so many seconds is closed.
        read_timeout_s: a request whose body has not come after so many seconds is refused.
        write_timeout_s: a client that takes nothing for so many seconds is taken to be gone.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, _PORT] = 8000
    api_keys: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    admin_key: str | None = None
    metrics_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    max_queue: Annotated[int, INT_FROM_0] = 256
    max_body_bytes: Annotated[int, INT_FROM_1] = DEFAULT_BODY_BYTES
    max_connections: Annotated[int, INT_FROM_1] = 1024
    header_timeout_s: Annotated[float, SHORT_TIME] = 10.0
    read_timeout_s: Annotated[float, SHORT_TIME] = 30.0
    write_timeout_s: Annotated[float, SHORT_TIME] = 60.0

    def __post_init__(self) -> None:
        known = [*self.api_keys, *(tenant.key for tenant in self.tenants)]
        check_keys("--api-key", known)
        for name, key in {"--admin-key": self.admin_key, "--metrics-key": self.metrics_key}.items():
            if key is not None:
                check_keys(name, [key])
                if key in known:
                    raise ConfigError(name, "***", "it must differ from all other keys")
                known.append(key)

    def label_of(self, tenant: str | None) -> str | None:
        """What people and metrics see in place of a tenant: of a key its place, such as ``key/2``."""
        places = (f"key/{at}" for at, key in enumerate(self.api_keys, 1) if tenant_of(key) == tenant)
        return next(places, tenant)

    @property
    def num_tenants(self) -> int:
        """How many clients are kept apart, the admin included. All that need no key are one."""
        num_keys = len(self.api_keys) + len(self.tenants)
        return num_keys + (self.admin_key is not None) if num_keys else 1


def with_shares(offload: OffloadConfig | None, config: ServeConfig) -> OffloadConfig | None:
    """Options of the connector, in which each tenant has its share. Raises ``ConfigError`` if there is nothing to share.

    Keys without options are tenants without limits.
    """
    tenants = config.tenants
    if offload is None:
        if tenants:
            names = [tenant.name for tenant in tenants]
            raise ConfigError("--tenants", names, "shares of host memory need --host-bytes")
        return None
    allowed = {tenant.name: tenant.hints for tenant in tenants if tenant.hints is not None}
    identities = map(tenant_of, config.api_keys)
    counted = [TenantQuota(tenant=identity, label=config.label_of(identity)) for identity in identities]
    return with_quotas(offload, [tenant.quota() for tenant in tenants], counted, allowed)


@functools.lru_cache(maxsize=1024)
def tenant_of(key: str) -> str:
    """The identity of the owner of a key. It is part of salts, so of KV events, and chunks on disk are found under it again.

    Nothing random is in it, so anyone who reads it can try keys: each guess is made to cost what ``scrypt`` costs (RFC 7914).
    """
    made = hashlib.scrypt(key.encode(), salt=b"cargohold-tenant", n=_NUM_SCRYPT_BLOCKS, r=8, p=1, dklen=_SALT_BYTES)
    return made.hex()
