"""The gate: connections, and what is refused before a byte of a request's body is read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cargohold.serve.errors import ApiError, error_response
from cargohold.serve.keys import shown_key
from cargohold.serve.settings import Client, Keys, ServeConfig

HEALTH: Final = "/health"
"""Answered however many requests there are: whoever asks may restart a server that does not answer."""
ANY_HOST: Final = "*"
_NUM_LARGEST_BODIES: Final = 32
"""As much as so many bodies of the largest size may be in memory, of all requests together."""
_SMALL_BODY_BYTES: Final = 64 * 1024
"""Bodies up to this size do not count: so many connections cannot hold much."""
_SPARE_CONNECTIONS: Final = 16
"""Connections beside those of requests, for whoever asks how the server is."""


class UnheardError(Exception):
    """A client does not take what it is sent."""


class Limits:
    """Refuses what it can before a byte of the body is read.

    Args:
        app: what is behind it. It finds the client in the scope's ``state``.
        config: the limits.
        hosts: the names that the server may be called by.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, hosts: Hosts) -> None:
        self._app = app
        self._config = config
        self._hosts = hosts
        self._keys = Keys(config)
        self._num_requests = 0
        self._bodies = _Bodies(_NUM_LARGEST_BODIES * config.max_body_bytes, config.num_tenants)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._hosts.check(headers.get(b"host"))
            self._check_number(scope["path"])
            scope.setdefault("state", {})["client"] = self._client(scope["path"], headers)
            self._check_size(headers.get(b"content-length", b"0"))
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        tenant = scope["state"]["client"].tenant
        body = scope["state"]["body"] = _Body(receive, self._config, partial(self._bodies.take, tenant))
        self._num_requests += 1
        try:
            with suppress(UnheardError):
                await self._app(scope, body.receive, _patient(send, self._config.write_timeout_s))
        finally:
            self._num_requests -= 1
            self._bodies.give_back(tenant, body.num_held)

    def _check_number(self, path: str) -> None:
        most = self._config.max_connections
        if self._num_requests >= most and path != HEALTH:
            message = f"{most} requests are open, which is all that this server takes: try again"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="too_many_requests", retry_after_s=1)

    def _client(self, path: str, headers: dict[bytes, bytes]) -> Client:
        keys, client = self._keys, self._keys.client(shown_key(headers)) or Client()
        is_known = client.is_admin or client.tenant is not None
        if path.startswith("/v1/"):
            is_let_in = is_known or not keys.has_tenants
        elif path.startswith("/cache"):
            is_let_in = is_known or not (keys.has_tenants or keys.has_admin)
        else:
            is_let_in = path != "/metrics" or client.reads_all_metrics or not keys.has_scraper
        if not is_let_in:
            known = "the key for metrics (--metrics-key)" if path == "/metrics" else "a key that the server knows"
            message = f"this needs {known}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        return client

    def _check_size(self, content_length: bytes) -> None:
        if content_length.isdigit() and int(content_length) > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)


class LimitedAccess:
    """What the front is told of who asks, where the gate has let them in."""

    serves_pins = False

    def admit(self, scope: Scope) -> Client:
        client: Client = scope["state"]["client"]
        return client


class _Bodies:
    """Bytes of bodies that are in memory. Tenants share them as they share places; see ``RequestAdmission``."""

    def __init__(self, limit: int, num_tenants: int) -> None:
        self._limit = limit
        self._share = limit // num_tenants
        self._held: Counter[str | None] = Counter()

    def take(self, tenant: str | None, num_bytes: int) -> None:
        """Count bytes that have come. Raises ``ApiError`` 503 if there are too many."""
        if self._held.total() + num_bytes > self._limit and self._held[tenant] + num_bytes > self._share:
            message = (
                f"bodies of {self._limit} bytes are being worked on, which is all that this server takes: try again"
            )
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="too_many_bytes", retry_after_s=1)
        self._held[tenant] += num_bytes

    def give_back(self, tenant: str | None, num_bytes: int) -> None:
        """Count them no more."""
        self._held[tenant] -= num_bytes


