"""One tenant that asks for all there is, and what is left for the others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from socket import socket
from typing import Any

import pytest

from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig
from tests.serve.running import LONG, Reply, call, connect, posted, running, wait_until

TEXT = "/v1/completions"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "chat", "prompt": "Hello", "max_tokens": 1}
STREAM: dict[str, Any] = {**BODY, **LONG, "stream": True}
CONFIG = ServeConfig(port=0, api_keys=("a", "b"), max_queue=2)


def keyed(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def begin(server: Server, stack: ExitStack, key: str, body: dict[str, Any] = STREAM, path: str = TEXT) -> socket:
    """Send a request, and leave its answer unread."""
    connection = stack.enter_context(connect(server))
    connection.sendall(posted(path, body, keyed(key)))
    return connection


def test_a_tenant_that_has_taken_all_places_gives_them_back_in_turn(chat_model: str) -> None:
    """It had all of them, and others were refused."""
    with (
        running(chat_model, CONFIG, max_num_seqs=2) as server,
        ExitStack() as stack,
        ThreadPoolExecutor() as threads,
    ):
        greedy = [begin(server, stack, "a") for _ in range(4)]
        wait_until(lambda: server.admission.num_answers == 4)
        assert call(server, TEXT, BODY, keyed("a")).status == 429, "it has borrowed all that was free"
        others = [threads.submit(call, server, TEXT, BODY, keyed("b")) for _ in range(2)]
        wait_until(lambda: server.admission.num_answers == 6)
        assert call(server, TEXT, BODY, keyed("b")).status == 429, "all is taken, and so is its share"
        assert call(server, TEXT, BODY, keyed("a")).status == 429
        for connection in greedy:
            connection.close()
        assert [other.result().status for other in others] == [200, 200]


def test_who_comes_late_is_served_before_what_another_has_piled_up(
    chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.serve.admission._AHEAD", 0)
    config = ServeConfig(port=0, api_keys=("a", "b"), max_queue=7)
    with running(chat_model, config, max_num_seqs=1) as server, ExitStack() as stack, ThreadPoolExecutor() as threads:
        first = begin(server, stack, "a")
        first.recv(100)
        for _ in range(7):
            begin(server, stack, "a")
        wait_until(lambda: server.admission.num_answers == 8)
        late = threads.submit(call, server, TEXT, BODY, keyed("b"))
        wait_until(lambda: call(server, "/cache", headers=keyed("b")).json["requests"])
        first.close()
        assert late.result().status == 200
        assert server.admission.num_answers == 7, "the others are all still there"


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_tokenized(chat_model: str) -> None:
    """Six of them took gigabytes, and another tenant waited for 21 s."""
    long = "market " * 1_000_000
    with running(chat_model, max_model_len=2000) as server:
        for path, body in (
            (TEXT, {**BODY, "prompt": long}),
            ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": long}]}),
            (COUNT, {"model": "chat", "messages": [{"role": "user", "content": long}]}),
        ):
            message = call(server, path, body).json["error"]["message"]
            assert "prompt is too long: at least 109" in message, "7 MB, of 64 bytes per token at most"
            assert "> 1999 maximum" in message
        pinned = call(server, "/cache/pins", {"prompt": long, "lease": "mine"})
        assert (pinned.status, pinned.json["error"]["code"]) == (400, "context_length_exceeded")


class Tokenizing:
    """Holds long conversations up while they are tokenized, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.num_begun = 0
        really = Tokenizer.apply_chat_template

        def held_up(tokenizer: Tokenizer, messages: Any, *options: Any) -> list[int]:
            if len(messages[0]["content"]) > 1000:
                self.num_begun += 1
                self.go_on.wait()
            return really(tokenizer, messages, *options)

        monkeypatch.setattr(Tokenizer, "apply_chat_template", held_up)


def conversation(text: str) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": text}]}


def test_long_texts_are_tokenized_one_by_one_and_short_ones_meanwhile(
    chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running(chat_model, CONFIG, max_num_seqs=4) as server,
        ExitStack() as stack,
        ThreadPoolExecutor() as threads,
    ):
        tokenizing = Tokenizing(monkeypatch)
        stack.callback(tokenizing.go_on.set)
        gone = begin(server, stack, "a", conversation("x" * 100_000), COUNT)
        wait_until(lambda: tokenizing.num_begun == 1)
        gone.close()
        wait_until(lambda: not server.admission.num_answers)
        waiting: list[Any] = [
            threads.submit(call, server, COUNT, conversation("x" * 100_000), keyed("a")) for _ in range(2)
        ]
        wait_until(lambda: server.admission.num_answers == 2)
        assert call(server, COUNT, conversation("Hello"), keyed("b")).status == 200
        assert tokenizing.num_begun == 1, "the thread of the client that has gone is still at it"
        tokenizing.go_on.set()
        replies: list[Reply] = [one.result() for one in waiting]
        assert {reply.status for reply in replies} == {400}
        assert tokenizing.num_begun == 3


def test_counting_tokens_takes_a_place(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(port=0, max_queue=0)
    with running(chat_model, config, max_num_seqs=1) as server, ExitStack() as stack:
        tokenizing = Tokenizing(monkeypatch)
        stack.callback(tokenizing.go_on.set)
        begin(server, stack, "a", conversation("x" * 2000), COUNT)
        wait_until(lambda: tokenizing.num_begun == 1)
        assert call(server, COUNT, conversation("Hello")).status == 429
        assert call(server, TEXT, BODY).status == 429


def test_bodies_in_memory_are_bounded_and_shared(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of them, of 8 MB each, could wait to be tokenized."""
    monkeypatch.setattr("cargohold.serve.limits._NUM_LARGEST_BODIES", 4)
    config = ServeConfig(port=0, api_keys=("a", "b"), max_body_bytes=101_000)
    with running(chat_model, config) as server, ExitStack() as stack, ThreadPoolExecutor() as threads:
        tokenizing = Tokenizing(monkeypatch)
        stack.callback(tokenizing.go_on.set)
        large = conversation("x" * 100_000)
        waiting = [threads.submit(call, server, COUNT, large, keyed("a")) for _ in range(4)]
        wait_until(lambda: server.admission.num_answers == 4)
        refused = call(server, COUNT, large, keyed("a"))
        assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
        assert call(server, COUNT, conversation("Hello"), keyed("a")).status == 200, "small ones go on"
        waiting += [threads.submit(call, server, COUNT, large, keyed("b")) for _ in range(2)]
        wait_until(lambda: server.admission.num_answers == 6)
        assert call(server, COUNT, large, keyed("b")).status == 503, "so much is its share"
        tokenizing.go_on.set()
        assert {one.result().status for one in waiting} == {400}
        assert call(server, COUNT, large, keyed("a")).status == 400, "all is given back"
