"""Clients that are malformed, huge, slow, in a hurry, or gone."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from cargohold import AsyncLLM, EngineDeadError
from cargohold.serve.access import Client
from cargohold.serve.admission import State
from cargohold.serve.server import Server, serving
from cargohold.serve.settings import ServeConfig
from tests.llms import scheduler_of
from tests.serve.running import LONG, Reply, call, connect, posted, running, wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
STREAM: dict[str, Any] = {**BODY, **LONG, "stream": True}


def is_idle(server: Server) -> bool:
    llm = server.admission.loaded
    assert llm is not None
    return not (server.admission.num_answers or llm.status.num_running or llm.status.num_waiting)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be a JSON object"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"\xff\xff", "parsing the body"),
        (b"[" * 100_000, "parsing the body"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": "\\ud800"}]}', "unicode"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "finite"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "finite"),
        (json.dumps({**BODY, "x\ud800": 1}).encode(), "unicode"),
        (json.dumps(BODY).replace("1", "1" * 5000).encode(), "parsing the body"),  # more digits than Python reads
    ],
    ids=lambda value: repr(value[:60]),
)
def test_a_malformed_body_is_refused_in_words(server: Server, body: bytes, message: str) -> None:
    reply = call(server, CHAT, body)
    assert reply.status == 400, reply.body
    assert message.lower() in reply.json["error"]["message"].lower()


def test_half_a_character_comes_back_as_a_whole_one(server: Server) -> None:
    reply = call(server, CHAT, {**BODY, "model": "\ud800"})
    assert (reply.status, "there is no model" in reply.json["error"]["message"]) == (404, True)


MESSAGES = "/v1/messages"
ANTHROPIC: dict[str, Any] = {"model": "chat", "messages": BODY["messages"], "max_tokens": 1}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
HALF = {"action_id": "\ud800", "action_type": "retain"}
WRONG_BLOCKS: Any = (5, "text", [], None, {"type": "text", "text": 5}, {"type": []})
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "tide"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {**ANTHROPIC, "tool_choice": {"type": ["auto"]}}),
        (MESSAGES, {**ANTHROPIC, "tool_choice": {"type": {}}}),
        *(
            (MESSAGES, {**ANTHROPIC, "messages": [{"role": "user", "content": [{**RESULT, "content": [item]}]}]})
            for item in WRONG_BLOCKS
        ),
        (CHAT, {**BODY, "messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}),
        *((CHAT, {**BODY, "tools": [tool]}) for tool in ({}, {**TOOL, "function": "tide"}, {**TOOL, "type": "custom"})),
        (CHAT, {**BODY, "chat_template_kwargs": {f"name{at}": 1 for at in range(65)}}),
    ],
    ids=lambda value: str(value)[-70:],
)
def test_a_value_of_the_wrong_kind_is_refused_wherever_it_stands(server: Server, path: str, body: Any) -> None:
    reply = call(server, path, body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error"), reply.body


def test_half_a_character_in_a_hint_is_no_name(server: Server) -> None:
    for path, body in (
        (CHAT, {**BODY, "cargohold_hints": [HALF]}),
        (MESSAGES, {**ANTHROPIC, "cargohold_hints": [HALF]}),
        ("/cache/hints", {"prompt": "Hello", "hints": [HALF]}),
    ):
        reply = call(server, path, body)
        (outcome,) = reply.json.get("cargohold_hints", []) or reply.json["outcomes"]
        assert (reply.status, outcome["action_id"]) == (200, "#0")
    streamed = call(server, CHAT, {**BODY, "stream": True, "cargohold_hints": [HALF]})
    assert b'"action_id":"#0"' in streamed.body and b'"error"' not in streamed.body
    reply = call(server, "/cache/pins", {"prompt": "Hello", "lease": "\ud800"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "lease")
    assert call(server, "/cache/pins/", method="DELETE").status == 400


def test_a_body_that_is_not_sent_as_json_is_refused(server: Server) -> None:
    reply = call(server, CHAT, json.dumps(BODY).encode(), {"content-type": "text/plain"})
    assert (reply.status, "application/json" in reply.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", CHAT, 405), ("PUT", "/health", 405)]
)
def test_what_is_not_there_is_said_in_json(server: Server, method: str, path: str, status: int) -> None:
    reply = call(server, path, method=method)
    assert reply.status == status and "/openapi.json" in reply.json["error"]["message"]


def test_bytes_that_are_no_http_are_refused(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert call(server, "/health").status == 200


def test_limits_of_bodies_hold_whether_they_say_their_length_or_not(chat_model: str) -> None:
    with running(chat_model, ServeConfig(port=0, max_body_bytes=2000, read_timeout_s=0.3)) as server:
        assert call(server, CHAT, BODY).status == 200
        reply = call(server, CHAT, {**BODY, "user": "x" * 2000})
        assert (reply.status, "2000 bytes" in reply.json["error"]["message"]) == (413, True)
        # Refused by what it says, before any of it is sent.
        with connect(server) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        with connect(server) as connection:
            kind = "content-type: application/json\r\ntransfer-encoding: chunked"
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\n\r\n"
            connection.sendall(head.encode() + b"bb8\r\n" + b" " * 3000 + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        with connect(server) as slow:
            slow.sendall(posted(CHAT, BODY)[:-5])
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert call(server, CHAT, BODY).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: Server, stream: bool) -> None:
    with connect(server) as connection:
        connection.sendall(posted(CHAT, {**STREAM, "stream": stream}))
        if stream:
            connection.recv(1000)
        wait_until(lambda: server.admission.llm.status.num_running == 1)
    wait_until(lambda: is_idle(server))
    record = next(server.admission.records.latest(Client(is_admin=True)))
    metrics = record.sequences[0].metrics
    assert record.state == "gone"
    assert metrics is None or metrics.output_tokens < LONG["max_tokens"] // 2


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(posted(CHAT, BODY)[:-5])
    assert call(server, CHAT, BODY).status == 200
    assert is_idle(server)


def test_a_client_that_takes_nothing_is_taken_to_be_gone(chat_model: str) -> None:
    config = ServeConfig(port=0, write_timeout_s=0.2)
    with running(chat_model, config) as server, ExitStack() as stack:
        connection = stack.enter_context(connect(server, buffer_bytes=4096))
        # Pieces of many answers at once, so that the system's buffers are full soon.
        connection.sendall(posted(CHAT, {**STREAM, "n": 32}))
        wait_until(lambda: server.admission.num_answers == 32)
        wait_until(lambda: is_idle(server))
        record = next(server.admission.records.latest(Client(is_admin=True)))
        assert record.state == "gone"
        assert call(server, CHAT, BODY).status == 200


def test_whoever_finds_the_queue_full_is_told_to_come_again(chat_model: str) -> None:
    config = ServeConfig(port=0, max_queue=1)
    with running(chat_model, config, max_num_seqs=1) as server, connect(server) as first, connect(server) as second:
        first.sendall(posted(CHAT, STREAM))
        first.recv(100)
        second.sendall(posted(CHAT, BODY))
        wait_until(lambda: server.admission.num_answers == 2)
        refused = call(server, CHAT, BODY)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["code"] == "queue_full"
        assert server.admission.num_refused == 1
        first.close()
        assert second.recv(100).startswith(b"HTTP/1.1 200")
        assert call(server, CHAT, BODY).status == 200


def test_who_waits_in_the_queue_and_goes_away_is_forgotten(chat_model: str) -> None:
    with running(chat_model, max_num_seqs=1) as server, connect(server) as first:
        first.sendall(posted(CHAT, STREAM))
        first.recv(100)
        with connect(server) as second:
            second.sendall(posted(CHAT, BODY))
            wait_until(lambda: server.admission.num_answers == 2)
        wait_until(lambda: server.admission.num_answers == 1)


def test_until_there_is_a_model_requests_are_told_to_wait(chat_model: str) -> None:
    with serving(ServeConfig(port=0)) as server:
        health, refused = call(server, "/health"), call(server, CHAT, BODY)
        assert (health.status, health.json["status"]) == (503, "starting")
        assert (refused.status, refused.json["error"]["code"]) == (503, "starting")
        assert "retry-after" in refused.headers


def test_at_the_end_requests_get_time_to_finish_and_new_ones_are_refused(chat_model: str) -> None:
    replies: list[Reply] = []
    with running(chat_model, shutdown_timeout_s=60.0) as server:
        body = {**BODY, **LONG, "max_tokens": 300}
        asking = threading.Thread(target=lambda: replies.append(call(server, CHAT, body)))
        asking.start()
        wait_until(lambda: server.admission.num_answers == 1)
        draining = threading.Thread(target=server.drain)
        draining.start()
        wait_until(lambda: server.admission.state is State.DRAINING)
        if asking.is_alive():
            assert call(server, CHAT, BODY).status == 503
        assert call(server, "/health").json["status"] == "draining"
        asking.join()
        draining.join()
    assert replies[0].status == 200
    assert replies[0].json["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, "8192 tokens, the answer included"),
        ({"max_model_len": 100}, "100 tokens, the answer included: max_model_len says so; the model itself takes 8192"),
        (
            {"num_device_blocks": 10},
            "144 tokens, the answer included: the 10 blocks of the device pool hold no more (num_device_blocks)",
        ),
    ],
    ids=["the model", "the option", "the pool"],
)
def test_a_prompt_that_is_too_long_is_told_what_limits_it(chat_model: str, options: dict[str, Any], limit: str) -> None:
    with running(chat_model, **options) as server:
        refused = call(server, "/v1/completions", {"model": "chat", "prompt": [5] * 8192, "max_tokens": 1})
        assert f"this model's maximum context length is {limit}" in refused.json["error"]["message"]


def test_the_end_says_what_it_waits_for(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For five seconds, and five more, Ctrl-C seemed to do nothing."""
    said: list[str] = []
    close, told = AsyncLLM.close, threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if "copies" in text:
            told.set()

    async def close_late(llm: AsyncLLM) -> None:
        told.wait()
        await close(llm)

    with serving(ServeConfig(port=0), say) as server:
        server.open(AsyncLLM(chat_model, num_device_blocks=600, shutdown_timeout_s=0.5))
        with connect(server) as connection:
            connection.sendall(posted(CHAT, STREAM))
            wait_until(lambda: server.admission.num_answers == 1)
            server.drain()
        wait_until(lambda: is_idle(server))
        monkeypatch.setattr(AsyncLLM, "close", close_late)
    assert said == [
        "waiting for 1 answer to end, for 0.5 s at most; Ctrl-C does not wait",
        "waiting for copies and writes to lower tiers, for some 0.5 s; Ctrl-C does not wait",
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_take_too_long_at_the_end_are_told_so(chat_model: str, stream: bool) -> None:
    replies: list[Reply] = []
    with running(chat_model, shutdown_timeout_s=0.0) as server:
        asking = threading.Thread(target=lambda: replies.append(call(server, CHAT, {**STREAM, "stream": stream})))
        asking.start()
        wait_until(lambda: server.admission.llm.status.num_running == 1)
    asking.join()
    if stream:
        assert b"the engine has stopped" in replies[0].body and replies[0].body.endswith(b"data: [DONE]\n\n")
    else:
        assert (replies[0].status, replies[0].json["error"]["code"]) == (503, "engine_stopped")


def test_when_the_engine_ends_clients_are_told_and_the_server_stops_waiting(
    chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    with serving(ServeConfig(port=0)) as server:
        llm = AsyncLLM(chat_model, num_device_blocks=100)
        server.open(llm)
        monkeypatch.setattr(scheduler_of(llm), "schedule", fail)
        refused = call(server, CHAT, BODY)
        assert (refused.status, "out of order" in refused.json["error"]["message"]) == (503, True)
        with pytest.raises(EngineDeadError, match="out of order"):
            server.wait()
        assert call(server, "/health").json["status"] == "stopped"
        assert call(server, CHAT, BODY).json["error"]["code"] == "stopped"


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=f"port={port} is not possible"), serving(ServeConfig(port=port)):
        pass


def test_keys_let_in_and_keep_caches_apart(chat_model: str) -> None:
    prompt = "The ship sails on. " * 40
    with running(chat_model, ServeConfig(port=0, api_keys=("one", "two"))) as server:

        def cached(key: str) -> int:
            body = {"model": "chat", "prompt": prompt, "max_tokens": 1}
            reply = call(server, "/v1/completions", body, {"authorization": f"Bearer {key}"})
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"x-api-key": "on"}):
            refused = call(server, CHAT, BODY, headers)
            assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
        assert call(server, "/v1/models", headers={"x-api-key": "one"}).status == 200
        assert call(server, "/health").status == 200
        assert cached("one") == 0 and cached("one") > 0
        assert cached("two") == 0