class _Body:
    """The body of one request, as it comes in.

    Args:
        receive: has it.
        config: the limits.
        take: counts its bytes, of a large one.

    Attributes:
        num_bytes: how much has come.
        num_held: how much was counted.
    """

    def __init__(self, receive: Receive, config: ServeConfig, take: Callable[[int], None]) -> None:
        self._receive = receive
        self._take = take
        self.num_held = 0
        self._max_bytes = config.max_body_bytes
        self._timeout_s = config.read_timeout_s
        self._deadline = asyncio.get_running_loop().time() + config.read_timeout_s
        self.num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """The next message, within the limits. Behind the body follows only that the client is gone, whenever that is."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            self._is_whole = True
            expected = f"the body has not come within {self._timeout_s:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, expected) from error
        self.num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        if self.num_bytes > _SMALL_BODY_BYTES:
            self._take(self.num_bytes - self.num_held)
            self.num_held = self.num_bytes
        return message


def too_large(max_bytes: int) -> ApiError:
    """The refusal of a body that is too large."""
    message = f"the body of a request may have {max_bytes} bytes here (--max-body-bytes)"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _patient(send: Send, timeout_s: float) -> Send:
    """Sends that end with ``UnheardError`` when the client takes nothing for so long."""

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError as error:
            raise UnheardError from error

    return send_in_time


# --- names of the server ----------------------------------------------------------------------------------------------


class Hosts:
    """The names that a server may be called by, if it listens for its own machine alone.

    A page from elsewhere can have a browser here ask this server, by a name of its own that it has made to point here. Its
    answers would be the page's to read.

    Args:
        address: where the server listens.
        names: further names; ``*`` allows all.
    """

    def __init__(self, address: str, names: Iterable[str]) -> None:
        self._names = {"localhost", address.lower(), *(name.lower() for name in names)}
        self._allows_all = ANY_HOST in self._names or not _is_loopback(address)

    def check(self, host: bytes | None) -> None:
        """Raise ``ApiError`` 403 for a ``Host`` header with another name. Browsers send one."""
        if self._allows_all or host is None:
            return
        name = _without_port(host.decode("latin-1").lower())
        if name not in self._names and not name.endswith(".localhost") and not _is_loopback(name):
            message = (
                f"this server is for its own machine, and not known as {name!r:.100}: allow it with --allowed-host"
            )
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="host_not_allowed")


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").removesuffix(".")


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ip_address(address).is_loopback
    return False


# --- connections ------------------------------------------------------------------------------------------------------


class GuardedConnection(H11Protocol):
    """A connection that must say what it wants in time, and makes room for others while it wants nothing.

    ::

        made ---- headers ----> a request is answered ----> idle ---- headers ----> ...
          |<- header_timeout_s ->|                           |<-->| closed by uvicorn
                                                                  |<- header_timeout_s ->|

    Args:
        limits: how long that may take, and how many connections there may be.
        of_uvicorn: see ``H11Protocol``.
    """

    def __init__(self, *, limits: ServeConfig, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self.has_asked = False
        self.idle_since = self.loop.time()

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        cycle: Any = self.cycle  # none before the first request, whatever uvicorn declares
        return cycle is None or bool(cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for headers. If there are too many connections, the one that has been idle longest is closed."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._limits.max_connections + _SPARE_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, GuardedConnection) and one.is_idle]
            idle = [one for one in idle if not one.transport.is_closing()]
            min(idle, key=lambda one: (one.has_asked, one.idle_since)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to be idle."""
        self.has_asked = True
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        """Wait for the end of the headers, once something of them has come, or of what nobody reads any more."""
        if not self.is_idle:
            self._stop_watching()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._limits.header_timeout_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connections(limits: ServeConfig) -> Any:
    return partial(GuardedConnection, limits=limits)
