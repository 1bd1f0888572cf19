"""What the cache does, for people, programs and Prometheus: what is kept, and why a request hit or missed; the page."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from itertools import islice
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request
from prometheus_client import generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import HTMLResponse, Response

from cargohold.base_llm import Hints
from cargohold.llm import AsyncLLM
from cargohold.protocol import Hint, KeptPrefix, Pin, TenantUse
from cargohold.serve.access import Client
from cargohold.serve.admission import ServerContext, client_of, context_of
from cargohold.serve.errors import ApiError, json_response
from cargohold.serve.interfaces import Items, Message, fitting, in_turn, offered_tools
from cargohold.serve.meters import OfNobody
from cargohold.serve.records import Record
from cargohold.serve.scrape import tier_uses, verified

router = APIRouter()
page_router = APIRouter()
"""The page alone, which also shows engines that run elsewhere."""

_MAX_SHOWN: Final = 50
_LOOK_S: Final = 0.2
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/cache")
async def cache(request: Request) -> Response:
    """What is kept, by tier, tenant and prefix, and what became of the last requests. A tenant sees only its own."""
    context, client = context_of(request), client_of(request)
    await context.watch.look(_LOOK_S, inside=True)
    records = [
        _shown(context, client, record) for record in islice(context.admission.records.latest(client), _MAX_SHOWN)
    ]
    shown: dict[str, Any] = {"state": context.admission.state.value, "now": time.time(), "started": context.started}
    shown |= {
        "requests": records,
        "history": None,
        "log": None,
        "verified": "",
        **_engine(context),
        **_contents(context, client),
    }
    if client.tenant is None:
        shown |= {"history": context.watch.history.as_json(), "log": context.watch.log.lines()}
        shown["verified"] = verified(context.watch.now)
    elif context.config.metrics_key is not None:
        shown |= {"tiers": [], "engine": None}  # sums over all tenants, as those of ``/metrics``
    return json_response(shown)


@router.get("/cache/explain/{request_id}")
async def explain(request: Request, request_id: str) -> Response:
    """Where each answer's prompt came from, and why, in words."""
    record = context_of(request).admission.records.find(request_id, client_of(request))
    if record is None:
        message = f"request {request_id!r:.100} is unknown: only the last few hundred are kept, each for its own client"
        raise ApiError(HTTPStatus.NOT_FOUND, message, code="request_not_found")
    answers = [{"sources": one.sources(), "notes": list(one.notes)} for one in record.sequences]
    return json_response({**_shown(context_of(request), client_of(request), record), "answers": answers})


def _shown(context: ServerContext, client: Client, record: Record) -> dict[str, Any]:
    """A request as a client may see it. Clients that see all tenants also see whose it was."""
    whose = {"tenant": context.config.label_of(record.client.tenant)} if client.is_admin else {}
    return record.as_json() | whose


class PrefixBody(BaseModel):
    """What hints are about when no request is running: a prompt as text, token ids, or a conversation.

    Attributes:
        cache_salt: as in the requests that will have the prompt.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | Items[int] | None = None
    messages: Items[Message] | None = None
    tools: Items[dict[str, Any]] | None = None
    cache_salt: str | None = None

    def tokens(self, llm: AsyncLLM, most: int) -> list[int]:
        """The prompt. Raises ``RequestError`` if it cannot be made."""
        if self.messages is not None:
            messages = [message.for_template(f"messages[{at}]") for at, message in enumerate(self.messages)]
            return llm.chat_prompt(messages, tools=offered_tools(self.tools), max_tokens=most)
        return llm.tokenize(self.prompt, max_tokens=most) if isinstance(self.prompt, str) else self.prompt or []


class HintsBody(PrefixBody):
    """Hints in the envelope of routers, or a list of its actions."""

    hints: dict[str, Any] | Items[dict[str, Any]]


class PrefetchBody(PrefixBody):
    """A prompt that comes soon, within ``deadline_s`` seconds."""

    deadline_s: Annotated[float, Field(gt=0)] | None = None


class PinBody(PrefixBody):
    """A prompt that is not to be evicted from host memory for ``ttl_s`` seconds after its last use, under a name."""

    lease: Annotated[str, Field(min_length=1, max_length=128)]
    ttl_s: Annotated[float, Field(gt=0)] | None = None


@router.post("/cache/hints")
async def hints(request: Request, body: HintsBody) -> Response:
    """Tell the cache what is known of a prompt's future; see ``LLM.hint``."""
    actions = {"protocol_version": "1", "actions": body.hints}
    return await _hint(request, body, actions if isinstance(body.hints, list) else body.hints)


@router.post("/cache/prefetch")
async def prefetch(request: Request, body: PrefetchBody) -> Response:
    """Bring a prompt's KV up from lower tiers now: it comes soon."""
    return await _hint(request, body, Hint.prefetch(body.deadline_s))


@router.post("/cache/pins")
async def pin(request: Request, body: PinBody) -> Response:
    """Keep a prompt's KV in host memory for a time."""
    return await _hint(request, body, Hint.pin(body.ttl_s, body.lease))


