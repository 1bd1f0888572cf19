from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from cargohold.blocks import extend_hashes, root_hash
from cargohold.errors import ConfigError, RequestError, TraceError
from cargohold.lab.replay.traces import Line, RequestLogDecoder, TraceRequest


class Letters:
    """A token per letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if not messages:
            raise RequestError("a conversation is a list of messages, at least one")
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


def decode(request: Any, tokenizer: Letters | None = None) -> TraceRequest:
    return RequestLogDecoder(4, tokenizer)(Line("log", 3, json.dumps(request).encode()))


def test_blocks_are_hashed_as_the_engine_does_it() -> None:
    tokens = list(range(11))
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4, root_hash(salt="mine"))
    request = decode({"token_ids": tokens, "salt": "mine", "session_id": "a", "timestamp_ms": 7})
    assert request.hash_ids == [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]
    assert (request.input_length, request.block_tokens, request.session_id, request.arrival_ms) == (11, 4, "a", 7)
    assert decode({"token_ids": tokens}).hash_ids != request.hash_ids


def test_answers_complete_blocks() -> None:
    first = decode({"token_ids": [1, 2, 3, 4, 5, 6], "output_token_ids": [7, 8, 9]})
    second = decode({"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 0]})
    assert len(first.hash_ids) == len(first.output_hash_ids) == 1
    assert first.hash_ids + first.output_hash_ids == second.hash_ids


def test_an_answers_last_token_completes_no_block_because_its_kv_was_not_computed() -> None:
    assert decode({"token_ids": [1, 2, 3], "output_token_ids": [4]}).output_hash_ids == []
    assert len(decode({"token_ids": [1, 2, 3], "output_token_ids": [4, 5]}).output_hash_ids) == 1


def test_what_the_engine_counted_is_taken_from_logs_too() -> None:
    request = decode({"token_ids": [1] * 8, "reused_blocks": 1, "step_tokens": 2048})
    assert (request.reused_blocks, request.step_tokens) == (1, 2048)


def test_texts_and_chats_are_tokenised() -> None:
    letters = Letters()
    tokens = letters.encode("<user>Good morning")
    assert decode({"prompt": "<user>Good morning"}, letters).hash_ids == decode({"token_ids": tokens}).hash_ids
    chat = decode({"messages": [{"role": "user", "content": "Good morning"}]}, letters)
    assert chat.hash_ids == decode({"token_ids": tokens}).hash_ids


def test_a_line_that_is_nested_without_end_is_named() -> None:
    """Found by forging: it ended in a RecursionError."""
    with pytest.raises(TraceError, match="line 7"):
        RequestLogDecoder(4)(Line("log", 7, b'{"token_ids": [1], "hash_ids": ' + b"[" * 100_000))


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        decode({"prompt": "Good morning"})


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"prompt": "a", "token_ids": [1]},
        {"prompt": 3},
        {"messages": [{"role": "user"}]},
        {"messages": []},
        {"token_ids": [-1, 2, 3, 4]},
        {"token_ids": [1 << 33, 2, 3, 4]},
        {"token_ids": "abc"},
        ["a"],
    ],
)
def test_what_is_no_request_is_named(request_: Any) -> None:
    with pytest.raises(TraceError, match="log, line 3"):
        decode(request_, Letters())


def test_block_traces_are_left_as_they_are() -> None:
    assert decode({"hash_ids": [1, 2], "session_id": 4}) == TraceRequest(hash_ids=[1, 2], session_id=4)
    assert decode({"session_id": "token_ids", "hash_ids": [5]}) == TraceRequest(hash_ids=[5], session_id="token_ids")


def test_numbers_of_a_log_are_checked_like_those_of_a_trace() -> None:
    with pytest.raises(TraceError, match=r"log, line 3: output_length is -1; it must be an integer from 0"):
        decode({"token_ids": [1] * 8, "output_length": -1})
