"""The front before an application that tells what reaches it: words, tenants, turns, and what passes as it is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold import ConfigError
from cargohold.cache.shares import MAX_SHARES
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.tenants import UNKNOWN, Tenant, Tenants, _unknown, stored_secret, tenant_in
from cargohold.protocol import FRONT_KEY, Hint, parse_hints
from cargohold.serve import front as front_module
from cargohold.serve.access import PROMPTS, VllmAccess
from cargohold.serve.front import Front

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOLS: Any = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
CALLED = b'{"choices":[{"message":{"tool_calls":[{"id":"c1"}]},"finish_reason":"tool_calls"}]}'
ANSWERED = b'{"choices":[{"message":{"content":"done","tool_calls":[]},"finish_reason":"stop"}]}'
MARK: Any = {"type": "ephemeral"}
TENANTS = {"acme": {"key": "of acme"}, "zebra": {"key": "of zebra", "hints": "off"}}


class Behind:
    """An application that remembers requests and answers what it is told to."""

    def __init__(self, *pieces: bytes, args: Any = None) -> None:
        self.pieces = list(pieces) or [b"{}"]
        self.status = 200
        self.seen: list[tuple[dict[str, Any], bytes]] = []
        self.state = SimpleNamespace(_state={}, args=args) if args is not None else SimpleNamespace(_state={})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive() if scope["type"] == "http" else {}
        self.seen.append((dict(scope), message.get("body", b"")))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def body(self) -> Any:
        """The last body, as JSON."""
        return json.loads(self.seen[-1][1])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.seen[-1][0]["headers"])

    @property
    def hints(self) -> list[Hint]:
        """What the last request has said to the cache."""
        hints, rejected = parse_hints((self.body.get("kv_transfer_params") or {}).get(FRONT_KEY, []))
        assert not rejected
        return hints


class Reply(list[dict[str, Any]]):
    """Messages that came back."""

    @property
    def status(self) -> int:
        return int(self[0]["status"])

    @property
    def pieces(self) -> list[bytes]:
        return [message["body"] for message in self[1:]]

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.pieces))


class Line:
    """Asks a front."""

    def __init__(self, behind: Behind, tenants: Tenants | None = None, **options: Any) -> None:
        self.behind = behind
        self.front = Front(behind, VllmAccess(tenants or Tenants()), **options)

    def ask(
        self,
        body: Any,
        path: str = CHAT,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        kind: str = "http",
        cut: int | None = None,
    ) -> Reply:
        """One request; a body that is not bytes is sent as JSON, and ``cut`` in pieces of so many bytes."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        pieces = [sent] if cut is None else [sent[at : at + cut] for at in range(0, len(sent), cut)]
        waiting = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, start=1)
        ]
        waiting.append({"type": "http.disconnect"})
        sent_headers = [
            (b"content-length", str(len(sent)).encode()),
            *([(b"content-type", b"application/json")] if sent else []),
        ]
        sent_headers += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": kind, "method": method, "path": path, "headers": sent_headers, "app": self.behind}
        reply = Reply()

        async def receive() -> Any:
            return waiting.pop(0)

        async def send(message: Any) -> None:
            reply.append(message)

        asyncio.run(self.front(scope, receive, send))
        return reply


@pytest.fixture
def line() -> Line:
    """A front without tenants."""
    return Line(Behind())


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    """Two tenants, of a file."""
    return Tenants.read(write(tmp_path / "tenants.json", TENANTS))


def write(file: Path, named: object) -> Path:
    file.write_text(json.dumps(named), encoding="utf-8")
    file.chmod(0o600)
    return file


@pytest.fixture
def kept_apart(tenants: Tenants) -> Line:
    """A front with these tenants."""
    return Line(Behind(), tenants)


def keyed(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- what passes as it is ---------------------------------------------------------------------------------------------

STRANGE = (
    b"",
    b"{",
    b"[1]",
    b'"text"',
    b"\xff",
    b'{"a": NaN}',
    b"[" * 5000,
    b'{"a":' * 5000,
    '{"a": 1}'.encode("utf-16"),
)


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_not_understood_passes_untouched(line: Line, body: bytes) -> None:
    assert line.ask(body).status == 200
    assert line.behind.seen[-1][1] == body


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:12]))
def test_with_tenants_it_is_refused_for_the_server_behind_might_read_it_otherwise(
    kept_apart: Line, body: bytes
) -> None:
    reply = kept_apart.ask(body, headers=keyed("of acme"))
    assert (reply.status, reply.json["error"]["type"], kept_apart.behind.seen) == (400, "invalid_request_error", [])


def test_a_body_of_which_there_is_nothing_to_say_passes_byte_for_byte(line: Line) -> None:
    sent = b'{ "model" : "m",\n "messages": [ {"role":"user","content":"caf\\u00e9 \xc3\xa9"} ], "x": 1.50, "x": 2e3 }'
    for path in (*sorted(PROMPTS), "/v1/embeddings", "/anything"):
        line.ask(sent, path)
        assert line.behind.seen[-1][1] == sent


