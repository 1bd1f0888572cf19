"""The gate: connections, and what is refused before a byte of a request's body is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cargohold.serve.access import Client, KeyRing, missing_key, shown_key
from cargohold.serve.errors import ApiError, error_response
from cargohold.serve.settings import ServeConfig, tenant_of
from cargohold.serve.turns import Room

HEALTH: Final = "/health"
"""Answered however many requests there are: the caller may restart a server that does not answer."""
ANY_HOST: Final = "*"
_NUM_LARGEST_BODIES: Final = 32
"""As much as so many bodies of the largest size may be in memory, of all requests together."""
_SMALL_BODY_BYTES: Final = 64 * 1024
"""Bodies up to this size do not count: so many connections cannot hold much."""
_SPARE_CONNECTIONS: Final = 16
"""Connections besides those of requests, for the caller how the server is."""


class UnheardError(Exception):
    """A client does not take what it is sent."""


class Limits:
    """Refuses what it can before a byte of the body is read.

    Args:
        app: the application that it wraps. It finds the client in the scope's ``state``.
        config: the limits.
        hosts: the names that the server may be called by.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, hosts: Hosts) -> None:
        self._app = app
        self._config = config
        self._hosts = hosts
        self._ring = KeyRing(_clients(config))
        self._num_requests = 0
        self._bodies = Room(_NUM_LARGEST_BODIES * config.max_body_bytes, config.num_tenants)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._hosts.check(headers.get(b"host"))
            self._check_number(scope["path"])
            scope.setdefault("state", {})["client"] = self._client(scope)
            self._check_size(headers.get(b"content-length", b"0"))
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        tenant, connection = scope["state"]["client"].tenant, scope["state"].get("connection")
        body = scope["state"]["body"] = _Body(receive, self._config, partial(self._hold, tenant))
        self._num_requests += 1
        try:
            with suppress(UnheardError), connection or nullcontext():
                await self._app(scope, body.receive, _patient(send, self._config.write_timeout_s))
        finally:
            self._num_requests -= 1
            self._bodies.give_back(tenant, body.num_held)

    def _check_number(self, path: str) -> None:
        most = self._config.max_connections
        if self._num_requests >= most and path != HEALTH:
            message = f"{most} requests are open, the limit of this server: try again"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="too_many_requests", retry_after_s=1)

    def _client(self, scope: Scope) -> Client:
        path, config = scope["path"], self._config
        client = self._ring.find(shown_key(scope)) or Client()
        is_known = client.is_admin or client.tenant is not None
        has_tenants = bool(config.api_keys or config.tenants)
        if path.startswith("/v1/"):
            is_let_in = is_known or not has_tenants
        elif path.startswith("/cache"):
            is_let_in = is_known or not (has_tenants or config.admin_key)
        else:
            is_let_in = path != "/metrics" or client.reads_all_metrics or not config.metrics_key
        if not is_let_in:
            is_scrape = path == "/metrics"
            raise missing_key("the key for metrics (--metrics-key)" if is_scrape else "a key that the server knows")
        return client

    def _hold(self, tenant: str | None, num_bytes: int) -> None:
        """Count bytes of bodies that are in memory."""
        if not self._bodies.take(tenant, num_bytes):
            most = self._bodies.limit
            message = f"bodies of {most} bytes are in progress, the limit of this server: try again"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="too_many_bytes", retry_after_s=1)

    def _check_size(self, content_length: bytes) -> None:
        if content_length.isdigit() and int(content_length) > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)


def _clients(config: ServeConfig) -> Iterator[tuple[str, Client]]:
    """Yield keys, and the client of each."""
    for key in config.api_keys:
        yield key, Client(tenant_of(key))
    for tenant in config.tenants:
        yield tenant.key, Client(tenant.name)
    if config.admin_key is not None:
        yield config.admin_key, Client(is_admin=True)
    if config.metrics_key is not None:
        yield config.metrics_key, Client(is_scraper=True)


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
        self._config = config
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
            expected = f"the body did not arrive within {self._config.read_timeout_s:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, expected) from error
        self.num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self.num_bytes > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)
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
            message = f"this server does not accept the host name {name!r:.100}: allow it with --allowed-host"
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="host_not_allowed")


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").removesuffix(".")


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ip_address(address).is_loopback
    return False


# --- connections ------------------------------------------------------------------------------------------------------


class Connection:
    """A connection that must say what it wants in time, and makes room for others while it wants nothing.

    ::

        made ---- headers ----> a request is answered ----> idle ---- headers ----> ...
          |<- header_timeout_s ->|                           |<-->| closed by uvicorn
                                                                  |<- header_timeout_s ->|

    It stands between the event loop and what uvicorn makes of a connection. A request is answered within its ``with``.

    Args:
        limits: how long that may take, and how many connections there may be.
        others: all connections of the server.
        app_state: of uvicorn; the scopes of requests have it as their ``state``, with the connection in it.
        of_uvicorn: see ``H11Protocol``.
    """

    def __init__(
        self, limits: ServeConfig, others: set[Connection], *, app_state: dict[str, Any], **of_uvicorn: Any
    ) -> None:
        self._limits = limits
        self._others = others
        self._http: Any = H11Protocol(app_state={**app_state, "connection": self}, **of_uvicorn)
        self._loop = asyncio.get_running_loop()
        self.transport: Any = None  # until ``connection_made``
        self._deadline: asyncio.TimerHandle | None = None
        self.num_requests = 0
        self.has_asked = False
        self.idle_since = self._loop.time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._http, name)  # what else the event loop says

    def __enter__(self) -> None:
        self.num_requests += 1
        self._stop_watching()

    def __exit__(self, *_: object) -> None:
        self.num_requests -= 1
        self.has_asked, self.idle_since = True, self._loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers. If there are too many connections, the one that has been idle longest is closed."""
        self.transport = transport
        self._others.add(self)
        self._http.connection_made(transport)
        self._watch()
        if len(self._others) > self._limits.max_connections + _SPARE_CONNECTIONS:
            idle = [one for one in self._others if one.is_idle]
            min(idle, key=lambda one: (one.has_asked, one.idle_since)).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Wait for the end of the headers, once something of them has come, or of what is no longer read."""
        self._http.data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        """Wait for nothing any more."""
        self._others.discard(self)
        self._http.connection_lost(error)
        self._stop_watching()

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered, and it is not being closed."""
        return not self.num_requests and not self.transport.is_closing()

    def _watch(self) -> None:
        if self._deadline is None and self.is_idle:
            self._deadline = self._loop.call_later(self._limits.header_timeout_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connections(limits: ServeConfig) -> Any:
    """What uvicorn makes connections with."""
    return partial(Connection, limits, set())
