"""What bodies and headers say of the future of a prompt, and what answers say of it, in the words of each interface.

It reads what it knows, and never minds what it does not: whether a body is valid is for the server behind to say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import islice
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


_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)


class RequestFields:
    """The body of a request: fields are decoded when they are asked for, and the others stay as they were sent.

    Args:
        sent: what the client has sent. Raises ``ValueError`` if it is not JSON object.

    Attributes:
        sent: the same.
        fields: the fields, by name, not decoded.
        has_changed: whether fields were set since.
    """

    def __init__(self, sent: bytes) -> None:
        try:
            self.fields: dict[str, msgspec.Raw] = _decoder.decode(sent)
        except _UNREADABLE as error:
            raise ValueError(str(error)) from error
        self.sent = sent
        self.has_changed = False

    def get(self, name: str) -> Any:
        """The value of a field; ``None`` if there is none, or it cannot be read."""
        raw = self.fields.get(name)
        try:
            return None if raw is None else msgspec.json.decode(raw)
        except _UNREADABLE:
            return None

    def set(self, name: str, value: Any) -> None:
        """Give a field a value; ``None`` takes it away. Mutates this."""
        before = self.fields.pop(name, None)
        if value is not None:
            self.fields[name] = msgspec.Raw(msgspec.json.encode(value))
        self.has_changed = self.has_changed or before is not None or value is not None

    def encode(self) -> bytes:
        return msgspec.json.encode(self.fields)

    def has_items(self, name: str) -> bool:
        """Whether a field is a list that is not empty. It is not decoded for that."""
        raw = self.fields.get(name)
        return raw is not None and bytes(memoryview(raw)[:64]).lstrip(b" \t\r\n[")[:1] == b"{"

    def mentions(self, name: str) -> bool:
        """Whether this name may stand anywhere in what was sent: letters can be written as escapes, too."""
        return name.encode() in self.sent or b"\\u00" in self.sent


_NOT_MEDIA: Final = frozenset({"arguments", "input"})
"""What a model has said to a tool: its fields are no parts of a message."""


def with_own_media(messages: Any, salt: str | None) -> Any:
    """Put a digest of a tenant's salt in front of each name that its client gives a picture or a sound (``uuid``).

    vLLM takes such a name for the contents, no matter which client gave it. Mutates the messages, and returns them.
    """
    if salt is None:
        return messages
    owner = hashlib.sha256(salt.encode()).hexdigest()[:32]
    stack = [messages]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            if one.get("uuid") is not None:
                one["uuid"] = f"{owner}-{one['uuid']}"
            stack += [value for name, value in one.items() if name not in _NOT_MEDIA]
        elif isinstance(one, list):
            stack += one
    return messages


# --- what a prompt is worth -------------------------------------------------------------------------------------------


class MarkError(ValueError):
    """A mark is impossible.

    Attributes:
        param: where it stands.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def keeping(body: RequestFields, *, is_strict: bool = False) -> list[dict[str, Any]]:
    """Hints that keep what a body's fields say will come again. Impossible marks are passed over, or raise ``MarkError``."""
    found = []
    try:
        found = _marked(body) if body.mentions("cache_control") else []
    except MarkError:
        if is_strict:
            raise
    if body.get("prompt_cache_retention") == "24h":
        found.append(_kept("prompt_cache_retention", _DAY_S, None))
    return found


def _marked(body: RequestFields) -> list[dict[str, Any]]:
    marks = [(part, _ttl_of(mark, where)) for part, mark, where in islice(_marks(body), _MAX_MARKS + 1)]
    if len(marks) > _MAX_MARKS:
        raise MarkError(f"at most {_MAX_MARKS} cache_control marks are allowed", "cache_control")
    return [_kept(f"cache_control-{number}", ttl_s, part) for number, (part, ttl_s) in enumerate(marks, start=1)]


def _kept(name: str, ttl_s: float, part: float | None) -> dict[str, Any]:
    payload = {"ttl_s": ttl_s} if part is None else {"ttl_s": ttl_s, "part": part}
    return {"action_id": name, "action_type": "retain", "payload": payload}


def _ttl_of(mark: object, where: str) -> float:
    ttl = mark.get("ttl") or "5m" if isinstance(mark, dict) else None
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral" or not isinstance(ttl, str) or ttl not in _TTLS_S:
        raise MarkError(f'{where} must be {{"type": "ephemeral"}}, with a ttl of 5m or 1h', where)
    return _TTLS_S[ttl]


def _marks(body: RequestFields) -> Iterator[tuple[float | None, Any, str]]:
    """Yield marks, each with the part of the prompt up to it, and where it stands.

    The number of tokens is not known yet, so the part is estimated from its characters. It is rather too small: whether
    a template writes tools or the system's text first, a mark on one of them counts nothing of the other, and what a template
    may leave out (thoughts, pictures, white space) counts as text of the prompt, but not as text before a mark.
    """
    for field, holder in (
        ("cache_control", {"cache_control": body.get("cache_control")}),
        ("nvext", body.get("nvext")),
    ):
        if isinstance(holder, dict) and (mark := holder.get("cache_control")) is not None:
            yield None, mark, field
    system, tools, messages = (body.get(name) for name in ("system", "tools", "messages"))
    of_system, of_tools = _blocks(system, "system"), _blocks(tools, "tools")
    of_messages = [
        block
        for where, message in _blocks(messages, "messages")
        for block in _blocks(message.get("content") if isinstance(message, dict) else None, f"{where}.content")
    ]
    head = sum(_sure(block) for _, block in (*of_system, *of_tools))
    total = sum(_chars(value) for value in (system, tools, messages)) or 1
    for blocks, num_before in ((of_system, 0), (of_tools, 0), (of_messages, head)):
        before = num_before
        for where, block in blocks:
            before += _sure(block)
            if isinstance(block, dict) and (mark := block.get("cache_control")) is not None:
                # Behind the last block there is nothing but the template's own words.
                is_last_block = blocks is of_messages and block is blocks[-1][1]
                part = 1.0 if is_last_block else max(_LEAST_PART, before / total - _MARGIN)
                yield part, mark, f"{where}.cache_control"