def test_fields_of_which_there_is_nothing_to_say_stay_as_they_were_sent(line: Line) -> None:
    numbers = b'[1.50, 2e3, 123456789012345678901234567890, "\\u00e9", 1E400]'
    line.ask(b'{"prompt_cache_retention": "24h", "logit_bias": ' + numbers + b"}", cut=7)
    assert b'"logit_bias":' + numbers in line.behind.seen[-1][1]
    assert line.behind.headers[b"content-length"] == str(len(line.behind.seen[-1][1])).encode()


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "with tools"])
def test_a_stream_passes_byte_for_byte_however_it_is_cut(tools: Any) -> None:
    pieces = [b'data: {"choices":[{"delta":', b'{"content":"a"}}', b"]}\n\nda", b"ta: [DONE]", b"\n\n", b""]
    line = Line(Behind(*pieces))
    assert line.ask({**ASKED, "tools": tools, "stream": True}).pieces == [*pieces, b""]


def test_a_fault_of_its_own_passes_the_request_on_and_is_logged_once(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(front_module, "session_of", fail)
    for _ in range(3):
        assert line.ask({**ASKED, "tools": TOOLS}).status == 200
        assert line.behind.body == {**ASKED, "tools": TOOLS}
    assert [record.message for record in caplog.records] == [
        "cargohold: the front has failed; requests pass without the cache fields of clients"
    ]


def test_with_tenants_a_fault_still_keeps_them_apart(kept_apart: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "keeping", None)
    assert kept_apart.ask(ASKED, headers=keyed("of acme")).status == 200
    assert kept_apart.behind.body["cache_salt"].startswith("ch1.")


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing(line: Line) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(line.front(scope, receive, send))
    assert not line.behind.seen


def test_that_a_client_has_gone_reaches_the_server_behind(line: Line) -> None:
    seen: list[str] = []

    async def behind(_scope: Any, receive: Any, _send: Any) -> None:
        seen.extend([(await receive())["type"] for _ in range(2)])

    line.front._app = behind
    line.ask({**ASKED, "tools": TOOLS})
    assert seen == ["http.request", "http.disconnect"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KNOWN_FIELDS = (
    "agent_hint", "cache_control", "cache_salt", "cargohold_hints", "kv_transfer_params", "messages", "metadata", "nvext",
    "prompt_cache_key", "prompt_cache_retention", "request_id", "session_id", "system", "tool_choice", "tools", "vllm_xargs",
)  # fmt: skip
blocks = st.dictionaries(
    st.sampled_from(
        ("cache_control", "content", "text", "type", "tool_use_id", "session_id", "session_control", "action")
    ),
    json_values | st.just(MARK),
    max_size=4,
)
values = (
    json_values
    | blocks
    | st.lists(blocks | json_values, max_size=4)
    | st.just({FRONT_KEY: [{"lease": "x"}], "remote": 1})
)
bodies = st.dictionaries(st.sampled_from(KNOWN_FIELDS), values, max_size=6)


@given(bodies, st.sampled_from(sorted(PROMPTS)))
def test_whatever_is_sent_the_server_behind_gets_it_with_the_tenant_s_salt(body: Any, path: str) -> None:
    known = Tenants.read(_file())
    line = Line(Behind(ANSWERED), known)
    reply = line.ask(body, path, {**keyed("of acme"), "x-session-id": "s"})
    assert reply.status == 200
    assert tenant_in(line.behind.body["cache_salt"]) == known.identity("acme")
    params = line.behind.body.get("kv_transfer_params", {})
    assert isinstance(params, dict) and "remote" not in params
    assert all(hint.lease != "x" for hint in line.behind.hints)
    assert not {"request_id", "vllm_xargs"} & line.behind.body.keys()


@given(bodies, st.sampled_from(sorted(PROMPTS)))
def test_whatever_is_sent_without_tenants_nothing_but_hints_is_added(body: Any, path: str) -> None:
    line = Line(Behind(CALLED))
    assert line.ask(body, path).status == 200
    before, after = dict(body), line.behind.body
    params, given_params = after.pop("kv_transfer_params", None), before.pop("kv_transfer_params", None)
    assert after == before
    if isinstance(given_params, dict):
        kept = {name: value for name, value in (params or {}).items() if name != FRONT_KEY}
        assert kept == {name: value for name, value in given_params.items() if name != FRONT_KEY}


def _file() -> Path:
    """A file of tenants for tests that Hypothesis repeats."""
    file = Path(os.environ["CARGOHOLD_TENANTS"])
    return file if file.exists() else write(file, TENANTS)


@pytest.fixture(autouse=True, scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["CARGOHOLD_TENANTS"] = str(tmp_path_factory.mktemp("fuzz") / "tenants.json")
    yield
    del os.environ["CARGOHOLD_TENANTS"]


# --- words ------------------------------------------------------------------------------------------------------------


def marked(text: str, **mark: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {**MARK, **mark}}


@pytest.mark.parametrize(
    ("path", "body", "ttls"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [marked("a"), marked("b", ttl="1h")]}]}, [300.0, 3600.0]),
        (MESSAGES, {"system": [marked("a")], "messages": []}, [300.0]),
        (MESSAGES, {"tools": [{"name": "t", "input_schema": {}, "cache_control": MARK}], "messages": []}, [300.0]),
        (MESSAGES, {"cache_control": MARK, "messages": []}, [300.0]),
        (CHAT, {"messages": [{"role": "system", "content": [marked("a")]}]}, [300.0]),
        (CHAT, {"messages": [], "prompt_cache_retention": "24h"}, [86400.0]),
        (RESPONSES, {"input": "a", "prompt_cache_retention": "24h"}, [86400.0]),
        (CHAT, {"messages": [], "nvext": {"cache_control": {**MARK, "ttl": "1h"}}}, [3600.0]),
        (CHAT, {"messages": [], "prompt_cache_retention": "in_memory"}, []),
        (CHAT, {"messages": [{"role": "user", "content": 'an "cache_control" in words'}]}, []),
    ],
    ids=str,
)
def test_each_interface_s_words_say_how_long_a_prompt_is_kept(
    line: Line, path: str, body: Any, ttls: list[float]
) -> None:
    line.ask(body, path)
    kept = [hint for hint in line.behind.hints if hint.lease is None]
    assert [hint.ttl_s for hint in kept] == ttls
    assert all((hint.kind, hint.priority) == ("retain", 80) for hint in kept)


