"""The page for engines that run elsewhere, this server's or vLLM with the connector, from their ``/metrics``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from cargohold.protocol import metrics
from cargohold.serve.cache import TierUse, page_router
from cargohold.serve.errors import ApiError, error_response, json_response
from cargohold.serve.families import IN_ENGINE, REFUSED, UP
from cargohold.serve.limits import Hosts, Limits, connections
from cargohold.serve.records import BUCKET_S, MAX_BUCKETS, Moved, Scrape, TimeSpan, scrape, tiers_of
from cargohold.serve.server import listening
from cargohold.serve.settings import ServeConfig

Ask = Callable[[str], Scrape]


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
        self._now: Scrape | None = None
        self._history: deque[TimeSpan] = deque(maxlen=MAX_BUCKETS)

    def look(self) -> None:
        """Ask it. What has happened since the last look is added to its history."""
        before, self._now = self._now, self._ask(self._url)
        if before is None or before.error or self._now.error:
            return
        start = self._clock() // BUCKET_S * BUCKET_S
        if not self._history or start > self._history[-1].start:
            self._history.append(TimeSpan(start))
        _add(self._history[-1], self._now.since(before))

    @property
    def state(self) -> str:
        """How it is, in a word or two."""
        if self._now is None:
            return "connecting"
        if self._now.error:
            return f"not reachable: {self._now.error}"
        if self._now.known(UP) == 0:  # vLLM's server answers once it serves
            return "not serving" if tiers_of(self._now) else "starting"
        return "serving"

    def as_json(self) -> dict[str, Any]:
        """What the page shows of it, as ``/cache`` of a server says it. Single requests are not known."""
        if self._now is None or self._now.error:
            return self._known(Scrape(0.0)) | {"engine": None, "totals": None}
        since_start = TimeSpan(0.0)
        _add(since_start, self._now)
        return self._known(self._now) | {"engine": _requests(self._now), "totals": since_start.as_json()}

    def _known(self, now: Scrape) -> dict[str, Any]:
        outages = [(dict(labels), since, labels) for labels, since in now.of(metrics.OUTAGE_SINCE).items() if since]
        lines = [
            {"time": since, "level": "WARNING", "text": f"tier {of.get('tier')}: {of.get('what')}: {of.get('reason')}"}
            for of, since, _ in outages
        ]
        out = Counter(of.get("tier", "") for of, _, _ in outages)
        off = {of.get("tier", "") for of, _, labels in outages if labels not in now.of(metrics.OUTAGE_RETRY)}
        return {
            "state": self.state,
            "now": self._clock(),
            "model": self.name,
            "tiers": [asdict(_tier_use(now, tier, out[tier], tier in off)) for tier in tiers_of(now)],
            "requests": None,
            "history": [bucket.as_json() for bucket in self._history],
            "log": lines,
        }


def _add(bucket: TimeSpan, grown: Scrape) -> None:
    """Count what has happened."""
    bucket.tokens += Counter({tier: int(tokens) for tier, tokens in grown.by(metrics.PROMPT, "tier").items()})
    bucket.num_requests += int(grown.total(f"{metrics.TTFT.sample}_count"))
    bucket.ttft_s += grown.seconds(metrics.TTFT)
    moved = _moved(grown)
    bucket.moved += Moved(
        up_bytes=sum(value for (tier, way), value in moved.items() if way == "out" and tier != "device"),
        down_bytes=sum(value for (tier, way), value in moved.items() if way == "in" and tier != "device"),
        evicted_chunks=grown.total(metrics.REMOVED),
        restored_tokens=grown.total(metrics.LOAD_TOKENS),
        restore_s=grown.seconds(metrics.LOAD) + grown.seconds(metrics.WAIT),
        prefill_tokens=grown.total(metrics.PREFILL_TOKENS),
        prefill_s=grown.total(metrics.PREFILL_SECONDS),
    )


def _moved(scraped: Scrape) -> dict[tuple[str, str], float]:
    """Bytes by tier and direction."""
    series = scraped.of(metrics.MOVED)
    return {
        (dict(labels).get("tier", ""), dict(labels).get("direction", "")): value for labels, value in series.items()
    }


def _tier_use(now: Scrape, tier: str, num_out: int, is_off: bool) -> TierUse:
    moved = _moved(now)
    return TierUse(
        tier,
        now.by(metrics.TIER_READY, "tier").get(tier, 0),
        now.by(metrics.TIER_CAPACITY, "tier").get(tier),
        used_bytes=_used_bytes(now) if tier == "device" else None,
        in_bytes=moved.get((tier, "in"), 0),
        out_bytes=moved.get((tier, "out"), 0),
        evicted_chunks=now.by(metrics.REMOVED, "tier").get(tier),
        suspended=num_out,
        is_off=is_off,
    )


def _used_bytes(now: Scrape) -> float:
    """Bytes that requests are using now on the device. vLLM tells which part of it, of each replica."""
    part = now.total("vllm:kv_cache_usage_perc") / now.num_replicas
    capacity = now.by(metrics.TIER_CAPACITY, "tier").get("device", 0)
    return now.by(metrics.TIER_IN_USE, "tier").get("device", part * capacity)


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
        names = [{"name": engine.name, "state": engine.state} for engine in engines]
        return json_response({**engine.as_json(), "engines": names})

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
    """Show engines until Ctrl-C or SIGTERM. Raises ``ConfigError`` if the address is taken; ``say`` is told where it is."""
    with listening(config) as listener:
        host, port = listener.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        app = Limits(make_dashboard(engines, interval_s), config, Hosts(host, config.allowed_hosts))
        http: Any = connections(config)
        uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_level="error", access_log=False)).run([listener])
