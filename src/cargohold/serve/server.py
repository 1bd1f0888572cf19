"""The server: routes behind a gate, errors in the form of the interface that was asked, and the thread in which it listens."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from http import HTTPStatus
from reprlib import repr as shown  # a client may send values of any size
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from cargohold import __version__
from cargohold.errors import CargoholdError, ConfigError
from cargohold.llm import AsyncLLM
from cargohold.option_values import format_count
from cargohold.process import allow_open_files
from cargohold.serve import anthropic, cache, openai
from cargohold.serve.access import LimitedAccess
from cargohold.serve.admission import EngineWatch, RequestAdmission, ServerContext, State
from cargohold.serve.errors import api_error, error_response, invalid, json_response
from cargohold.serve.front import Front
from cargohold.serve.limits import HEALTH, Hosts, Limits, connections
from cargohold.serve.meters import ServerMeters
from cargohold.serve.records import Records
from cargohold.serve.settings import ServeConfig


def make_app(admission: RequestAdmission, meters: ServerMeters, config: ServeConfig, hosts: Hosts) -> ASGIApp:
    """The application of one server.

    Args:
        admission: admits requests to the model.
        meters: count them.
        config: the server's options.
        hosts: the names that it may be called by.
    """
    # The pages of FastAPI's own need scripts from the internet.
    app = FastAPI(title="Cargohold", version=__version__, docs_url=None, redoc_url=None, lifespan=_watching)
    context = ServerContext(admission, config, EngineWatch(admission, meters.registry), meters.registry)
    meters.read_also(admission, context.watch)
    app.state.context = context
    app.include_router(openai.router)
    app.include_router(anthropic.router)
    app.add_api_route(HEALTH, _health, methods=["GET"])
    app.add_api_route(HEALTH, _health, methods=["HEAD"], include_in_schema=False)
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
    return Limits(Front(app, LimitedAccess(), is_strict=True), config, hosts)


@asynccontextmanager
async def _watching(app: FastAPI) -> AsyncGenerator[None]:
    """Look at the engine as long as the server runs."""
    context: ServerContext = app.state.context
    task = asyncio.create_task(context.watch.run())
    yield
    task.cancel()
    await asyncio.wait([task])


async def _health(request: Request) -> Response:
    """Whether it takes requests: 200, or 503 while it starts and when it ends. Also what of the cache is out of use, and why.

    A cache that does not work makes requests slower, but the server goes on: it is healthy.
    """
    admission: RequestAdmission = request.app.state.context.admission
    status = HTTPStatus.OK if admission.state is State.SERVING else HTTPStatus.SERVICE_UNAVAILABLE
    outages = () if admission.loaded is None else admission.loaded.status.outages
    return json_response({"status": admission.state.value, "outages": [asdict(outage) for outage in outages]}, status)


async def _refused(request: Request, error: Exception) -> Response:
    """The answer to a body that is not as it should be: where, and what would be accepted."""
    assert isinstance(error, RequestValidationError)
    # Where there are several forms, all of them report. The one that got furthest, or that this has the type of, was meant.
    worst: dict[str, Any] = max(error.errors(), key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    if worst["type"] == "json_invalid":
        reason = worst.get("ctx", {}).get("error", "")
        return error_response(request.url.path, invalid(f"the body is not JSON: {reason}"))
    param = _place(worst["loc"][1:], error.body)
    if not isinstance(error.body, dict):
        return error_response(request.url.path, invalid("the body must be a JSON object, sent as application/json"))
    given = "" if worst["type"] == "missing" else f", not {shown(worst['input'])}"
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
    """This answer is not read."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


# --- the thread -------------------------------------------------------------------------------------------------------

_FAREWELL_S = 2
"""How long connections may take to get their last answers."""
_KEEP_ALIVE_S = 30
"""How long a connection may be idle. Clients keep theirs, and some fail when one is closed just as they use it again."""
_START_S = 30.0
_BACKLOG = 1024
_LOOK_S = 0.05
_OTHER_FILES = 512
"""Files besides those of connections: of tiers, of workers, of libraries."""
_SILENT_S = 1.0
"""How long the end may take before a line says what it waits for."""


class Server:
    """Listens in a thread of its own, from the start: until there is a model, requests get 503.

    ::

        with serving(ServeConfig(port=8000)) as server:
            server.open(AsyncLLM("smollm2"))
            server.wait()

    Args:
        config: its options.
        say: gets what the end waits for.

    Attributes:
        url: where it is.
        admission: where requests are admitted.
    """

    def __init__(self, config: ServeConfig, say: Callable[[str], object] = lambda _: None) -> None:
        # Without files left, no one can connect, not even to ask for /health.
        num_connections = allow_open_files(config.max_connections + _OTHER_FILES) - _OTHER_FILES
        config = replace(config, max_connections=max(1, num_connections))
        meters = ServerMeters()
        self._say = say
        self.admission = RequestAdmission(Records(meters.count), config.max_queue, config.num_tenants)
        self._socket = listening(config)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._llm: AsyncLLM | None = None
        options = uvicorn.Config(
            make_app(self.admission, meters, config, Hosts(host, config.allowed_hosts)),
            http=connections(config),
            ws="none",
            log_config=None,
            log_level="error",  # below that, any client can fill the log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        self._uvicorn = uvicorn.Server(options)
        # A thread that is not the main one leaves signals alone: Ctrl-C is for the program that started the server.
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
        self.admission.open(llm)

    def wait(self) -> None:
        """Wait until the engine ends. Raises ``EngineDeadError`` then."""
        while self.admission.end is None:
            self.admission.has_changed.wait()
            self.admission.has_changed.clear()
        raise self.admission.end

    @property
    def _patience_s(self) -> float:
        """How long the end waits for requests, and then for transfers."""
        return 0.0 if self._llm is None else self._llm.plan.config.shutdown_timeout_s

    def drain(self) -> None:
        """Take no more requests, and wait until all have ended, for ``shutdown_timeout_s`` of the engine at most."""
        self.admission.start_draining()
        if self._llm is None:
            return
        deadline = time.monotonic() + self._patience_s
        if self.admission.num_answers and self._patience_s:
            answers = format_count(self.admission.num_answers, "answer")
            self._say(f"waiting for {answers} to end, for {self._patience_s:g} s at most; Ctrl-C does not wait")
        while self.admission.num_answers and (left_s := deadline - time.monotonic()) > 0:
            self.admission.has_changed.wait(left_s)
            self.admission.has_changed.clear()

    def close(self) -> None:
        """End the engine, whose last requests get an error, and then the server."""
        self.admission.start_draining()
        what = f"waiting for copies and writes to lower tiers, for some {self._patience_s:g} s; Ctrl-C does not wait"
        telling = threading.Timer(_SILENT_S, self._say, [what])
        telling.daemon = True
        try:
            if self._llm is not None:
                telling.start()
                asyncio.run(self._llm.close())
        finally:
            telling.cancel()
            self._uvicorn.should_exit = True
            if self._thread.ident is not None:
                self._thread.join(_FAREWELL_S + 1)
            self._socket.close()


@contextmanager
def serving(config: ServeConfig, say: Callable[[str], object] = lambda _: None) -> Iterator[Server]:
    """A server that listens. At the end, it drains if that is not interrupted, and is closed; ``say``: see ``Server``."""
    server = Server(config, say)
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
        expected = f"another program listens there; 0 takes any free port ({error.strerror})"
        raise ConfigError("port", config.port, expected) from error
    return listener