def test_a_mark_covers_less_of_the_prompt_than_is_before_it_and_the_last_one_all_of_it(line: Line) -> None:
    texts = ["The ship sails on. " * 30, "It is late. " * 50, "And then? " * 9]
    system, history, question = (marked(text) for text in texts)
    thought = {"type": "thinking", "thinking": "which no template writes " * 40}
    messages = [{"role": "assistant", "content": [thought, history]}, {"role": "user", "content": [question]}]
    line.ask({"system": [system], "tools": [{"name": "t", "description": "x" * 500}], "messages": messages}, MESSAGES)
    of_system, of_history, whole = [hint.part for hint in line.behind.hints if hint.lease is None]
    # As a template might write it that knows tools, and no thoughts.
    lengths = [len(texts[0]), 500 + len(texts[1]), len(texts[2])]
    assert of_system is not None and of_history is not None
    assert 0.5 * lengths[0] / sum(lengths) * 0.5 < of_system < lengths[0] / sum(lengths)
    assert of_system < of_history < sum(lengths[:2]) / sum(lengths)
    assert whole == 1.0
    assert Hint.retain(part=whole).within(64).end == 64 and Hint.retain(part=0.001).within(64).end == 1


def parts(line: Line, **fields: Any) -> list[float]:
    """The parts of a prompt that its marks cover."""
    line.ask(fields, MESSAGES)
    return [hint.part for hint in line.behind.hints if hint.lease is None and hint.part is not None]


def test_a_mark_counts_what_every_template_writes_before_it_and_nothing_else(line: Line) -> None:
    """Texts of 1,000 characters in all: each part is some 0.05 below what is sure to be before the mark."""
    rest = {"role": "user", "content": "c" * 400}
    (of_first,) = parts(line, system="s" * 500, messages=[{"role": "user", "content": [marked("a" * 100)]}, rest])
    assert 0.50 < of_first < 0.56, "what is before all messages counts, less a margin"
    tool = {"name": "t", "description": "x" * 99, "cache_control": MARK}
    (of_tool,) = parts(line, system="s" * 500, tools=[tool], messages=[rest])
    assert of_tool < 0.06, "a template may write tools first"
    thought = {"type": "thinking", "thinking": "t" * 500}
    said = {"role": "assistant", "content": [thought, marked("a" * 100)]}
    assert parts(line, messages=[said, rest])[0] < 0.06, "a template may leave thoughts out"
    spaced = {"role": "user", "content": [" " * 500, marked("a" * 100)]}
    assert parts(line, messages=[spaced, rest])[0] < 0.06, "and white space"


@pytest.mark.parametrize("marks", [[{"type": "eternal"}], [{**MARK, "ttl": "2h"}], [1], [MARK] * 5], ids=str)
def test_marks_that_are_impossible_are_passed_over_and_refused_where_it_is_strict(marks: Any) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": one} for one in marks]}
        ]
    }
    lenient, strict = Line(Behind()), Line(Behind(), is_strict=True)
    assert (lenient.ask(body, MESSAGES).status, lenient.behind.hints) == (200, [])
    refused = strict.ask(body, MESSAGES)
    assert (refused.status, refused.json["type"], strict.behind.seen) == (400, "error", [])
    assert "cache_control" in refused.json["error"]["message"]


