"""What bodies and headers say of the future of a prompt, and what answers say of it, in the words of each interface.

It reads what it knows, and never minds what it does not: whether a body is valid is for the server behind to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

_TTLS_S: Final = {"5m": 300.0, "1h": 3600.0}
_DAY_S: Final = 24 * 3600.0
_MAX_MARKS: Final = 4
_MARGIN: Final = 0.05
"""By how much less than estimated a mark covers, as a part of the prompt."""
_LEAST_PART: Final = 0.001
_SESSION_HEADERS: Final = (b"x-dynamo-session-id", b"x-session-id", b"x-claude-code-session-id", b"session-id")
_FINAL_HEADER: Final = b"x-dynamo-session-final"
_LAST_ACTIONS: Final = frozenset({"stop", "close"})
_CALL: Final = re.compile(rb'"(?:tool_call_id|tool_use_id|call_id)"\s*:\s*"([^"\\]{1,100})"')
_CALL_KEYS: Final = (b'"tool_call_id"', b'"tool_use_id"', b'"call_id"')
_MAX_ID_CHARS: Final = 256


class BodyError(ValueError):
    """A body is no JSON object."""


class Body:
    """The body of a request: fields are decoded when they are asked for, and the others stay as they were sent.

    Args:
        sent: what the client has sent. Raises ``BodyError`` if it is no JSON object.

    Attributes:
        sent: the same.
        has_changed: whether fields were set since.
    """

    def __init__(self, sent: bytes) -> None:
        try:
            self._fields: dict[str, msgspec.Raw] = _decoder.decode(sent)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise BodyError(str(error)) from error
        self.sent = sent
        self.has_changed = False

    def has(self, name: str) -> bool:
        """Whether it has a field."""
        return name in self._fields

    def get(self, name: str) -> Any:
        """The value of a field; ``None`` if there is none, or it cannot be read."""
        raw = self._fields.get(name)
        try:
            return None if raw is None else msgspec.json.decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return None

    def set(self, name: str, value: Any) -> None:
        """Give a field a value; ``None`` takes it away. Mutates this."""
        before = self._fields.pop(name, None)
        if value is not None:
            self._fields[name] = msgspec.Raw(msgspec.json.encode(value))
        self.has_changed = self.has_changed or before is not None or value is not None

    def encode(self) -> bytes:
        """The body as it is now."""
        return msgspec.json.encode(self._fields)

    def has_items(self, name: str) -> bool:
        """Whether a field is a list that is not empty. It is not decoded for that."""
        raw = self._fields.get(name)
        return raw is not None and bytes(memoryview(raw)[:64]).lstrip(b" \t\r\n[")[:1] == b"{"

    def mentions(self, name: str) -> bool:
        """Whether this name stands anywhere in what was sent."""
        return name.encode() in self.sent


_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


# --- what a prompt is worth -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wish:
    """A prompt, or the beginning of it, will come again.

    Attributes:
        name: the field that says so.
        ttl_s: within how many seconds.
        part: how much of the prompt, from 0 to 1; ``None`` for all of it and what is generated.
    """

    name: str
    ttl_s: float
    part: float | None = None

    def action(self) -> dict[str, Any]:
        """The hint that says it."""
        part = {} if self.part is None else {"part": self.part}
        return {"action_id": self.name, "action_type": "retain", "payload": {"ttl_s": self.ttl_s, **part}}


class MarkError(ValueError):
    """A mark is impossible.

    Attributes:
        param: where it stands.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def wishes(body: Body, *, is_strict: bool = False) -> list[Wish]:
    """What a body's fields say of its prompt. Raises ``MarkError`` for impossible marks, or passes them over."""
    found: list[Wish] = []
    try:
        found = _marked(body) if body.mentions("cache_control") else []
    except MarkError:
        if is_strict:
            raise
    if body.get("prompt_cache_retention") == "24h":
        found.append(Wish("prompt_cache_retention", _DAY_S))
    return found


def _marked(body: Body) -> list[Wish]:
    marks = [(part, _ttl_of(mark, where)) for part, mark, where in _marks(body)]
    if len(marks) > _MAX_MARKS:
        raise MarkError(f"there are {len(marks)} marks of cache_control; there may be {_MAX_MARKS}", "cache_control")
    return [Wish(f"cache_control-{number}", ttl_s, part) for number, (part, ttl_s) in enumerate(marks, start=1)]


def _ttl_of(mark: object, where: str) -> float:
    ttl = mark.get("ttl") or "5m" if isinstance(mark, dict) else None
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral" or not isinstance(ttl, str) or ttl not in _TTLS_S:
        raise MarkError(f'{where} must be {{"type": "ephemeral"}}, with a ttl of 5m or 1h', where)
    return _TTLS_S[ttl]


def _marks(body: Body) -> Iterator[tuple[float | None, Any, str]]:
    """Yield marks, each with the part of the prompt up to it, and where it stands.

    Nobody knows yet how many tokens a text has, so the part is estimated from its characters. It is rather too small: whether
    a template writes tools or the system's text first, a mark on one of them counts nothing of the other, and what a template
    may leave out (thoughts, pictures, white space) counts as text of the prompt, but not as text before a mark.
    """
    for field, mark in (("cache_control", body.get("cache_control")), ("nvext.cache_control", _of_nvext(body))):
        if mark is not None:
            yield None, mark, field
    system, tools, messages = (body.get(name) for name in ("system", "tools", "messages"))
    of_system, of_tools, of_messages = _blocks(system), _blocks(tools), _conversation(messages)
    head = sum(_sure(block) for block in of_system) + sum(_sure(tool) for tool in of_tools)
    total = sum(_chars(value) for value in (system, tools, messages)) or 1
    last = len(of_messages) - 1
    for name, blocks, head_chars in (("system", of_system, 0), ("tools", of_tools, 0), ("messages", of_messages, head)):
        before = head_chars
        for at, block in enumerate(blocks):
            before += _sure(block)
            if isinstance(block, dict) and (mark := block.get("cache_control")) is not None:
                # Behind the last block there is nothing but the template's own words.
                part = 1.0 if name == "messages" and at == last else before / total - _MARGIN
                yield max(_LEAST_PART, part), mark, f"{name}[{at}].cache_control"


