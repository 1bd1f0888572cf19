"""The front: what clients know of the future of their prompts is said to the cache, without anyone's cooperation.

::

    vllm serve MODEL --kv-transfer-config '{...}' --middleware cargohold.serve.front.Front

It stands in front of vLLM's server, as a class that vLLM puts around its application, and of our own. It knows the client
(tenants, their salts), in which session, what of a prompt will come again, and how each turn ended, and puts it as hints into
the ``kv_transfer_params`` of requests. Answers pass as they are. It imports nothing that vLLM's environment has not.

What there is to say of a conversation that has ended its turn goes with the next request of the same tenant. As long as there
is none, what is kept for the tenant is kept within its budget. Each of several API servers says what it knows.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from http import HTTPStatus
from itertools import count
from secrets import token_hex
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cargohold.connector.tenants import Tenants
from cargohold.option_values import format_count
from cargohold.protocol import FRONT_KEY, HINTS_KEY, hints_in
from cargohold.serve.access import PINS, PROMPTS, Client, LimitedAccess, VllmAccess, path_of
from cargohold.serve.errors import ApiError, error_response, invalid, json_response
from cargohold.serve.request_fields import (
    MarkError,
    RequestFields,
    TurnEndReader,
    first_call,
    is_last,
    keeping,
    may_call,
    session_of,
    with_own_media,
)

logger = logging.getLogger("vllm.cargohold.front")  # vLLM shows only loggers below its own name

TURN_S: Final = 300.0
"""How long a conversation is kept whose next turn brings the result of a tool. Then it counts as others do."""
TURN_PRIORITY: Final = 60
"""Above prompts of which nothing is known, and below those that a client has marked."""
_MAX_SESSIONS: Final = 4096
_MAX_LEASES: Final = 64
_MAX_RELEASES: Final = 16
_OF_PROMPT: Final = ("model", "messages", "tools", "prompt", "cache_salt")
_OF_PIN: Final = ("lease", "ttl_s")
"""What the body of a pin may have."""


class Sessions:
    """Which conversations are kept for their next turns, and which need not be any more, until that is said.

    A conversation is known by the first tool call that it has the result of, so that every API server calls it alike. Its first
    turn has none yet: it gets a name of its own, which stays if the call comes back to the same API server. The number of what
    is remembered is limited: what is forgotten ends by its time.
    """

    def __init__(self) -> None:
        self._leases: OrderedDict[tuple[str | None, str], dict[str, None]] = OrderedDict()
        self._ended: OrderedDict[str | None, dict[str, None]] = OrderedDict()
        self._first: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._names = count(1)
        self._start = token_hex(4)

    def begin(self, tenant: str | None, session: str | None, call: str | None) -> str:
        """Return the lease under which a conversation is kept from now on."""
        name = f"{self._start}-{next(self._names)}" if call is None else call
        lease = self._first.get((tenant, name), f"turn:{name}")
        self._ended.get(tenant, {}).pop(lease, None)
        if session is not None:
            leases = self._leases.setdefault((tenant, session), {})
            self._leases.move_to_end((tenant, session))
            leases[lease] = None
            _limit(leases, _MAX_LEASES)
            _limit(self._leases, _MAX_SESSIONS)
        return lease

    def note_calls(self, tenant: str | None, calls: Sequence[str], lease: str) -> None:
        """Note the calls with which the first turn of a conversation has ended."""
        for call in calls:
            self._first[tenant, call] = lease
            _limit(self._first, _MAX_SESSIONS)

    def end(self, tenant: str | None, lease: str) -> None:
        """Note that a conversation has ended its turn with an answer: nothing says when it goes on."""
        ended = self._ended.setdefault(tenant, {})
        ended[lease] = None
        _limit(ended, _MAX_SESSIONS)
        _limit(self._ended, _MAX_SESSIONS)

    def close(self, tenant: str | None, session: str) -> None:
        """Note that a session is over, with all of its conversations."""
        for lease in self._leases.pop((tenant, session), {}):
            self.end(tenant, lease)

    def take_ended(self, tenant: str | None) -> list[str]:
        """Return leases of a tenant that are to be released, and forget them: some, if there are many."""
        ended = self._ended.pop(tenant, {})
        taken = list(ended)[:_MAX_RELEASES]
        if rest := dict.fromkeys(list(ended)[_MAX_RELEASES:]):
            self._ended[tenant] = rest
        return taken


def _limit(known: dict[Any, Any], most: int) -> None:
    """Forget the oldest, if it is one too many."""
    if len(known) > most:
        del known[next(iter(known))]


class Front:
    """An ASGI application around another.

    Args:
        app: the application behind.
        access: who may ask for what; by default the tenants of the file that ``CARGOHOLD_TENANTS`` names, and vLLM's own keys.
            Raises ``ConfigError`` if the file cannot be read.
        is_strict: whether marks that are impossible are refused. Otherwise they are passed over.
    """

    def __init__(
        self, app: ASGIApp, access: VllmAccess | LimitedAccess | None = None, *, is_strict: bool = False
    ) -> None:
        self._app = app
        if access is None:
            tenants = Tenants.of_environment()
            access = VllmAccess(tenants)
            whose = f"; their secret is {tenants.fingerprint}" if tenants.known else ""
            logger.info("cargohold: the front is on, for %s%s", format_count(len(tenants.known), "tenant"), whose)
        self._access = access
        self._is_strict = is_strict
        self._sessions = Sessions()
        self._has_failed = False
        self._has_looked = False
        self._says = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        self._look_behind(scope.get("app"))
        path = path_of(scope)
        try:
            client = self._access.admit(scope)
            if scope["type"] == "http" and scope["method"] == "POST" and path in PROMPTS:
                await self._prompt(scope, receive, send, client)
            elif self._access.serves_pins and _is_of_pin(scope, path):
                await self._pin(scope, receive, send, client)
            else:
                await self._app(scope, receive, send)
        except ApiError as error:  # the application behind has raised none: it answers its own
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                await error_response(path, error)(scope, receive, send)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _prompt(self, scope: Scope, receive: Receive, send: Send, client: Client) -> None:
        """Serve a request whose body is read."""
        sent = await _whole(receive)
        if sent is None:
            return  # its client has gone
        lease = body = None
        # With tenants it must be understood: a server that reads it otherwise would let them share a cache.
        with suppress(ApiError) if client.tenant is None else nullcontext():
            body = _read(sent)
        if body is not None:
            _keep_apart(body, client)
            lease = self._say(dict(scope["headers"]), body, client)
            if body.has_changed:
                sent = body.encode()
                scope = {**scope, "headers": _with_length(scope["headers"], len(sent))}
        if lease is None:
            await self._app(scope, _first(sent, receive), send)
            return
        end = TurnEndReader()
        await self._app(scope, _first(sent, receive), _read_by(end, send))
        if end.is_answer:
            self._sessions.end(client.tenant, lease)
        elif first_call(body) is None:
            self._sessions.note_calls(client.tenant, end.ids, lease)

    def _say(self, headers: Mapping[bytes, bytes], body: RequestFields, client: Client) -> str | None:
        """Put what is known into a request. Returns the lease of its conversation, if it is kept for its next turn."""
        try:
            hints, lease = self._known(headers, body, client.tenant)
            params = body.get("kv_transfer_params")
            if hints and self._says and (params is None or isinstance(params, dict)):
                body.set("kv_transfer_params", {**(params or {}), FRONT_KEY: hints})
        except MarkError as error:
            raise invalid(str(error), error.param) from error
        except Exception:
            # What is known is worth less than the request.
            if not self._has_failed:
                self._has_failed = True
                logger.exception("cargohold: the front has failed; requests pass without the cache fields of clients")
            return None
        return lease

    def _known(
        self, headers: Mapping[bytes, bytes], body: RequestFields, tenant: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the hints that follow from a request, and the lease of its conversation."""
        session, is_over = session_of(headers, body), is_last(headers, body)
        if session is not None and is_over:
            self._sessions.close(tenant, session)
        if "cargohold_hints" in body.fields or hints_in(_object(body.get("kv_transfer_params"))) is not None:
            return [], None  # explicit hints replace all others
        hints = []
        lease = None
        if may_call(body) and not is_over:
            lease = self._sessions.begin(tenant, session, first_call(body))
            kept = {"lease": lease, "ttl_s": TURN_S, "priority": TURN_PRIORITY}
            hints.append({"action_id": "turn", "action_type": "retain", "payload": kept})
        hints += keeping(body, is_strict=self._is_strict)
        if is_over:  # behind the marks: they say of each prompt what is true while its session lasts
            hints.append({"action_id": "over", "action_type": "retain", "payload": {"priority": 0}})
        for number, ended in enumerate(self._sessions.take_ended(tenant), start=1):
            hints.append({"action_id": f"end-{number}", "action_type": "release", "payload": {"lease": ended}})
        return hints, lease

    # --- without a request --------------------------------------------------------------------------------------------

    async def _pin(self, scope: Scope, receive: Receive, send: Send, client: Client) -> None:
        """Pin a prompt, or release a pin, by a request of one token: connectors see nothing else.

        The prompt is computed for it, unless it is cached.
        """
        if scope["method"] == "DELETE":
            body = RequestFields(b'{"prompt": [0]}')  # any, in any vocabulary
            hint: dict[str, Any] = {"action_type": "release", "payload": {"lease": path_of(scope)[len(PINS) + 1 :]}}
        else:
            body = _read(await _whole(receive) or b"")
            if unknown := next((name for name in body.fields if name not in _OF_PROMPT + _OF_PIN), None):
                raise invalid(f"there is no field {unknown!r:.80} here", unknown[:80], "unknown_field")
            if not isinstance(body.get("lease"), str) or not body.get("lease"):
                raise invalid("lease: a pin needs a name, by which it is released", "lease")
            hint = {"action_type": "pin", "payload": {name: body.get(name) for name in _OF_PIN}}
        _keep_apart(body, client)
        for name, value in {
            **dict.fromkeys(_OF_PIN),
            "max_tokens": 1,
            "kv_transfer_params": {HINTS_KEY: [hint]},
        }.items():
            body.set(name, value)
        path, sent = "/v1/chat/completions" if body.get("messages") else "/v1/completions", body.encode()
        inner = {**scope, "method": "POST", "path": scope.get("root_path", "") + path, "raw_path": path.encode()}
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        inner["headers"] = _with_length([*headers, (b"content-type", b"application/json")], len(sent))
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(inner, _first(sent, receive), keep)
        answer = b"".join(message.get("body", b"") for message in messages[1:])
        if messages[0]["status"] != HTTPStatus.OK:
            for message in messages:
                await send(message)
            return
        params = _object((_object(msgspec.json.decode(answer)) or {}).get("kv_transfer_params")) or {}
        if HINTS_KEY not in params:
            raise ApiError(HTTPStatus.NOT_IMPLEMENTED, "the engine behind this server has no Cargohold connector")
        await json_response({"outcomes": params[HINTS_KEY]})(scope, receive, send)

    def _look_behind(self, app: Any) -> None:
        """Look once at vLLM's application: let answers tell cached tokens; say nothing to an engine without a connector."""
        if self._has_looked:
            return
        self._has_looked = True
        state = getattr(app, "state", None)
        args = getattr(state, "args", None)
        if args is not None and getattr(args, "kv_transfer_config", None) is None:
            self._says = False
            logger.warning(
                "cargohold: this vLLM has no connector (--kv-transfer-config): the front only keeps tenants apart"
            )
        for one in getattr(state, "_state", {}).values():
            if hasattr(one, "enable_prompt_tokens_details"):
                one.enable_prompt_tokens_details = True