def test_a_tool_of_any_depth_hinders_no_mark(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    deep = json.loads('{"a":' * 800 + "1" + "}" * 800)
    marked = [{"type": "text", "text": "a", "cache_control": MARK}]
    line.ask(
        {"messages": [{"role": "user", "content": marked}], "tools": [{"name": "tide", "input_schema": deep}]}, MESSAGES
    )
    assert len(line.behind.hints) == 2 and not caplog.records


def test_a_block_whose_type_is_no_text_hinders_no_mark(line: Line) -> None:
    kinds: Any = ({}, [], None)
    content = [{"type": kind, "text": "a"} for kind in kinds]
    content.append({"type": "text", "text": "a", "cache_control": MARK})
    line.ask({"messages": [{"role": "user", "content": content}]}, MESSAGES)
    assert [hint.part for hint in line.behind.hints] == [1.0]


def test_who_gives_hints_by_name_has_said_what_there_is_to_say(line: Line) -> None:
    named: Any = (
        {"cargohold_hints": []},
        {"kv_transfer_params": {"kv_hint": {"actions": []}}},
    )
    for own in named:
        body = {**ASKED, "tools": TOOLS, "prompt_cache_retention": "24h", **own}
        line.ask(body)
        assert line.behind.body == body


def test_a_client_cannot_speak_as_the_front(line: Line) -> None:
    line.ask(
        {**ASKED, "kv_transfer_params": {FRONT_KEY: [{"action_type": "release", "payload": {"lease": "of others"}}]}}
    )
    assert line.behind.body == ASKED


# --- turns ------------------------------------------------------------------------------------------------------------


def turn(*results: str, **fields: Any) -> dict[str, Any]:
    """A turn of an agent, with the results of these calls."""
    told = [{"role": "tool", "tool_call_id": call, "content": "high"} for call in results]
    return {**ASKED, "messages": [*ASKED["messages"], *told], "tools": TOOLS, **fields}


def leases(behind: Behind, kind: str = "retain") -> list[str | None]:
    return [hint.lease for hint in behind.hints if hint.lease is not None and hint.kind == kind]


def test_a_conversation_is_kept_while_its_tool_runs_and_released_when_it_was_answered() -> None:
    line = Line(Behind(CALLED))
    line.ask(turn())
    (name,) = leases(line.behind)
    line.ask(turn("c1"))
    line.ask(turn("c1", "c2"))
    assert leases(line.behind) == [name], "its calls tell it apart"
    elsewhere = Line(Behind(CALLED))
    elsewhere.ask(turn("c1", "c2"))
    assert leases(elsewhere.behind) == ["turn:c1"], "another API server, and every other one"
    assert leases(line.behind, "release") == []
    line.behind.pieces = [ANSWERED]
    line.ask(turn("c1", "c2", "c3"))
    line.ask(ASKED)
    assert (leases(line.behind), leases(line.behind, "release")) == ([], [name])
    line.ask({**ASKED, "n": 1})
    assert line.behind.hints == [], "it is said once"
    line.ask(turn("c1"))
    line.ask(turn("c1"))
    assert leases(line.behind, "release") == [], "it has begun again"


def test_an_answer_of_several_looks_is_read_across_their_border() -> None:
    """Found by a mutant: what is kept of the pieces before could be nothing."""
    begin = b'{"choices":[{"message":{"tool_calls":[{"id":"c1"},{"x":"' + b"a" * 8192
    end = b'","id":"c2"}]},"finish_reason":"tool_calls"}]}'
    for at in range(len(end)):
        line = Line(Behind(begin + end[:at], end[at:]))
        line.ask(turn())
        (name,) = leases(line.behind)
        line.ask(turn("c2"))
        assert leases(line.behind) == [name], "any of its calls may come back first"
    text = b'{"choices":[{"message":{"content":"' + b"a" * 8192
    over = b'"},"finish_reason":"stop"}]}'
    for at in range(len(over)):
        line = Line(Behind(text + over[:at], over[at:]))
        line.ask(turn("c1"))
        line.ask(ASKED)
        assert leases(line.behind, "release") == ["turn:c1"], at


ENDS: Mapping[str, tuple[str, bytes, bool]] = {
    "OpenAI, answer": (CHAT, ANSWERED, True),
    "OpenAI, tool": (CHAT, CALLED, False),
    "OpenAI, forced tool": (
        CHAT,
        b'{"choices":[{"message":{"tool_calls":[{"id":"a"}]},"finish_reason":"stop"}]}',
        False,
    ),
    "OpenAI, cut off": (CHAT, b'{"choices":[{"message":{"content":"a"},"finish_reason":"length"}]}', True),
    "OpenAI, error": (CHAT, b'{"error":{"message":"no"}}', False),
    "OpenAI, in words": (CHAT, rb'{"choices":[{"message":{"content":"\"finish_reason\":\"stop\""}}]}', False),
    "Anthropic, answer": (MESSAGES, b'{"type":"message","content":[],"stop_reason":"end_turn"}', True),
    "Anthropic, tool": (
        MESSAGES,
        b'{"content":[{"type":"tool_use","id":"a","input":{"stop_reason":"end_turn"}}],"stop_reason":"tool_use"}',
        False,
    ),
    "Anthropic, stream": (
        MESSAGES,
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{}}\n\n',
        True,
    ),
    "Anthropic, not ended": (MESSAGES, b'data: {"type":"message_start","message":{"stop_reason":null}}\n\n', False),
    "Responses, answer": (RESPONSES, b'{"id":"r","object":"response","output":[{"type":"message"}]}', True),
    "Responses, tool": (RESPONSES, b'{"object":"response","output":[{"type":"function_call","call_id":"a"}]}', False),
    "Responses, stream": (RESPONSES, b'data: {"type":"response.completed","response":{"output":[]}}\n\n', True),
}


@pytest.mark.parametrize("cut", [1000, 1, 7], ids=["whole", "byte by byte", "in pieces"])
@pytest.mark.parametrize("name", ENDS)
def test_how_a_turn_ended_is_read_from_the_answer(name: str, cut: int) -> None:
    path, answer, is_answer = ENDS[name]
    line = Line(Behind(*(answer[at : at + cut] for at in range(0, len(answer), cut))))
    line.ask(turn("c1"), path)
    line.ask(ASKED, path)
    assert leases(line.behind, "release") == (["turn:c1"] if is_answer else [])


def in_header(name: str) -> Callable[[str], tuple[dict[str, str], dict[str, Any]]]:
    return lambda session: ({name: session}, {})


def in_body(make: Callable[[str], dict[str, Any]]) -> Callable[[str], tuple[dict[str, str], dict[str, Any]]]:
    return lambda session: ({}, make(session))


