"""Who may ask vLLM's server for what: tenants by their keys, and its operator by vLLM's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from starlette.types import Scope

from cargohold.connector.tenants import Tenants
from cargohold.serve.errors import ApiError
from cargohold.serve.keys import KeyRing, shown_key

PROMPTS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Paths of requests that a model answers, of which clients can say something."""
PINS: Final = "/cache/pins"
_OPEN: Final = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What whoever reaches the server may read, as without a front."""
_HARMLESS: Final = frozenset({"/v1/models", "/v1/messages/count_tokens", "/tokenize", "/detokenize", PINS})
_HARMLESS_BELOW: Final = ("/v1/models/", "/v1/responses/", f"{PINS}/")
"""What tenants may ask besides prompts: nothing of it is cached. All else in vLLM is its operator's."""
_TENANT_PARAMS: Final = frozenset(
    {"agent_hint", "cargohold_explain", "cargohold_hints", "kv_hint", "max_load_tokens", "max_store_tokens"}
)
"""What tenants may ask of connectors. Other parameters name blocks and engines, which are not theirs to give."""
_WITHHELD: Final = ("ec_transfer_params", "request_id", "vllm_xargs")
"""Fields that tenants may not give: engines, ids by which others' answers are found, and a way around the parameters above."""


class RequestClient(Protocol):
    """Whoever sends a request."""

    @property
    def tenant(self) -> str | None:
        """The tenant; ``None`` where nobody is told apart."""

    def salt(self, cache_salt: str | None) -> str | None:
        """The salt of a request whose client has given one of its own, or none."""

    @property
    def withheld(self) -> Sequence[str]:
        """Fields of bodies that it may not give."""

    def allowed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What it may ask of connectors, of all that it asks."""


class Access(Protocol):
    """Who may ask for what.

    Attributes:
        serves_pins: whether the front is to serve pins, because the server behind it does not.
    """

    serves_pins: bool

    def admit(self, scope: Scope) -> RequestClient:
        """Return who asks; may rewrite the scope's headers. Raises ``ApiError`` if it may not ask this."""


@dataclass(frozen=True, slots=True)
class Anybody:
    """A client that is told apart from nobody: where there are no tenants, or vLLM's operator."""

    tenant: str | None = None
    withheld: Sequence[str] = ()

    def salt(self, cache_salt: str | None) -> str | None:
        return cache_salt

    def allowed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return dict(params)


@dataclass(frozen=True, slots=True)
class OfTenant:
    """A client with a tenant's key.

    Attributes:
        tenant: the tenant's name.
        tenants: make its salts.
    """

    tenant: str
    tenants: Tenants
    withheld: Sequence[str] = _WITHHELD

    def salt(self, cache_salt: str | None) -> str:
        """The tenant's, within which its client may keep users apart."""
        return self.tenants.salt(self.tenant, cache_salt)

    def allowed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What names no blocks and no engines."""
        return {name: value for name, value in params.items() if name in _TENANT_PARAMS}


class VllmAccess:
    """Doors in front of vLLM's own, which knows keys in ``Authorization: Bearer`` only, and no tenants.

    Args:
        tenants: the tenants; without any, vLLM decides who is let in.
    """

    serves_pins = True

    def __init__(self, tenants: Tenants) -> None:
        self._ring = KeyRing((tenant.key, OfTenant(tenant.name, tenants)) for tenant in tenants.known)

    def admit(self, scope: Scope) -> RequestClient:
        """See ``Access``."""
        headers = dict(scope["headers"])
        key, own = shown_key(headers), _keys_of_vllm(scope)
        if not self._ring:
            if key is not None and b"authorization" not in headers:
                _show(scope, key)
            return Anybody()
        client = self._ring.find(key)
        if client is not None:
            _check_path(path_of(scope))
            _show(scope, own[0].encode() if own else None)
            return client
        is_operator = KeyRing((one, True) for one in own).find(key)
        if is_operator and key is not None:
            _show(scope, key)
        elif not (scope.get("method") == "OPTIONS" or (scope.get("method") == "GET" and path_of(scope) in _OPEN)):
            message = (
                "this needs a key that the server knows: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
            raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        return Anybody()


def path_of(scope: Scope) -> str:
    """The path that was asked for, below that at which the server stands."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


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
    headers = [(name, value) for name, value in scope["headers"] if name not in {b"authorization", b"x-api-key"}]
    scope["headers"] = headers if key is None else [*headers, (b"authorization", b"Bearer " + key)]
