"""The gate that every request comes through: who it is from, how large it is, and how long its client takes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cargohold.serve.errors import ApiError, error_response
from cargohold.serve.settings import Client, Keys, ServeConfig


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