DIALECTS = {
    "vLLM, OpenCode": in_header("X-Session-ID"),
    "Dynamo": in_header("X-Dynamo-Session-ID"),
    "Claude Code": in_header("x-claude-code-session-id"),
    "Codex": in_header("session-id"),
    "vLLM's field": in_body(lambda session: {"session_id": session}),
    "OpenAI": in_body(lambda session: {"prompt_cache_key": session}),
    "Anthropic": in_body(lambda session: {"metadata": {"user_id": session}}),
    "verl": in_body(lambda session: {"kv_transfer_params": {"agent_hint": {"session_id": session}}}),
    "agent_hint": in_body(lambda session: {"agent_hint": {"session_id": session}}),
    "nvext": in_body(lambda session: {"nvext": {"session_control": {"session_id": session}}}),
}
LAST = {
    "header": ({"X-Dynamo-Session-Final": "true", "X-Session-ID": "s"}, {}),
    "verl": ({}, {"kv_transfer_params": {"agent_hint": {"session_id": "s", "session_control": "stop"}}}),
    "nvext": ({}, {"nvext": {"session_control": {"session_id": "s", "action": "close"}}}),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_session_that_says_that_it_is_over_is_released_whichever_way_it_says_who_it_is(
    dialect: str, last: str
) -> None:
    line = Line(Behind(CALLED))
    for session in ("s", "other"):
        headers, fields = DIALECTS[dialect](session)
        line.ask(turn(f"{session}1", **fields), headers=headers)
        line.ask(turn(f"{session}2", **fields), headers=headers)
    headers, fields = LAST[last]
    line.ask({**ASKED, **fields}, headers=headers)
    assert (leases(line.behind), leases(line.behind, "release")) == ([], ["turn:s1", "turn:s2"])


@pytest.mark.parametrize("last", LAST)
def test_what_the_last_request_of_a_session_has_goes_first_whatever_marks_say(line: Line, last: str) -> None:
    headers, fields = LAST[last]
    marked = {**turn("c1", **fields), "prompt_cache_retention": "24h"}
    line.ask(marked, headers=headers)
    over = line.behind.hints[-1]
    assert (over.kind, over.priority, over.start, over.end, over.lease) == ("retain", 0, 0, None, None)
    line.ask(marked, headers={"X-Session-ID": "s", "X-Dynamo-Session-Final": "false"} if not fields else {})
    assert [hint.priority for hint in line.behind.hints if hint.is_lowering] == ([0] if fields else [])


def test_a_session_that_is_over_is_over_for_its_tenant_alone_and_once(kept_apart: Line) -> None:
    kept_apart.behind.pieces = [CALLED]
    final = {"X-Session-ID": "s", "X-Dynamo-Session-Final": "True"}
    for tenant in ("acme", "zebra"):
        kept_apart.ask(turn(f"{tenant}1"), headers={**keyed(f"of {tenant}"), "X-Session-ID": "s"})
    for expected in (["turn:acme1"], []):
        kept_apart.ask(turn("acme1"), headers={**keyed("of acme"), **final})
        assert leases(kept_apart.behind, "release") == expected
        assert leases(kept_apart.behind) == [], "nothing follows a last request, whatever tools it has"
    kept_apart.ask(ASKED, headers={**keyed("of zebra"), **final})
    assert leases(kept_apart.behind, "release") == ["turn:zebra1"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Dynamo-Session-Final": "false", "X-Session-ID": "s"}, {}),
        ({"X-Dynamo-Session-Final": "", "X-Session-ID": "s"}, {}),
        ({}, {"nvext": {"session_control": {"session_id": "s", "action": "open"}}}),
        ({}, {"agent_hint": {"session_id": "s", "session_control": "continue"}}),
    ],
)
def test_a_session_that_says_that_it_goes_on_is_kept(headers: dict[str, str], fields: dict[str, Any]) -> None:
    line = Line(Behind(CALLED))
    line.ask(turn("c1"), headers={"X-Session-ID": "s"})
    line.ask({**ASKED, **fields}, headers=headers)
    assert leases(line.behind, "release") == []


def test_more_that_has_ended_than_one_request_says_is_said_by_the_next_ones() -> None:
    line = Line(Behind(ANSWERED))
    names = [f"turn:c{number}" for number in range(20)]
    for name in names:
        line.front._sessions.end(None, name)
    said = []
    for _ in range(3):
        line.ask(ASKED)
        said.append(leases(line.behind, "release"))
    assert said == [names[:16], names[16:], []]


def test_what_is_remembered_of_sessions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_MAX_SESSIONS", 8)
    line = Line(Behind(ANSWERED))
    for number in range(50):
        line.front._sessions.begin("acme", f"session {number}", f"call {number}")
        line.front._sessions.end("acme", f"turn:call {number}")
        line.front._sessions.end(f"tenant {number}", "a lease")
    assert len(line.front._sessions._leases) <= 8 and len(line.front._sessions._ended) <= 8
    assert len(line.front._sessions.take_ended("tenant 49")) == 1


# --- tenants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [keyed("of acme"), {"x-api-key": "of acme"}, {"Authorization": "bearer of acme"}])
def test_a_tenant_is_known_by_its_key_which_goes_no_further(kept_apart: Line, headers: dict[str, str]) -> None:
    assert kept_apart.ask(ASKED, headers=headers).status == 200
    assert b"of acme" not in repr(kept_apart.behind.seen).encode()
    assert not {b"authorization", b"x-api-key"} & kept_apart.behind.headers.keys()


@pytest.mark.parametrize("headers", [{}, keyed("of nobody"), {"x-api-key": ""}, {"authorization": "Basic of acme"}])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/models", "/invocations", "/tokenize", "/cache/pins"])
def test_who_has_no_key_is_refused_in_the_words_of_the_interface(
    kept_apart: Line, path: str, headers: dict[str, str]
) -> None:
    reply = kept_apart.ask(ASKED, path, headers)
    assert (reply.status, kept_apart.behind.seen) == (401, [])
    assert reply.json["error"]["type"] == "authentication_error"
    assert ("type" in reply.json) == (path == MESSAGES)


