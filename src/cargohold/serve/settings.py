"""The server's own options, and who its clients are."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from cargohold.errors import ConfigError
from cargohold.units import MAX_TIMEOUT_S, is_int, is_number, is_positive_int

DEFAULT_BODY_BYTES = 8 * 1024**2
"""Largest body of a request by default: the text of some two million tokens."""
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of the server. Checked when made; raises ``ConfigError`` naming the option.

    Attributes:
        host, port: where it listens; port 0 takes any free one.
        api_keys: each is a tenant, whose requests share cached KV with nobody else's. None lets everybody in.
        admin_key: may see everybody's requests, and reset the cache. Without one, nobody may reset it.
        served_names: names that clients may ask for the model by, the first of which is shown.
        max_queue: requests that wait beside those that the engine runs at the same time; more are refused.
        max_body_bytes: largest body of a request.
        max_connections: open connections, idle ones included; requests on more are refused.
        read_timeout_s: a request whose body has not come after so many seconds is refused.
        write_timeout_s: a client that takes nothing for so many seconds is taken to be gone.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    served_names: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_connections: int = 1024
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self._require("port", is_int(self.port) and 0 <= self.port <= 65535, "a number from 0 (any free port) to 65535")
        self._require("max_queue", is_int(self.max_queue) and self.max_queue >= 0, "an integer from 0")
        for key in ("max_body_bytes", "max_connections"):
            self._require(key, is_positive_int(getattr(self, key)), "an integer from 1")
        for key in ("read_timeout_s", "write_timeout_s"):
            value = getattr(self, key)
            self._require(key, is_number(value) and 0 < value <= MAX_TIMEOUT_S, "a number of seconds above 0")
        for name, keys in (("api_key", self.api_keys), ("admin_key", (self.admin_key,))):
            if not all(key is None or (key and key.isascii() and key.isprintable()) for key in keys):
                raise ConfigError(f"--{name.replace('_', '-')}", "***", "it must be printable ASCII, as headers are")
        if self.admin_key in self.api_keys:
            raise ConfigError("--admin-key", "***", "it must not be an API key, too: clients know those")

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(field, getattr(self, field), f"it must be {expected}")


@dataclass(frozen=True, slots=True)
class Client:
    """Whoever sends a request.

    Attributes:
        tenant: what is in the salt of the tenant's requests; ``None`` for a client without an API key.
        is_admin: whether it has shown the admin key.
    """

    tenant: str | None = None
    is_admin: bool = False

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
        self._clients = [(key.encode(), Client(_tenant(key))) for key in config.api_keys]
        self.has_tenants = bool(self._clients)
        self.has_admin = config.admin_key is not None
        if config.admin_key is not None:
            self._clients.append((config.admin_key.encode(), Client(is_admin=True)))

    def client(self, key: bytes | None) -> Client | None:
        """Whose key it is; ``None`` if nobody's."""
        found = None
        for known, client in self._clients:  # all of them, so that the time tells nothing
            if key is not None and secrets.compare_digest(known, key):
                found = client
        return found


def _tenant(key: str) -> str:
    """A name that does not give the key away: salts are part of KV events. Chunks on disk are found under it again."""
    return hashlib.blake2b(key.encode(), digest_size=_SALT_BYTES, person=b"cargohold-tenant").hexdigest()
