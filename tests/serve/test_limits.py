"""Connections that say nothing, take all places, or call the server by names that are not its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from socket import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from cargohold.serve.limits import Hosts
from cargohold.serve.server import Server, serving
from cargohold.serve.settings import ServeConfig
from tests.serve.running import LONG, PATIENCE_S, call, connect, posted, running, wait_until

TEXT = "/v1/completions"
BODY: dict[str, Any] = {"model": "chat", "prompt": "Hello", "max_tokens": 1}
STREAM: dict[str, Any] = {**BODY, **LONG, "stream": True}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
UNFINISHED = HEALTH[:-2]
AT_ONCE = ServeConfig(port=0, header_timeout_s=0.05, max_body_bytes=1000)


def is_closed(connection: socket) -> bool:
    """Wait for the end of what comes."""
    with suppress(ConnectionError):
        while connection.recv(10_000):
            pass
    return True


@pytest.fixture
def empty() -> Iterator[Server]:
    """A server without a model."""
    with serving(AT_ONCE) as server:
        yield server


def test_health_is_answered_however_many_requests_are_open(chat_model: str) -> None:
    """A probe that is refused restarts a server that is only busy."""
    with running(chat_model, ServeConfig(port=0, max_connections=2)) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(server)).sendall(posted(TEXT, STREAM))
        wait_until(lambda: server.admission.num_answers == 2)
        refused = call(server, TEXT, BODY)
        assert (refused.status, refused.json["error"]["code"]) == (503, "too_many_requests")
        assert "retry-after" in refused.headers
        assert call(server, "/health").status == 200
        stack.close()
        wait_until(lambda: call(server, TEXT, BODY).status == 200)


def test_connections_that_say_nothing_make_room_for_those_that_do(chat_model: str) -> None:
    """Some hundreds of them closed the server for everybody."""
    config = ServeConfig(port=0, max_connections=2, header_timeout_s=3600.0)
    with running(chat_model, config) as server, ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in silent:
            connection.sendall(UNFINISHED)
        assert call(server, "/health").status == 200
        assert call(server, TEXT, BODY).status == 200
        assert is_closed(silent[0]), "the first that came"
        silent[-1].sendall(b"\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200"), "the last are still there"


def test_who_has_asked_something_stays_longer_than_who_never_did() -> None:
    config = ServeConfig(port=0, max_connections=1, header_timeout_s=3600.0)
    with serving(config) as server, ExitStack() as stack:
        asks = stack.enter_context(closing(HTTPConnection(urlsplit(server.url).netloc, timeout=PATIENCE_S)))
        for _ in range(20):
            asks.request("GET", "/metrics")
            reply = asks.getresponse()
            assert (reply.status, reply.will_close, bool(reply.read())) == (200, False, True)
            assert asks.sock is not None, "it is the same connection all the time"
            stack.enter_context(connect(server)).sendall(UNFINISHED)


@pytest.mark.parametrize("sent", [b"", b"G", UNFINISHED])
def test_a_connection_that_does_not_say_what_it_wants_is_closed(empty: Server, sent: bytes) -> None:
    with connect(empty) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


@pytest.mark.parametrize("rest", [b"", b"x"], ids=["silent", "in pieces"])
def test_so_is_one_that_has_asked_before(empty: Server, rest: bytes) -> None:
    with connect(empty) as connection:
        connection.sendall(HEALTH)
        assert connection.recv(1000).startswith(b"HTTP/1.1 503")
        connection.sendall(UNFINISHED)
        while rest and not _is_over(connection, rest):
            pass
        assert is_closed(connection)


def test_so_is_one_whose_body_nobody_wants(empty: Server) -> None:
    """Its request was refused by its size; what it sends on was thrown away for as long as it liked."""
    with connect(empty) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        while not _is_over(connection, b"x"):
            pass


def _is_over(connection: socket, piece: bytes) -> bool:
    """Send another piece, and say whether the other end has closed."""
    try:
        connection.sendall(piece)
        connection.setblocking(False)
        return connection.recv(10_000) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.setblocking(True)


def test_an_answer_may_take_longer_than_headers(chat_model: str) -> None:
    with running(chat_model, AT_ONCE) as server:
        reply = call(server, TEXT, {**STREAM, "max_tokens": 400})
        assert (reply.status, reply.body.endswith(b"data: [DONE]\n\n")) == (200, True)


OURS = (
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1:1",
    "127.9.9.9",
    "[::1]:8000",
    "app.localhost",
    "mine.example:80",
)
OTHERS = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "192.168.1.7",
    "",
    "[",
    "127.0.0.1.evil.example",
)


def test_on_loopback_a_host_that_is_not_ours_is_refused() -> None:
    """A page from elsewhere could read the answers, through a name of its own that it lets point here."""
    with serving(ServeConfig(port=0, allowed_hosts=("Mine.example",))) as server:
        for host in OURS:
            assert call(server, "/metrics", headers={"host": host}).status == 200, host
        for path in ("/", "/health", "/cache", "/metrics", "/v1/models"):
            for host in OTHERS:
                refused = call(server, path, headers={"host": host})
                assert (refused.status, refused.json["error"]["code"]) == (403, "host_not_allowed"), host
                assert "--allowed-host" in refused.json["error"]["message"]


def test_elsewhere_and_where_all_are_allowed_a_host_is_not_looked_at() -> None:
    for hosts in (Hosts("0.0.0.0", []), Hosts("192.168.1.7", []), Hosts("127.0.0.1", ["*"])):
        hosts.check(b"any.example")
    Hosts("127.0.0.1", []).check(None)