def test_vllm_s_own_key_is_shown_to_it_for_tenants_and_is_its_operator_s(tenants: Tenants) -> None:
    line = Line(Behind(args=SimpleNamespace(api_key=["of vllm"], kv_transfer_config={})), tenants)
    line.ask(ASKED, headers={"x-api-key": "of acme"})
    assert line.behind.headers[b"authorization"] == b"Bearer of vllm"
    line.ask({**ASKED, "cache_salt": "mine"}, headers=keyed("of vllm"))
    assert line.behind.body["cache_salt"] == "mine"
    assert line.ask(b"", "/collective_rpc", keyed("of vllm")).status == 200
    assert line.behind.headers[b"authorization"] == b"Bearer of vllm"


@pytest.mark.parametrize(
    "path",
    [
        "/invocations", "/v1/load_lora_adapter", "/inference/v1/generate", "/cohere/v2/chat", "/pause", "/reset_prefix_cache",
        "/v1/embeddings", "/v1/chat/completions/", "//v1/chat/completions", "/v1/chat/completions/render", "/metrics/..",
    ],
)  # fmt: skip
def test_what_cannot_be_kept_apart_is_not_for_tenants(kept_apart: Line, path: str) -> None:
    refused = kept_apart.ask(ASKED, path, keyed("of acme"))
    assert (refused.status, refused.json["error"]["code"], kept_apart.behind.seen) == (403, "operator_only", [])


def test_tenants_cannot_open_a_socket(kept_apart: Line) -> None:
    closed = kept_apart.ask(b"", "/v1/realtime", keyed("of acme"), kind="websocket")
    assert [message["type"] for message in closed] == ["websocket.close"]
    assert not kept_apart.behind.seen


def test_probes_and_browsers_need_no_key(kept_apart: Line) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert [kept_apart.ask(b"", path, method=method).status for method in ("GET", "HEAD")] == [200, 200]
        assert kept_apart.ask(b"", path, method="POST").status == 401
    assert kept_apart.ask(b"", CHAT, method="OPTIONS").status == 200


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("with_tenants", [True, False])
def test_a_key_that_is_sent_twice_is_refused_as_another_server_reads_the_other_one(
    tenants: Tenants, name: str, *, with_tenants: bool
) -> None:
    line = Line(Behind(), tenants if with_tenants else None)
    twice = line.ask(ASKED, headers={name: "Bearer of acme", name.upper(): "Bearer of zebra"})
    assert (twice.status, twice.json["error"]["code"], line.behind.seen) == (400, "two_keys", [])


def test_without_tenants_vllm_decides_and_learns_of_anthropic_s_header_too(line: Line) -> None:
    line.ask(ASKED, headers={"x-api-key": "a key"})
    assert line.behind.headers[b"authorization"] == b"Bearer a key"
    line.ask(ASKED, headers={"x-api-key": "a key", **keyed("another")})
    assert line.behind.headers[b"authorization"] == b"Bearer another"


def test_a_salt_is_the_tenant_s_whatever_its_client_says() -> None:
    tenants = Tenants.read(_file())
    kept_apart = Line(Behind(), tenants)

    def salt(key: str, **fields: Any) -> str:
        kept_apart.ask({**ASKED, **fields}, headers=keyed(key))
        return str(kept_apart.behind.body["cache_salt"])

    acme, zebra = salt("of acme"), salt("of zebra")
    assert acme == tenants.identity("acme") != zebra
    users = [salt("of acme", cache_salt=one) for one in ("ann", "bob", zebra)]
    assert len({*users, acme}) == 4
    assert [tenant_in(one) for one in users] == [acme] * 3, "whoever it is, it is the same tenant"
    assert salt("of acme", cache_salt="ann") == users[0]
    assert salt("of acme", cache_salt="") == salt("of acme", cache_salt=None) == acme
    assert all(len(one) <= 128 and not set("@/\\\0") & set(one) for one in users), "vLLM refuses others"
    assert tenant_in("anything") == "anything" and tenant_in(None) is None


def test_what_a_tenant_may_not_ask_of_connectors_is_taken_from_its_request(kept_apart: Line) -> None:
    mine = {"cargohold_explain": True, "max_load_tokens": 5, "cargohold_hints": []}
    others = {"do_remote_prefill": True, "remote_engine_id": "e", "cargohold_handoff": {}}
    body = {**ASKED, "kv_transfer_params": {**mine, **others}, "request_id": "of another", "vllm_xargs": {"a": 1}}
    kept_apart.ask(body, headers=keyed("of acme"))
    assert kept_apart.behind.body["kv_transfer_params"] == mine
    assert not {"request_id", "vllm_xargs"} & kept_apart.behind.body.keys()


def _logo(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None, "uuid": "logo", **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [_logo()]}]}),
        (CHAT, {"messages": [{"role": "tool", "content": [{"type": "result", "content": [_logo(uuid=7)]}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [_logo()]}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": [_logo()]}]}),
        ("/cache/pins", {"lease": "l", "messages": [{"role": "user", "content": [_logo()]}]}),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"image_url": null, "\\u0075uid": "logo"}]}]}'),
    ],
    ids=["part", "nested", "responses", "output", "pin", "escaped"],
)
def test_a_name_that_a_client_gives_a_picture_is_its_tenant_s_own(kept_apart: Line, path: str, body: Any) -> None:
    """Found by serving: with the name alone, a tenant got the answer to another one's picture."""

    def names(key: str) -> list[str]:
        kept_apart.ask(body, path, headers=keyed(key))
        return re.findall(r'"uuid": ?"([^"]+)"', kept_apart.behind.seen[-1][1].decode())

    (mine,), (other,) = names("of acme"), names("of zebra")
    assert mine != other and mine == names("of acme")[0]
    assert {mine.rpartition("-")[2], other.rpartition("-")[2]} <= {"logo", "7"}


