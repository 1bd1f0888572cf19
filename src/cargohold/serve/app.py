"""The application: routes behind a gate, and errors in the form of the interface that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from cargohold import __version__
from cargohold.errors import CargoholdError
from cargohold.serve import cache, page
from cargohold.serve.desk import Desk, State
from cargohold.serve.errors import api_error, error_response, invalid, json_response
from cargohold.serve.gate import Gate
from cargohold.serve.hall import Hall
from cargohold.serve.interfaces import anthropic, openai
from cargohold.serve.meters import Meters
from cargohold.serve.settings import ServeConfig
from cargohold.serve.watch import Watch

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
    hall = Hall(desk, config, Watch(desk), meters)
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
