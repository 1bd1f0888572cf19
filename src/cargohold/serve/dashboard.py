"""The page for engines that run elsewhere, this server's or vLLM with the connector, from their ``/metrics``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from cargohold.protocol import metrics
from cargohold.serve.cache import page_router
from cargohold.serve.errors import ApiError, error_response, json_response
from cargohold.serve.limits import Hosts, Limits, connections
from cargohold.serve.scrape import (
    IN_ENGINE,
    REFUSED,
    UP,
    History,
    Scrape,
    TimeSpan,
    scrape,
    tier_uses,
    tiers_of,
    verified,
)
from cargohold.serve.server import listening
from cargohold.serve.settings import ServeConfig

Ask = Callable[[str], Scrape]
_NOT_REACHABLE: Final = "not reachable"


class Engine:
    """One engine, as its metrics tell.

    Args:
        name: what people call it.
        url: of its metrics.
        ask: asks it.
        clock: seconds since 1970.
    """

    def __init__(self, name: str, url: str, ask: Ask = scrape, clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self._url = url
        self._ask = ask
        self._clock = clock
        self._history = History(clock=clock)

    def look(self) -> None:
        """Ask it. What has happened since the last look is added to its history."""
        self._history.add(self._ask(self._url))

    @property
    def state(self) -> str:
        """How it is, in a word or two."""
        now = self._history.now
        if now is None:
            return "connecting"
        if now.error:
            return f"{_NOT_REACHABLE}: {now.error}"
        if now.known(UP) == 0:  # vLLM's server answers once it serves
            return "not serving" if tiers_of(now) else "starting"
        return "serving"

    def as_json(self) -> dict[str, Any]:
        """What the page shows of it, as ``/cache`` of a server says it. Single requests are not known."""
        now = self._history.now
        is_known = now is not None and not now.error
        seen = now if now is not None and is_known else Scrape(0.0)
        since_start = TimeSpan(0.0)
        since_start.add(seen)
        return {
            "state": self.state,
            "now": self._clock(),
            "model": self.name,
            "tiers": tier_uses(seen),
            "verified": verified(seen),
            "requests": None,
            "history": self._history.as_json(),
            "log": list(_outages(seen)),
            "engine": _requests(seen) if is_known else None,
            "totals": asdict(since_start) if is_known else None,
        }


def _outages(now: Scrape) -> Iterator[dict[str, Any]]:
    for labels, since in now.of(metrics.OUTAGE_SINCE).items():
        if since:
            of = dict(labels)
            text = f"tier {of.get('tier')}: {of.get('what')}: {of.get('reason')}"
            yield {"time": since, "level": "WARNING", "text": text}


def _requests(now: Scrape) -> dict[str, Any]:
    """How many requests there are, as far as the engine says that: vLLM does not tell those that wait for loads apart."""
    states: dict[str, float | None] = {**now.by(IN_ENGINE, "state")}
    if not states:
        states = {state: now.known(f"vllm:num_requests_{state}") for state in ("running", "waiting")}
    return {
        **{state: states.get(state) for state in ("running", "waiting", "loading")},
        "refused": now.known(REFUSED),
        "connector_error": None,
    }


# --- the server -------------------------------------------------------------------------------------------------------


def make_dashboard(engines: Sequence[Engine], interval_s: float) -> FastAPI:
    """An application that shows engines, and looks at them every ``interval_s`` seconds."""

    @asynccontextmanager
    async def looking(_app: FastAPI) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(_look_on(engine, interval_s)) for engine in engines]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    numbered = {str(at): engine for at, engine in enumerate(engines)}

    async def cache(request: Request) -> Response:
        engine = numbered.get(request.query_params.get("engine", "0"))
        if engine is None:
            message = f"there are engines 0 to {len(engines) - 1}"
            return error_response(request.url.path, ApiError(HTTPStatus.NOT_FOUND, message, param="engine"))
        shown = engine.as_json()
        states = [{"name": one.name, "state": one.state} for one in engines]
        lost = [f"{one['name']} is {one['state']}" for one in states if one["state"].startswith(_NOT_REACHABLE)]
        shown["log"] = [{"time": shown["now"], "level": "ERROR", "text": text} for text in lost] + shown["log"]
        return json_response({**shown, "engines": states})

    app = FastAPI(title="Cargohold", docs_url=None, redoc_url=None, lifespan=looking)
    app.add_api_route("/cache", cache, methods=["GET"])
    app.include_router(page_router)
    return app


async def _look_on(engine: Engine, interval_s: float) -> None:
    while True:
        await asyncio.to_thread(engine.look)
        await asyncio.sleep(interval_s)


def serve_dashboard(
    engines: Sequence[Engine], config: ServeConfig, interval_s: float, say: Callable[[str], object]
) -> None:
    """Show engines until Ctrl-C or SIGTERM. Raises ``ConfigError`` if the address is taken; ``say`` gets its address."""
    with listening(config) as listener:
        host, port = listener.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        app = Limits(make_dashboard(engines, interval_s), config, Hosts(host, config.allowed_hosts))
        http: Any = connections(config)
        uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_level="error", access_log=False)).run([listener])
