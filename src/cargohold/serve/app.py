"""The application: routes behind a gate, and errors in the form of the interface that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cargohold import __version__
from cargohold.errors import CargoholdError
from cargohold.serve import cache, page
from cargohold.serve.desk import Desk, Hall, State, Watch
from cargohold.serve.errors import ApiError, api_error, error_response, invalid, json_response
from cargohold.serve.interfaces import anthropic, openai
from cargohold.serve.meters import Meters
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
    app.include_router(page.router)
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
        body = _Body(receive, self._config)
        with suppress(UnheardError):
            await self._app(scope, body.receive, _patient(send, self._config.write_timeout_s))

    def _client(self, path: str, headers: dict[bytes, bytes]) -> Client:
        needs_key = (
            self._keys.has_tenants if path.startswith("/v1/") else self._keys.has_tenants or self._keys.has_admin
        )
        client = self._keys.client(_shown_key(headers))
        if client is None and needs_key and path.startswith(("/v1/", "/cache")):
            expected = "send a key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(
                HTTPStatus.UNAUTHORIZED, f"this needs a key that the server knows: {expected}", code="invalid_api_key"
            )
        return client or Client()

    def _check_size(self, content_length: bytes) -> None:
        if content_length.isdigit() and int(content_length) > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)


class _Body:
    """The body of one request, as it comes in."""

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive = receive
        self._max_bytes = config.max_body_bytes
        self._timeout_s = config.read_timeout_s
        self._deadline = asyncio.get_running_loop().time() + config.read_timeout_s
        self._num_bytes = 0
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
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
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
