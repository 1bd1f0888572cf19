"""What the cache does, for people and programs: what is kept where, why a request hit or missed, and how to forget it all."""

from __future__ import annotations

import time
from http import HTTPStatus
from itertools import islice
from typing import Any, Final

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from starlette.responses import Response

from cargohold.serve.errors import ApiError, json_response
from cargohold.serve.hall import Hall, client_of, hall_of
from cargohold.serve.vessels import vessels

router = APIRouter()

_MAX_SHOWN: Final = 50
_LOOK_S: Final = 0.2
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/cache")
async def cache(request: Request) -> Response:
    """What is kept, tier by tier, and what became of the last requests. A tenant sees only its own requests."""
    hall, client = hall_of(request), client_of(request)
    await hall.watch.look(_LOOK_S)
    records = [record.as_json() for record in islice(hall.desk.records.latest(client), _MAX_SHOWN)]
    shown: dict[str, Any] = {"state": hall.desk.state.value, "now": time.time(), "started": hall.started}
    shown |= {"requests": records, "history": None, "log": None, **_engine(hall)}
    if client.tenant is None:
        history = [bucket.as_json() for bucket in hall.desk.records.history()]
        shown |= {"history": history, "log": hall.watch.log.lines()}
    return json_response(shown)


@router.get("/cache/explain/{request_id}")
async def explain(request: Request, request_id: str) -> Response:
    """Where each answer's prompt came from, and why, in words."""
    record = hall_of(request).desk.records.find(request_id, client_of(request))
    if record is None:
        message = (
            f"no request {request_id!r:.100} is remembered: the last few hundred are, each for whoever has sent it"
        )
        raise ApiError(HTTPStatus.NOT_FOUND, message, code="request_not_found")
    answers = [{"sources": one.sources(), "notes": list(one.notes)} for one in record.sequences]
    return json_response({**record.as_json(), "answers": answers})


@router.post("/cache/reset")
async def reset(request: Request) -> Response:
    """Forget all KV, on the device and below."""
    if not client_of(request).is_admin:
        message = "only the admin key may reset the cache: start the server with --admin-key, and send that"
        raise ApiError(HTTPStatus.FORBIDDEN, message, code="admin_only")
    if not await hall_of(request).desk.llm.reset_cache():
        message = "requests are being served, or transfers have not ended: try again when it is quiet"
        raise ApiError(HTTPStatus.CONFLICT, message, code="busy")
    return json_response({"reset": True})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, in the text format of Prometheus."""
    hall = hall_of(request)
    await hall.watch.look(_LOOK_S)
    return Response(generate_latest(hall.meters.registry), media_type=_METRICS_TYPE)


def _engine(hall: Hall) -> dict[str, Any]:
    llm = hall.desk.loaded
    if llm is None:
        return {"model": None, "tiers": [], "engine": None}
    status = llm.status
    engine = {"running": status.num_running, "waiting": status.num_waiting, "loading": status.num_loading}
    return {
        "model": hall.shown_name,
        "tiers": [vessel.as_json() for vessel in vessels(llm, hall.watch.stats)],
        "engine": {**engine, "refused": hall.desk.num_refused, "connector_error": status.connector_error},
    }