def _blocks(value: Any, where: str) -> list[tuple[str, Any]]:
    """The blocks of a content, each with its place; a text alone is one."""
    if isinstance(value, list):
        return [(f"{where}[{at}]", block) for at, block in enumerate(value)]
    return [] if value is None else [(where, value)]


def _chars(value: Any) -> int:
    """All characters of the texts in a value, however deep they lie."""
    num_chars, left = 0, [value]
    while left:
        match left.pop():
            case str(text):
                num_chars += len(text)
            case dict(fields):
                left.extend(fields.values())
            case list(items):
                left.extend(items)
    return num_chars


_IN_PROMPTS: Final = ("text", "content", "input", "name", "description", "input_schema", "parameters", "function")


def _sure(block: Any) -> int:
    """Characters of a block that every template writes into the prompt: no thoughts, no pictures."""
    if isinstance(block, str):
        return len(block.strip())
    if not isinstance(block, dict):
        return 0
    return sum(_chars(block[key]) for key in _IN_PROMPTS if key in block)


# --- the client -------------------------------------------------------------------------------------------------------


def session_of(headers: Mapping[bytes, bytes], body: RequestFields) -> str | None:
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


def is_last(headers: Mapping[bytes, bytes], body: RequestFields) -> bool:
    """Whether a request says that its session is over."""
    if headers.get(_FINAL_HEADER, b"").lower() == b"true":
        return True
    said = _hint_of_agent(body).get("session_control")
    action = said.get("action") if isinstance(said, dict) else said
    return isinstance(action, str) and action in _LAST_ACTIONS


def _hint_of_agent(body: RequestFields) -> Mapping[str, Any]:
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


def first_call(body: RequestFields) -> str | None:
    """The first tool call that a conversation tells the result of: as long as the conversation grows, it is the same."""
    starts = [at for at in map(body.sent.find, _CALL_KEYS) if at >= 0]  # quicker than a pattern where there is none
    found = _CALL.search(body.sent, min(starts)) if starts else None
    return None if found is None else found[1].decode("utf-8", "replace")


def may_call(body: RequestFields) -> bool:
    """Whether the model is offered tools, so that its turn may end with a call of one."""
    return body.has_items("tools") and body.get("tool_choice") not in ("none", {"type": "none"})


# --- how a turn ended -------------------------------------------------------------------------------------------------

_SAID: Final = re.compile(
    rb'"(?:(?:finish|stop)_reason"\s*:\s*"(?P<reason>\w+)"'
    rb'|type"\s*:\s*"(?:(?P<call>function_call|tool_use)|(?P<over>response\.(?:completed|incomplete)))"'
    rb'|tool_calls"\s*:\s*(?P<calls>\[\s*\{)|object"\s*:\s*"(?P<whole>response)")'
)
_ID: Final = re.compile(rb'"(?:call_)?id"\s*:\s*"([^"\\]{1,100})"')
_CALLS: Final = frozenset({b"tool_calls", b"tool_use", b"function_call", b"pause_turn"})
_ANSWERS: Final = frozenset(
    {b"stop", b"end_turn", b"stop_sequence", b"length", b"max_tokens", b"refusal", b"content_filter"}
)
_READ_BYTES: Final = 8192
_KEPT_BYTES: Final = 160
_MAX_IDS: Final = 16


class TurnEndReader:
    """Reads an answer as it passes, and finds out how the turn ended.

    Inside a string of JSON, quotation marks are escaped, so what a model says cannot be taken for what the server says. Only
    the arguments of a call are the model's and no string in Anthropic's answers: they come after the call itself.
    """

    def __init__(self) -> None:
        self._called = False
        self._ended = False
        self._ids: dict[bytes, None] = {}
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def read(self, piece: bytes) -> None:
        """Read the next piece, however it is cut. Small ones are looked at together."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes >= _READ_BYTES:
            self._look()

    def _look(self) -> None:
        seen = b"".join(self._pieces)
        for said in _SAID.finditer(seen):
            reason = said["reason"]
            self._called = self._called or reason in _CALLS or (said["call"] or said["calls"]) is not None
            self._ended = self._ended or reason in _ANSWERS or (said["over"] or said["whole"]) is not None
        if self._called and len(self._ids) < _MAX_IDS:
            self._ids.update(dict.fromkeys(_ID.findall(seen)))
        self._pieces, self._num_bytes = [seen[-_KEPT_BYTES:]], 0

    @property
    def is_answer(self) -> bool:
        """Whether it ended with an answer, and not with a call, nor in the middle."""
        self._look()
        return self._ended and not self._called

    @property
    def ids(self) -> list[str]:
        """What has an id in an answer with calls: the calls, and a few things more that no request asks for again."""
        self._look()
        return [found.decode("utf-8", "replace") for found in self._ids]
