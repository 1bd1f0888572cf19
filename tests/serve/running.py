"""A server on a tiny model, in this process, and plain HTTP to it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from cargohold import AsyncLLM, OffloadConfig
from cargohold.serve.server import Server, serving
from cargohold.serve.settings import ServeConfig
from tests.llms import scheduler_of

PATIENCE_S = 60.0
LONG: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True, "temperature": 0}
"""An answer that takes long enough to do something meanwhile."""


@contextmanager
def running(model: str, config: ServeConfig | None = None, **options: Any) -> Iterator[Server]:
    """A server that serves; asserts at the end that no request has left anything behind, if it had time to end."""
    defaults = {"offload": OffloadConfig(host_bytes="16MiB"), "num_device_blocks": 600, "shutdown_timeout_s": 1.0}
    options = {**defaults, **options}
    with pytest.MonkeyPatch.context() as patch, serving(config or ServeConfig(port=0)) as server:
        patch.setattr("uvicorn.server.asyncio", _Attentive())
        llm = AsyncLLM(model, **options)
        server.open(llm)
        yield server
    assert server.admission.num_answers == 0
    if options["shutdown_timeout_s"]:
        scheduler_of(llm).check_settled()


class _Attentive:
    """``asyncio`` for uvicorn, which otherwise looks ten times a second whether it is to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(
    server: Server, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
) -> Reply:
    """A request over a connection of its own. A body that is not bytes is sent as JSON."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=PATIENCE_S)
    sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    kind = {} if body is None else {"content-type": "application/json"}
    connection.request(method or ("GET" if body is None else "POST"), path, sent, {**kind, **(headers or {})})
    answer = connection.getresponse()
    reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    connection.close()
    return reply


def connect(server: Server, *, buffer_bytes: int | None = None) -> socket.socket:
    """A bare connection. The system takes in ``buffer_bytes`` that nobody reads, or by default megabytes."""
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    address = urlsplit(server.url)
    connection.connect((address.hostname, address.port))
    return connection


def posted(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole request as bytes."""
    sent = json.dumps(body).encode()
    kind = {"host": "localhost", "content-type": "application/json", "content-length": str(len(sent))}
    lines = [f"{name}: {value}" for name, value in {**kind, **(headers or {})}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "\r\n"]).encode() + sent


def settle(server: Server) -> None:
    """Wait until nothing moves any more: what is counted then is the same however often one looks, until the next request."""
    wait_until(lambda: asyncio.run(server.admission.llm.settle(PATIENCE_S)))


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for something that other threads bring about."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.005)