def test_users_whom_a_tenant_keeps_apart_have_names_of_their_own(kept_apart: Line) -> None:
    def name(user: str) -> str:
        body = {"messages": [{"role": "user", "content": [_logo()]}], "cache_salt": user}
        kept_apart.ask(body, headers=keyed("of acme"))
        return str(kept_apart.behind.body["messages"][0]["content"][0]["uuid"])

    assert name("ann") == name("ann") != name("bob")


def test_what_a_model_says_to_a_tool_is_nobody_s_name(kept_apart: Line) -> None:
    use = {"type": "tool_use", "id": "t", "name": "find", "input": {"uuid": "logo"}}
    body = {**ASKED, "messages": [{"role": "assistant", "content": [use]}]}
    kept_apart.ask(body, MESSAGES, headers=keyed("of acme"))
    assert kept_apart.behind.body["messages"] == body["messages"]


def test_turns_of_one_tenant_are_not_said_with_another_s_requests(tenants: Tenants) -> None:
    line = Line(Behind(ANSWERED), tenants)
    line.ask(turn("c1"), headers=keyed("of acme"))
    line.ask(ASKED, headers=keyed("of zebra"))
    assert leases(line.behind, "release") == []
    line.ask(ASKED, headers=keyed("of acme"))
    assert leases(line.behind, "release") == ["turn:c1"]


def test_keys_are_nowhere_and_no_digest_of_them(tenants: Tenants, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    line = Line(Behind(CALLED), tenants)
    said: list[object] = [repr(tenants), str(tenants.known)]
    for key in ("of acme", "of zebra", "of nobody"):
        said += [line.ask(turn(), path, keyed(key)) for path in (CHAT, "/pause", "/v1/models")]
    text = repr([said, line.behind.seen, caplog.text])
    for key in ("of acme", "of zebra", "of nobody"):
        digests = [
            hashlib.new(name, key.encode()).hexdigest() for name in ("md5", "sha1", "sha256", "sha512", "blake2b")
        ]
        assert not any(found[:16] in text for found in [key, *digests])


# --- the file and its secret ------------------------------------------------------------------------------------------


def test_salts_outlive_a_restart_and_a_new_key_and_are_known_to_nobody_else(tmp_path: Path, tenants: Tenants) -> None:
    file = write(tmp_path / "tenants.json", {"acme": {"key": "a new key"}})
    assert Tenants.read(file).identity("acme") == tenants.identity("acme")
    assert Path(f"{file}.secret").stat().st_mode & 0o777 == 0o600
    elsewhere = write(tmp_path / "elsewhere.json", TENANTS)
    assert Tenants.read(elsewhere).identity("acme") != tenants.identity("acme")


def test_processes_that_start_together_have_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: stored_secret(tmp_path / "secret"), range(32)))
    assert len(found) == 1 and list(tmp_path.iterdir()) == [tmp_path / "secret"]


