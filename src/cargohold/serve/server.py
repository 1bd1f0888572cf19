"""The server's thread, and its life from the first connection to the last."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from cargohold.async_llm import AsyncLLM
from cargohold.errors import ConfigError
from cargohold.serve.app import make_app
from cargohold.serve.desk import Desk
from cargohold.serve.meters import Meters
from cargohold.serve.records import Records
from cargohold.serve.settings import ServeConfig

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
        self.desk = Desk(Records(meters.count), config.max_queue)
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