@router.get("/cache/pins")
async def pins(request: Request) -> Response:
    """What is pinned now, and how much may be. A tenant sees only its own."""
    context, client = context_of(request), client_of(request)
    shown: dict[str, list[dict[str, Any]]] = {"pins": [], "budgets": []}
    for of_tier in await context.admission.llm.contents():
        own = [pin for pin in of_tier.pins if client.sees(pin.tenant)]
        most = of_tier.max_pinned_chunks if client.tenant is None else of_tier.max_pinned_chunks_each
        shown["pins"] += [_labelled(context, of_tier.tier, pin) for pin in own]
        num_used = sum(pin.num_chunks for pin in own)
        shown["budgets"].append({"tier": of_tier.tier, "num_chunks": num_used, "max_chunks": most})
    return json_response(shown)


@router.delete("/cache/pins/{lease:path}")
async def release(request: Request, lease: Annotated[str, Path(min_length=1, max_length=128)]) -> Response:
    """End a pin before its time."""
    return await _hint(request, PrefixBody(), Hint.release(lease))


async def _hint(request: Request, body: PrefixBody, asked: Hints) -> Response:
    """Give hints in the name of the request's client. The answer has one outcome for each."""
    llm, client = context_of(request).admission.llm, client_of(request)
    has_prompt = body.prompt is not None or body.messages is not None
    prompt = await in_turn(request, lambda: fitting(llm, partial(body.tokens, llm))) if has_prompt else None
    outcomes = await llm.hint(asked, prompt=prompt, salt=client.salt(body.cache_salt), tenant=client.tenant)
    return json_response({"outcomes": [asdict(outcome) for outcome in outcomes]})


@router.post("/cache/reset")
async def reset(request: Request) -> Response:
    """Forget all KV, on the device and below."""
    if not client_of(request).is_admin:
        message = "only the admin key may reset the cache: start the server with --admin-key, and send that"
        raise ApiError(HTTPStatus.FORBIDDEN, message, code="admin_only")
    if not await context_of(request).admission.llm.reset_cache():
        message = "requests or transfers are in flight: try again later"
        raise ApiError(HTTPStatus.CONFLICT, message, code="busy")
    return json_response({"reset": True})


@router.get("/metrics")
async def prometheus(request: Request) -> Response:
    """All metrics, in the text format of Prometheus; those of single tenants only with a key."""
    context = context_of(request)
    await context.watch.look(_LOOK_S)
    shown = context.registry if client_of(request).reads_all_metrics else OfNobody(context.registry)
    return Response(generate_latest(shown), media_type=_METRICS_TYPE)


def _engine(context: ServerContext) -> dict[str, Any]:
    llm = context.admission.loaded
    if llm is None:
        return {"model": None, "tiers": [], "engine": None}
    status = llm.status
    engine = {"running": status.num_running, "waiting": status.num_waiting, "loading": status.num_loading}
    return {
        "model": context.names()[0],
        "tiers": tier_uses(context.watch.now),
        "engine": {**engine, "refused": context.admission.num_refused, "connector_error": status.connector_error},
    }


def _contents(context: ServerContext, client: Client) -> dict[str, list[dict[str, Any]]]:
    """What of the contents of all tiers a client may see: pins, tenants and prefixes, a limited number of each."""
    shown: dict[str, list[dict[str, Any]]] = {"pins": [], "tenants": [], "prefixes": []}
    for of_tier in context.watch.contents:
        for name, items in (("pins", of_tier.pins), ("tenants", of_tier.tenants), ("prefixes", of_tier.prefixes)):
            seen = (item for item in items if client.sees(item.tenant))
            shown[name] += [_labelled(context, of_tier.tier, item) for item in islice(seen, _MAX_SHOWN)]
    return shown


def _labelled(context: ServerContext, tier: str, item: Pin | TenantUse | KeptPrefix) -> dict[str, Any]:
    return {"tier": tier, **asdict(item), "tenant": context.config.label_of(item.tenant)}


# --- the page ---------------------------------------------------------------------------------------------------------

_INLINE: Final = {
    "script": re.compile(r"<script>(.*?)</script>", re.DOTALL),
    "style": re.compile(r"<style>(.*?)</style>", re.DOTALL),
}


@page_router.get("/")
async def page() -> HTMLResponse:
    """The page. It has no figures in it: it asks for them, with the key that its reader gives it."""
    return HTMLResponse(_text(), headers={"content-security-policy": _policy(), "referrer-policy": "no-referrer"})


@functools.cache
def _text() -> str:
    return (files("cargohold.serve") / "page.html").read_text(encoding="utf-8")


@functools.cache
def _policy() -> str:
    """What browsers may do for the page: run its own script, and ask this server. No text that it shows can change that."""
    hashes = {kind: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() for kind, found in _parts()}
    own = "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in hashes.items())
    nothing = "; ".join(f"{kind} 'none'" for kind in ("default-src", "base-uri", "form-action", "frame-ancestors"))
    return f"{nothing}; {own}; connect-src 'self'; img-src data:"


def _parts() -> list[tuple[str, re.Match[str]]]:
    return [(kind, found) for kind, pattern in _INLINE.items() for found in pattern.finditer(_text())]