@pytest.mark.parametrize(
    ("named", "secret", "mode", "message"),
    [
        ({}, None, 0, "names no tenant"),
        ({"a": {"key": "1-1"}, "b": {"key": "1-1"}}, None, 0, "must not be given twice"),
        ({"a": {"key": "ö"}}, None, 0, "printable ASCII"),
        *((TENANTS, b"x" * 32, mode, "chmod 600") for mode in (0o604, 0o620, 0o640)),
        (TENANTS, b"short", 0o600, "32 bytes"),
        ({**TENANTS, "secret": "01234567"}, b"x" * 32, 0o600, "that is the secret [0-9a-f]{8}, and .* names 01234567"),
        ({**TENANTS, "secret": "01234567"}, None, 0, "No such file"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_without_telling_a_key(
    tmp_path: Path, named: Any, secret: bytes | None, mode: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tenants.json", named)
    if secret is not None:
        Path(f"{file}.secret").write_bytes(secret)
        Path(f"{file}.secret").chmod(mode)
    monkeypatch.setenv("CARGOHOLD_TENANTS", str(file))
    with pytest.raises(ConfigError, match=message) as refused:
        Front(Behind())
    assert not any(one["key"] in str(refused.value) for one in named.values() if isinstance(one, dict))


@pytest.mark.parametrize("mode", [0o604, 0o640])
def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = write(tmp_path / "tenants.json", TENANTS)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"^--tenants=.* is not possible: others can read [^(]*chmod 600$"):
        Tenants.read(file)


def test_under_another_secret_no_tenant_is_known_and_requests_have_the_least_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: where the file was copied to and its secret was not, a tenant had all rights, and no limit."""
    named = {
        "zebra": {"key": "of zebra", "hints": "off", "hard": "10%"},
        "acme": {"key": "of acme", "hard": "2GiB", "reserved": "1GiB"},
    }
    _unknown.cache_clear()
    before, engine = (Tenants.read(write(tmp_path / name, named)) for name in ("front.json", "engine.json"))
    monkeypatch.setenv("CARGOHOLD_TENANTS", str(tmp_path / "engine.json"))
    offload = engine.shared(OffloadConfig(host_bytes="8GiB"))
    for salt, who in ((engine.salt("zebra", "ann"), engine.identity("zebra")), (before.salt("zebra", "ann"), UNKNOWN)):
        tenant = tenant_in(salt)
        assert (tenant, offload.hints.allowed_to(tenant)) == (who, "off")
        assert [quota.hard for quota in offload.quotas if quota.tenant == tenant] == ["10%"]
    (unknown,) = (quota for quota in offload.quotas if quota.tenant == UNKNOWN)
    assert (unknown.soft, unknown.reserved) == (0, 0), "what it has goes first"
    assert [tenant_in(before.identity(name)) for name in named] == [UNKNOWN] * 2
    assert [record.levelname for record in caplog.records if "tenants that are unknown here" in record.message] == [
        "WARNING"
    ]
    monkeypatch.delenv("CARGOHOLD_TENANTS")
    assert tenant_in(before.identity("acme")) == UNKNOWN, "an engine without the file knows none"
    assert Tenants().shared(offload).hints.allowed_to(UNKNOWN) == "off"


def test_where_no_share_is_left_for_unknown_tenants_the_others_keep_theirs() -> None:
    known = tuple(Tenant(name=str(one), key=f"key {one}", hard="50%") for one in range(MAX_SHARES - 1))
    offload = Tenants(known, b"x" * 32).shared(OffloadConfig(host_bytes="8GiB"))
    assert len(offload.quotas) == len(known) and offload.hints.allowed_to(UNKNOWN) == "off"


def test_the_front_says_once_that_it_is_on_and_for_how_many_tenants(
    tenants: Tenants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CARGOHOLD_TENANTS", str(tmp_path / "tenants.json"))
    Front(Behind())
    assert caplog.messages == [f"cargohold: the front is on, for 2 tenants; their secret is {tenants.fingerprint}"]


def test_a_start_whose_secret_fits_the_file_is_as_one_without_its_fingerprint(tmp_path: Path) -> None:
    tenants = Tenants.read(write(tmp_path / "tenants.json", TENANTS))
    write(tmp_path / "tenants.json", {**TENANTS, "secret": tenants.fingerprint})
    assert Tenants.read(tmp_path / "tenants.json") == tenants


# --- vLLM -------------------------------------------------------------------------------------------------------------


def test_vllm_is_made_to_tell_cached_tokens_and_hints_go_to_a_connector_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serving = SimpleNamespace(enable_prompt_tokens_details=False)
    without = Line(Behind(args=SimpleNamespace(api_key=None, kv_transfer_config=None)))
    without.behind.state._state = {"openai_serving_chat": serving, "other": None}
    without.ask(turn())
    assert (serving.enable_prompt_tokens_details, without.behind.hints) == (True, [])
    assert "--kv-transfer-config" in caplog.text
    with_one = Line(Behind(args=SimpleNamespace(api_key=None, kv_transfer_config={})))
    with_one.ask(turn())
    assert len(with_one.behind.hints) == 1


def test_pins_are_given_and_released_by_requests_of_one_token(kept_apart: Line, tenants: Tenants) -> None:
    outcomes = [{"action_id": "#0", "status": "accepted"}]
    kept_apart.behind.pieces = [json.dumps({"kv_transfer_params": {"cargohold_hints": outcomes}}).encode()]
    asked = {"messages": ASKED["messages"], "lease": "agent 7", "ttl_s": 60, "cache_salt": "ann"}
    assert kept_apart.ask(asked, "/cache/pins", keyed("of acme")).json == {"outcomes": outcomes}
    pin, scope = kept_apart.behind.body, kept_apart.behind.seen[-1][0]
    (hint,), _ = parse_hints(pin["kv_transfer_params"]["cargohold_hints"])
    assert (hint.kind, hint.lease, hint.ttl_s) == ("pin", "agent 7", 60)
    assert (scope["path"], pin["max_tokens"], pin["cache_salt"]) == (CHAT, 1, tenants.salt("acme", "ann"))
    # Servers have decoded a path already.
    kept_apart.ask(b"", "/cache/pins/agents/7%20", keyed("of acme"), method="DELETE")
    (hint,), _ = parse_hints(kept_apart.behind.body["kv_transfer_params"]["cargohold_hints"])
    assert (hint.kind, hint.lease, kept_apart.behind.seen[-1][0]["method"]) == ("release", "agents/7%20", "POST")
    assert kept_apart.behind.headers[b"content-type"] == b"application/json", "vLLM takes nothing else"
    kept_apart.behind.status = 404
    assert kept_apart.ask(asked, "/cache/pins", keyed("of acme")).status == 404
    kept_apart.behind.status, kept_apart.behind.pieces = 200, [b"{}"]
    assert kept_apart.ask(asked, "/cache/pins", keyed("of acme")).status == 501
    nameless = {name: value for name, value in asked.items() if name != "lease"}
    for body in (b"", b"{", {}, {"prompt": 1, "lease": 2}, nameless, {**asked, "lease": ""}, {**asked, "ttl": 60}):
        assert kept_apart.ask(body, "/cache/pins", keyed("of acme")).status == 400
    kept_apart.behind.pieces = [b"null"]  # its client has gone
    assert kept_apart.ask(asked, "/cache/pins", keyed("of acme")).status == 501


def test_it_needs_no_package_that_vllm_has_not() -> None:
    absent = ("fastapi", "httpx", "pandas", "prometheus_client", "rich", "transformers", "typer", "uvicorn")
    program = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import cargohold.serve.front"
    loads: Sequence[str] = [sys.executable, "-c", program]
    subprocess.run(loads, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=120)