def _of_nvext(body: Body) -> Any:
    nvext = body.get("nvext") if body.mentions("nvext") else None
    return nvext.get("cache_control") if isinstance(nvext, dict) else None


def _blocks(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _conversation(messages: Any) -> list[Any]:
    """The blocks of all messages, in order."""
    found = []
    for message in _blocks(messages):
        found += _blocks(message.get("content")) if isinstance(message, dict) else []
    return found


def _chars(value: Any) -> int:
    """All characters of the texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_chars(item) for item in value.values())
    return sum(_chars(item) for item in value) if isinstance(value, list) else 0


_IN_PROMPTS: Final = ("text", "content", "input", "name", "description", "input_schema", "parameters", "function")


def _sure(block: Any) -> int:
    """Characters of a block that every template writes into the prompt."""
    if isinstance(block, str):
        return len(block.strip())
    if not isinstance(block, dict) or block.get("type") in {"thinking", "redacted_thinking", "image", "image_url"}:
        return 0
    return sum(_chars(block[key]) for key in _IN_PROMPTS if key in block)


# --- who asks ---------------------------------------------------------------------------------------------------------


def session_of(headers: Mapping[bytes, bytes], body: Body) -> str | None:
    """The session that a request belongs to, as its client calls it in one of the ways that there are."""
    for name in _SESSION_HEADERS:
        if headers.get(name):
            return headers[name].decode("latin-1")[:_MAX_ID_CHARS]
    for value in (_hint_of_agent(body).get("session_id"), body.get("session_id"), body.get("prompt_cache_key")):
        if isinstance(value, str) and value:
            return value[:_MAX_ID_CHARS]
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user[:_MAX_ID_CHARS] if isinstance(user, str) and user else None


def is_last(headers: Mapping[bytes, bytes], body: Body) -> bool:
    """Whether a request says that its session is over."""
    if headers.get(_FINAL_HEADER, b"").lower() == b"true":
        return True
    said = _hint_of_agent(body).get("session_control")
    action = said.get("action") if isinstance(said, dict) else said
    return isinstance(action, str) and action in _LAST_ACTIONS


def _hint_of_agent(body: Body) -> Mapping[str, Any]:
    """What agents' frameworks say of a session: verl in ``agent_hint``, Dynamo in ``nvext``."""
    if not (body.mentions("agent_hint") or body.mentions("nvext")):
        return {}
    params = body.get("kv_transfer_params")
    inside = params.get("agent_hint") if isinstance(params, dict) else None
    for said in (body.get("agent_hint"), inside):
        if isinstance(said, dict):
            return said
    nvext = body.get("nvext")
    control = nvext.get("session_control") if isinstance(nvext, dict) else None
    return {"session_id": control.get("session_id"), "session_control": control} if isinstance(control, dict) else {}


def first_call(body: Body) -> str | None:
    """The first tool call that a conversation tells the result of: as long as the conversation grows, it is the same."""
    starts = [at for at in map(body.sent.find, _CALL_KEYS) if at >= 0]  # quicker than a pattern where there is none
    found = _CALL.search(body.sent, min(starts)) if starts else None
    return None if found is None else found[1].decode("utf-8", "replace")


def may_call(body: Body) -> bool:
    """Whether the model is offered tools, so that its turn may end with a call of one."""
    return body.has_items("tools") and body.get("tool_choice") not in ("none", {"type": "none"})


# --- how a turn ended -------------------------------------------------------------------------------------------------

_END: Final = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"(\w+)"')
_CALLED: Final = re.compile(rb'"type"\s*:\s*"(?:function_call|tool_use)"|"tool_calls"\s*:\s*\[\s*\{')
_OVER: Final = re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete)"|"object"\s*:\s*"response"')
_CALLS: Final = frozenset({b"tool_calls", b"tool_use", b"function_call", b"pause_turn"})
_ANSWERS: Final = frozenset(
    {b"stop", b"end_turn", b"stop_sequence", b"length", b"max_tokens", b"refusal", b"content_filter"}
)
_KEPT_BYTES: Final = 64


class TurnEnd:
    """Reads an answer as it passes, and finds out how the turn ended.

    Inside a string of JSON, quotation marks are escaped, so what a model says cannot be taken for what the server says. Only
    the arguments of a call are the model's and no string in Anthropic's answers: they come behind the call itself.
    """

    def __init__(self) -> None:
        self._called = False
        self._ended = False
        self._rest = b""

    def read(self, piece: bytes) -> None:
        """Read the next piece, however it is cut."""
        seen = self._rest + piece
        self._called = self._called or _CALLED.search(seen) is not None
        for reason in _END.findall(seen):
            self._called = self._called or reason in _CALLS
            self._ended = self._ended or reason in _ANSWERS
        self._ended = self._ended or _OVER.search(seen) is not None
        self._rest = seen[-_KEPT_BYTES:]

    @property
    def is_answer(self) -> bool:
        """Whether it ended with an answer, and not with a call, nor in the middle."""
        return self._ended and not self._called
