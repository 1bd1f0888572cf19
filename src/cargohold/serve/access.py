"""Who asks a server, by the key that it shows, and for what it may ask."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar, cast

from starlette.types import Scope

from cargohold.connector.tenants import Tenants
from cargohold.serve.errors import ApiError

PROMPTS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Paths of requests that a model answers, of which clients can say something."""
PINS: Final = "/cache/pins"
_KEY_HEADERS: Final = (b"authorization", b"x-api-key")
_READS: Final = ("GET", "HEAD")
_OPEN: Final = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What anyone who reaches the server may read, as without a front."""
_HARMLESS: Final = frozenset({"/v1/models", "/v1/messages/count_tokens", "/tokenize", "/detokenize", PINS})
_HARMLESS_BELOW: Final = ("/v1/models/", "/v1/responses/", f"{PINS}/")
"""What tenants may ask besides prompts: nothing of it is cached. All else in vLLM is its operator's."""
_TENANT_PARAMS: Final = frozenset(
    {"agent_hint", "cargohold_explain", "cargohold_hints", "kv_hint", "max_load_tokens", "max_store_tokens"}
)
"""What tenants may ask of connectors. Other parameters name blocks and engines, which are not theirs to give."""
_WITHHELD: Final = ("ec_transfer_params", "request_id", "vllm_xargs")
"""Fields that tenants may not give: engines, ids by which others' answers are found, and a way around the parameters above."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Client:
    """The client that sends a request.

    Attributes:
        tenant: its identity, by which it is kept apart from others; ``None`` where no key is known, and for vLLM's operator.
        is_admin: whether it has shown the admin key.
        is_scraper: whether it has shown the key for metrics.
        withheld: fields of bodies that it may not give.
    """

    tenant: str | None = None
    is_admin: bool = False
    is_scraper: bool = False
    withheld: Sequence[str] = ()

    @property
    def reads_all_metrics(self) -> bool:
        """Whether it may see those of tenants."""
        return self.is_admin or self.is_scraper

    def sees(self, tenant: str | None) -> bool:
        """Whether it may see what is a tenant's: its own, or as the admin everyone's."""
        return self.is_admin or self.tenant == tenant

    def salt(self, cache_salt: str | None) -> str | None:
        """The salt of a request: the tenant's own, and within it the client's."""
        if self.tenant is None:
            return cache_salt
        return self.tenant if cache_salt is None else f"{self.tenant}/{cache_salt}"

    def allowed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What it may ask of connectors, of all that it asks."""
        return dict(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTenant(Client):
    """A client of vLLM's with a tenant's key, by whose name it is known.

    Attributes:
        tenants: make its salts.
    """

    tenant: str
    withheld: Sequence[str] = _WITHHELD
    tenants: Tenants

    def salt(self, cache_salt: str | None) -> str:
        return self.tenants.salt(self.tenant, cache_salt)

    def allowed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What names no blocks and no engines."""
        return {name: value for name, value in params.items() if name in _TENANT_PARAMS}


# --- keys -------------------------------------------------------------------------------------------------------------


class KeyRing(Generic[T]):
    """Knows whose a key is.

    Args:
        owners: keys, and whose they are.
    """

    def __init__(self, owners: Iterable[tuple[str, T]]) -> None:
        self._owners = [(key.encode(), owner) for key, owner in owners]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def find(self, key: bytes | None) -> T | None:
        """The owner of the key; ``None`` if there is none."""
        found = None
        for known, owner in self._owners:  # all of them, so that the time tells nothing
            if key is not None and secrets.compare_digest(known, key):
                found = owner
        return found


def shown_key(scope: Scope) -> bytes | None:
    """The key as clients of OpenAI send it, or else as those of Anthropic do.

    Raises:
        ApiError: there are several in headers of one name, of which the server behind may read another.
    """
    headers = dict(scope["headers"])
    names = [name for name, _ in scope["headers"]]
    if any(names.count(name) > 1 for name in _KEY_HEADERS):
        raise ApiError(HTTPStatus.BAD_REQUEST, "Authorization and x-api-key may each be sent once", code="two_keys")
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")


class VllmAccess:
    """Who may ask vLLM's server for what. It knows keys in ``Authorization: Bearer`` only, and no tenants.

    Args:
        tenants: the tenants; without any, vLLM decides who is let in.
    """

    serves_pins = True
    """Whether the front is to serve pins, because the server that it wraps does not."""

    def __init__(self, tenants: Tenants) -> None:
        known = ((tenant.key, VllmTenant(tenant=tenant.name, tenants=tenants)) for tenant in tenants.known)
        self._ring = KeyRing[Client](known)

    def admit(self, scope: Scope) -> Client:
        """Return the client; may rewrite the scope's headers. Raises ``ApiError`` if it may not ask this."""
        key, own = shown_key(scope), _keys_of_vllm(scope)
        if not self._ring:
            if key is not None and b"authorization" not in dict(scope["headers"]):
                _show(scope, key)
            return Client()
        client = self._ring.find(key)
        if client is not None:
            _check_path(path_of(scope))
            _show(scope, own[0].encode() if own else None)
            return client
        is_operator = KeyRing((one, True) for one in own).find(key)
        if is_operator and key is not None:
            _show(scope, key)
        elif scope.get("method") != "OPTIONS" and not (scope.get("method") in _READS and path_of(scope) in _OPEN):
            raise missing_key("a key that the server knows")
        return Client()


class LimitedAccess:
    """Who may ask our own server, whose limits stand in front, and have found the client."""

    serves_pins = False

    def admit(self, scope: Scope) -> Client:
        return cast("Client", scope["state"]["client"])


def missing_key(needed: str) -> ApiError:
    """The refusal of a request without a key that it needs."""
    message = f"this needs {needed}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def path_of(scope: Scope) -> str:
    """The path that was asked for, below that at which the server stands."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _check_path(path: str) -> None:
    if path not in PROMPTS and path not in _HARMLESS and not path.startswith(_HARMLESS_BELOW):
        message = f"{path:.100} is not for tenants: send vLLM's own key (--api-key)"
        raise ApiError(HTTPStatus.FORBIDDEN, message, code="operator_only")


def _keys_of_vllm(scope: Scope) -> list[str]:
    """VLLM's own keys, of its command line or of its environment."""
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in given if key]


def _show(scope: Scope, key: bytes | None) -> None:
    """Let the server behind see this key, and no other."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _KEY_HEADERS]
    scope["headers"] = headers if key is None else [*headers, (b"authorization", b"Bearer " + key)]
