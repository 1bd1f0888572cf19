"""The server: routes behind a gate, errors in the form of the interface that was asked, and the thread in which it listens."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cargohold import __version__
from cargohold.errors import CargoholdError, ConfigError
from cargohold.llm import AsyncLLM
from cargohold.serve import anthropic, cache, openai
from cargohold.serve.desk import Desk, Hall, State, Watch
from cargohold.serve.errors import ApiError, api_error, error_response, invalid, json_response
from cargohold.serve.meters import Meters
from cargohold.serve.records import Records
from cargohold.serve.settings import Client, Keys, ServeConfig

_MAX_SHOWN_CHARS = 200


def make_app(desk: Desk, meters: Meters, config: ServeConfig) -> ASGIApp:
    """The application of one server.

    Args:
        desk: admits requests to the model.
        meters: count them.
        config: the server's options.
    """
    # The pages of FastAPI's own need scripts from the internet.
    app = FastAPI(title="Cargohold", version=__version__, docs_url=None, redoc_url=None, lifespan=_watching)
    hall = Hall(
        desk, config, Watch(desk, lambda llm, stats: desk.records.note_moves(cache.moved(llm, stats))), meters.registry
    )
    meters.read_also(desk, hall.watch)
    app.state.hall = hall
    app.include_router(openai.router)
    app.include_router(anthropic.router)
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/health", _health, methods=["HEAD"], include_in_schema=False)
    app.include_router(cache.router)
    app.include_router(cache.page_router)
    for kind, handler in (
        (RequestValidationError, _refused),
        (HTTPException, _failed),
        (CargoholdError, _failed),
        (ClientDisconnect, _gone),
        (Exception, _failed),  # uvicorn logs it, too
    ):
        app.add_exception_handler(kind, handler)
    return Gate(app, config)


@asynccontextmanager
async def _watching(app: FastAPI) -> AsyncGenerator[None]:
    """Look at the engine as long as the server runs."""
    hall: Hall = app.state.hall
    task = asyncio.create_task(hall.watch.run())
    yield
    task.cancel()
    await asyncio.wait([task])


async def _health(request: Request) -> Response:
    """Whether it takes requests: 200, or 503 while it starts and when it ends. Also what of the cache is out of use, and why.

    A cache that does not work makes requests slower, but the server goes on: it is healthy.
    """
    desk: Desk = request.app.state.hall.desk
    status = HTTPStatus.OK if desk.state is State.SERVING else HTTPStatus.SERVICE_UNAVAILABLE
    outages = () if desk.loaded is None else desk.loaded.status.outages
    return json_response({"status": desk.state.value, "outages": [asdict(outage) for outage in outages]}, status)


async def _refused(request: Request, error: Exception) -> Response:
    """The answer to a body that is not as it should be: where, and what would be accepted."""
    assert isinstance(error, RequestValidationError)
    # Where there are several forms, all of them report. The one that got furthest, or that this has the type of, was meant.
    worst: dict[str, Any] = max(error.errors(), key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    if worst["type"] == "json_invalid":
        reason = worst.get("ctx", {}).get("error", "")
        return error_response(request.url.path, invalid(f"the body is no JSON: {reason}"))
    param = _place(worst["loc"][1:], error.body)
    if not isinstance(error.body, dict):
        return error_response(request.url.path, invalid("the body must be a JSON object, sent as application/json"))
    given = "" if worst["type"] == "missing" else f", not {worst['input']!r:.{_MAX_SHOWN_CHARS}}"
    return error_response(request.url.path, invalid(f"{param or 'the body'}: {worst['msg']}{given}", param))


def _place(path: Sequence[object], body: object) -> str:
    """Where in the body that is, as one writes it. pydantic also names forms that a value may have: they are left out."""
    place = ""
    for part in path:
        if isinstance(part, int) and isinstance(body, list):
            place, body = f"{place}[{part}]", body[part]
        elif isinstance(body, dict) and (part in body or part is path[-1]):
            place, body = f"{place}.{part}".lstrip("."), body.get(part)
    return place


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to a request that was refused, or failed."""
    return error_response(request.url.path, api_error(error))


async def _gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this answer."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


# --- the gate ---------------------------------------------------------------------------------------------------------


class UnheardError(Exception):
    """A client does not take what it is sent."""