def _keep_apart(body: RequestFields, client: Client) -> None:
    """Give a request its tenant's salt, and take from it what its client may not give. Mutates the body."""
    params = body.get("kv_transfer_params")
    if isinstance(params, dict):
        left = {name: value for name, value in client.allowed(params).items() if name != FRONT_KEY}
        if left != params:
            body.set("kv_transfer_params", left or None)
    if client.tenant is None:
        return
    given = body.get("cache_salt")
    salt = client.salt(given if isinstance(given, str) and given else None)
    body.set("cache_salt", salt)
    for name in ("messages", "input") if body.mentions("uuid") else ():
        body.set(name, with_own_media(body.get(name), salt))
    for name in client.withheld:
        body.set(name, None)
    if not isinstance(params, dict):
        body.set("kv_transfer_params", None)


def _is_of_pin(scope: Scope, path: str) -> bool:
    return (scope.get("method") == "POST" and path == PINS) or (
        scope.get("method") == "DELETE" and path.startswith(f"{PINS}/")
    )


def _read(sent: bytes) -> RequestFields:
    """Read a body. Raises ``ApiError`` if it cannot be read."""
    try:
        return RequestFields(sent)
    except ValueError as error:
        raise invalid(f"the body must be a JSON object: {error}") from error


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


async def _whole(receive: Receive) -> bytes | None:
    """The body of a request; ``None`` if its client has gone before it was there."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _first(sent: bytes, receive: Receive) -> Receive:
    """What the application behind receives: the body, and then whatever comes."""
    waiting = [sent]

    async def receive_on() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_on


def _with_length(headers: list[tuple[bytes, bytes]], num_bytes: int) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name not in {b"content-length", b"transfer-encoding"}]
    return [*others, (b"content-length", str(num_bytes).encode())]


def _read_by(end: TurnEndReader, send: Send) -> Send:
    """Sends every message on, as it is, and lets ``end`` read it behind the client's back."""

    async def send_on(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.body":
            end.read(message.get("body", b""))

    return send_on
