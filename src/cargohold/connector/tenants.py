"""Tenants: who may use an engine, with which key, and how much of host memory; and the salts that keep their caches apart.

A front in front of an engine and the connector inside it read the same file, each in its own process. A salt is an HMAC of the
tenant's name under a secret that is stored next to that file: it reveals no key, and can't be made without the secret. Under
it, chunks on disk are found again after a restart, or with another key. All engines behind a front, and all that share a store,
need the same secret: under another one, no tenant is known, and requests have the least rights that there are.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

from cargohold.cache.policies import RunsPolicy, find_policy
from cargohold.cache.shares import MAX_SHARES
from cargohold.connector.config import HINTS_OFF, LAZY, HintConfig, OffloadConfig, TenantQuota, check_parts
from cargohold.errors import ConfigError, one_line, option_path

FILE_VARIABLE: Final = "CARGOHOLD_TENANTS"
"""Environment variable that names the file of tenants."""
FINGERPRINT: Final = "secret"
"""Besides the tenants, the file may say the fingerprint of the secret: then a start with another secret is refused."""
_SECRET_BYTES: Final = 32
_MARK: Final = "ch1."
"""What salts of ours begin with. vLLM allows 128 characters, and none of ``@/\\``."""
_DIGITS: Final = 32
UNKNOWN: Final = f"{_MARK}unknown"
"""The identity of every tenant of a front that the engine does not know."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A client with a key, and a share of host memory. Checked when made; raises ``ConfigError`` naming the option.

    Attributes:
        name: what metrics and people call the tenant.
        key: what its clients send.
        reserved, soft, hard: see ``TenantQuota``.
        hints: which hints of its clients are carried out: ``all``, ``retain``, or ``off``; ``None`` for the server's default.
    """

    name: str
    key: str = field(repr=False)
    reserved: int | str = 0
    soft: int | str | None = None
    hard: int | str | None = None
    hints: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise ConfigError("--tenants", self.name, "its key must be text")
        if not self.name or not self.name.isprintable() or "/" in self.name:
            raise ConfigError("--tenants", self.name, "a tenant's name must be printable text without a slash")
        check_keys("--tenants", [self.key], self.name)
        with option_path(f"{self.name}."):
            self.quota()
            HintConfig(allow="all" if self.hints is None else self.hints)

    @property
    def has_limits(self) -> bool:
        """Whether it has a quota, and is not only counted."""
        return bool(self.reserved) or self.soft is not None or self.hard is not None

    def quota(self, identity: str | None = None) -> TenantQuota:
        """Its share, for a connector that knows it by ``identity``, or else by its name."""
        return TenantQuota(
            tenant=identity or self.name, label=self.name, reserved=self.reserved, soft=self.soft, hard=self.hard
        )

    @classmethod
    def read(cls, file: str | Path) -> tuple[Self, ...]:
        """Read tenants from a file: a JSON object with their options by name. Raises ``ConfigError`` if it has others."""
        known = [option.name for option in fields(cls) if option.name != "name"]
        named = _named(Path(file))
        expected = f'it must be an object such as {{"acme": {{"key": "..."}}}}; there are {", ".join(known)}'
        if not isinstance(named, dict):
            raise ConfigError("--tenants", str(file), expected)
        if isinstance(named.get(FINGERPRINT), str):
            del named[FINGERPRINT]
        for name, options in named.items():
            if not isinstance(options, dict) or "key" not in options or options.keys() - known:
                raise ConfigError("--tenants", name, expected)
        tenants = tuple(cls(name=name, **options) for name, options in named.items())
        check_parts([tenant.quota() for tenant in tenants])
        return tenants


def check_keys(option: str, keys: Sequence[str], owner: str = "***") -> None:
    """Raise ``ConfigError`` unless these are keys that headers can carry, each once. It names none."""
    if not all(key and key.isascii() and key.isprintable() and key == key.strip() for key in keys):
        raise ConfigError(option, owner, "a key must be printable ASCII without spaces around it, as headers are")
    if len(set(keys)) < len(keys):
        raise ConfigError(option, owner, "a key must not be given twice: each is one tenant's")


def _named(file: Path) -> Any:
    """What a file of tenants says, by name. Raises ``ConfigError`` unless it is JSON that only its owner may read."""
    _check_owner_only(file)
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError) as error:
        raise ConfigError("--tenants", str(file), f"it must be a file of JSON ({one_line(error)})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ``ValueError`` for a name that stands in it twice, of which JSON keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.100} stands in it twice")
    return found


def _check_owner_only(file: Path) -> None:
    if file.is_file() and file.stat().st_mode & 0o077:
        raise ConfigError("--tenants", str(file), "others can read the keys or the secret in it: chmod 600")


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of an engine, and how their salts are made.

    Attributes:
        known: the tenants.
        secret: under which the salts are made.
    """

    known: tuple[Tenant, ...] = ()
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def read(cls, file: str | Path) -> Self:
        """Read the file, and the secret next to it, which is made if there is none. Raises ``ConfigError``."""
        known, fingerprint = Tenant.read(file), _named(Path(file)).get(FINGERPRINT)
        if not known:
            raise ConfigError(FILE_VARIABLE, str(file), "it names no tenant: leave the variable out")
        check_keys(FILE_VARIABLE, [tenant.key for tenant in known])
        is_wanted = isinstance(fingerprint, str)
        tenants = cls(known, stored_secret(Path(f"{file}.secret"), may_make=not is_wanted))
        if is_wanted and tenants.fingerprint != fingerprint:
            expected = (
                f"that is the secret {tenants.fingerprint}, and {file} names {fingerprint}: copy the other one here"
            )
            raise ConfigError(FILE_VARIABLE, f"{file}.secret", expected)
        return tenants

    @classmethod
    def of_environment(cls) -> Self:
        """Read the file that the environment names; none if it names none. Raises ``ConfigError``."""
        file = os.environ.get(FILE_VARIABLE)
        return cls.read(file) if file else cls()

    @property
    def fingerprint(self) -> str:
        """By which people tell secrets apart."""
        return self._digest("fingerprint")[:8]

    def identity(self, name: str) -> str:
        """What connectors know a tenant by: its salt."""
        return f"{_MARK}{self._digest(name)}"

    def salt(self, name: str, cache_salt: str | None) -> str:
        """The salt of a tenant's request, within which its client may keep users apart by a salt of its own."""
        own = self.identity(name)
        return own if cache_salt is None else f"{own}.{self._digest(f'{name}/{cache_salt}')}"

    def shared(self, offload: OffloadConfig) -> OffloadConfig:
        """The options of a connector in which each tenant has its share and its rights; unknown ones together the least."""
        allowed = {self.identity(one.name): one.hints for one in self.known if one.hints is not None} | {
            UNKNOWN: HINTS_OFF
        }
        limited = [one.quota(self.identity(one.name)) for one in self.known if one.has_limits]
        hard = [quota for quota in limited if quota.hard is not None]
        if hard and len(limited) + len(offload.quotas) < MAX_SHARES - 1:
            least = min(hard, key=lambda quota: quota.limits(offload.num_host_bytes, 1).hard or 0).hard
            limited.append(TenantQuota(tenant=UNKNOWN, label="unknown", soft=0, hard=least))
        counted = [one.quota(self.identity(one.name)) for one in self.known if not one.has_limits]
        return with_quotas(offload, limited, counted, allowed)

    def _digest(self, text: str) -> str:
        made = hmac.new(self.secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return made.hexdigest()[:_DIGITS]


def with_quotas(
    offload: OffloadConfig, limited: Sequence[TenantQuota], counted: Sequence[TenantQuota], allowed: Mapping[str, str]
) -> OffloadConfig:
    """Options of a connector with these quotas and rights to give hints.

    Those that limit nothing are ``counted`` where there may be so many shares, and the policy has shares at all: then a tenant
    that needs a place takes it from the one that has most.
    """
    quotas = [*offload.quotas, *limited]
    has_shares = offload.mode != LAZY and not offload.manager and issubclass(find_policy(offload.policy), RunsPolicy)
    if has_shares and len(quotas) + len(counted) < MAX_SHARES:
        quotas += counted
    return replace(offload, quotas=quotas, hints=replace(offload.hints, allow_of={**offload.hints.allow_of, **allowed}))


def tenant_in(salt: str | None) -> str | None:
    """Whose request it is that has this salt: of a front's, the tenant's part; of others, all of it."""
    if salt is None or not salt.startswith(_MARK):
        return salt
    found = salt[: len(_MARK) + _DIGITS]
    return found if found in _identities(os.environ.get(FILE_VARIABLE)) else _unknown()


@cache
def _identities(file: str | None) -> frozenset[str]:
    """The tenants of this process, which reads their file once."""
    tenants = Tenants.read(file) if file else Tenants()
    return frozenset(map(tenants.identity, [tenant.name for tenant in tenants.known]))


@cache
def _unknown() -> str:
    logger.warning(
        "requests have salts of tenants that are unknown here: they get no hints, and the smallest share. The front has"
        " another secret, or another file (%s): copy both to here, and start again",
        FILE_VARIABLE,
    )
    return UNKNOWN


def stored_secret(file: Path, *, may_make: bool = True) -> bytes:
    """Read a secret from a file that only its owner may read; made if there is none. Raises ``ConfigError``."""
    try:
        if may_make and not file.exists():
            _make(file)
        _check_owner_only(file)
        secret = file.read_bytes()
    except OSError as error:
        expected = f"the secret of salts must be readable, or the directory writable ({one_line(error)})"
        raise ConfigError(FILE_VARIABLE, str(file), expected) from error
    if len(secret) < _SECRET_BYTES:
        raise ConfigError(FILE_VARIABLE, str(file), f"the secret of salts must have {_SECRET_BYTES} bytes at least")
    return secret


def _make(file: Path) -> None:
    """Make a secret. Processes that make it at the same time get the same: only one of them gives the file its name."""
    drawn = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(drawn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_SECRET_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        with suppress(FileExistsError):
            os.link(drawn, file)
    finally:
        drawn.unlink()