class Gate:
    """Refuses what it can before a byte of the body is read.

    Args:
        app: what is behind it. It finds the client in the scope's ``state``.
        config: the limits.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._config = config
        self._keys = Keys(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            scope.setdefault("state", {})["client"] = self._client(scope["path"], headers)
            self._check_size(headers.get(b"content-length", b"0"))
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        body = scope["state"]["body"] = _Body(receive, self._config)
        with suppress(UnheardError):
            await self._app(scope, body.receive, _patient(send, self._config.write_timeout_s))

    def _client(self, path: str, headers: dict[bytes, bytes]) -> Client:
        keys, client = self._keys, self._keys.client(_shown_key(headers)) or Client()
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


class _Body:
    """The body of one request, as it comes in.

    Attributes:
        num_bytes: how much has come.
    """

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive = receive
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
        return message


def too_large(max_bytes: int) -> ApiError:
    """The refusal of a body that is too large."""
    message = f"the body of a request may have {max_bytes} bytes here (--max-body-bytes)"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _shown_key(headers: dict[bytes, bytes]) -> bytes | None:
    """The key as clients of OpenAI send it, or else as those of Anthropic do."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")


def _patient(send: Send, timeout_s: float) -> Send:
    """Sends that end with ``UnheardError`` when the client takes nothing for so long."""

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError as error:
            raise UnheardError from error

    return send_in_time


_FAREWELL_S = 2
"""How long connections may take to get their last answers."""
_KEEP_ALIVE_S = 30
"""How long a connection may be idle. Clients keep theirs, and some fail when one is closed just as they use it again."""
_START_S = 30.0
_BACKLOG = 1024
_LOOK_S = 0.05


class Server:
    """Listens in a thread of its own, from the start: until there is a model, requests are told to come again.

    ::

        with serving(ServeConfig(port=8000)) as server:
            server.open(AsyncLLM("smollm2"))
            server.wait()

    Args:
        config: its options.

    Attributes:
        url: where it is.
        desk: where requests are admitted.
    """

    def __init__(self, config: ServeConfig) -> None:
        meters = Meters()
        self.desk = Desk(Records(meters.count), config.max_queue, config.num_tenants)
        self._socket = listening(config)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._llm: AsyncLLM | None = None
        options = uvicorn.Config(
            make_app(self.desk, meters, config),
            http="h11",
            ws="none",
            log_config=None,
            log_level="error",  # below that, any client can fill the log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=config.max_connections + 1,  # it refuses whoever makes it so many
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        self._uvicorn = uvicorn.Server(options)
        # A thread that is not the main one leaves signals alone: Ctrl-C is for whoever has started the server.
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([self._socket],), name="cargohold-serve", daemon=True
        )

    def start(self) -> None:
        """Begin to listen. Raises ``ConfigError`` if that does not work."""
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError("port", self.url, "the server cannot start there; its log says why")
            time.sleep(_LOOK_S)

    def open(self, llm: AsyncLLM) -> None:
        """Serve this model. It belongs to the server from now on, which closes it."""
        self._llm = llm
        self.desk.open(llm)

    def wait(self) -> None:
        """Wait until the engine ends. Raises ``EngineDeadError`` then."""
        while self.desk.end is None:
            self.desk.has_changed.wait()
            self.desk.has_changed.clear()
        raise self.desk.end

    def drain(self) -> None:
        """Take no more requests, and wait until all have ended, for ``shutdown_timeout_s`` of the engine at most."""
        self.desk.start_draining()
        if self._llm is None:
            return
        deadline = time.monotonic() + self._llm.plan.config.shutdown_timeout_s
        while self.desk.num_answers and (left_s := deadline - time.monotonic()) > 0:
            self.desk.has_changed.wait(left_s)
            self.desk.has_changed.clear()

    def close(self) -> None:
        """End the engine, whose last requests are told so, and then the server."""
        self.desk.start_draining()
        try:
            if self._llm is not None:
                asyncio.run(self._llm.close())
        finally:
            self._uvicorn.should_exit = True
            if self._thread.ident is not None:
                self._thread.join(_FAREWELL_S + 1)
            self._socket.close()


@contextmanager
def serving(config: ServeConfig) -> Iterator[Server]:
    """A server that listens. At the end, it drains if that is not interrupted, and is closed."""
    server = Server(config)
    try:
        server.start()
        yield server
    finally:
        try:
            server.drain()
        finally:
            server.close()


def listening(config: ServeConfig) -> socket.socket:
    """A socket at the server's address. Raises ``ConfigError`` if it is taken, before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("host", config.host, f"it must be an address of this machine ({error.strerror})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            # Ends connections whose clients take nothing any more; what they were sent waits in the system meanwhile.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout_s * 1000))
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", config.host, "it must be an address of this machine") from error
        expected = f"nothing else may listen there; 0 takes any free port ({error.strerror})"
        raise ConfigError("port", config.port, expected) from error
    return listener
