"""How a turn ended: the words for it, and the tokens of models that call tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cargohold.protocol import ToolTokens, TurnEnd, added_tokens, end_of_text

BAR, LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
CALLS = {
    "Qwen, Hermes, GLM": "<tool_call>",
    "Mistral": "[TOOL_CALLS]",
    "DeepSeek": f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>",
    "Kimi": "<|tool_calls_section_begin|>",
    "Phi, Granite": "<|tool_call|>",
    "MiniMax": "<minimax:tool_call>",
    "gpt-oss": "<|call|>",
    "FunctionGemma": "<start_function_call>",
    "Cohere": "<|START_ACTION|>",
    "InternLM": "<|action_start|>",
}
NO_CALLS = (
    "<|im_end|>",
    "<tool_response>",
    "[TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "<think>",
    f"<{BAR}tool{LOW}outputs{LOW}begin{BAR}>",
)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_the_token_that_begins_a_call_tells_a_call_from_an_answer(call: str) -> None:
    tokens = ToolTokens({7: call, **dict(enumerate(NO_CALLS, start=100))})
    assert tokens.end_of([1, 7, 2]) is TurnEnd.TOOL_CALL
    assert tokens.end_of([1, *range(100, 100 + len(NO_CALLS))]) is TurnEnd.ANSWER


def test_a_model_that_may_call_without_a_token_leaves_it_open() -> None:
    assert ToolTokens(dict(enumerate(NO_CALLS))).end_of([0, 1]) is TurnEnd.UNKNOWN
    llama = ToolTokens({7: "<|python_tag|>"})
    assert llama.end_of([7, 1]) is TurnEnd.TOOL_CALL
    assert llama.end_of([1]) is TurnEnd.UNKNOWN


def test_a_call_in_text() -> None:
    assert end_of_text('Let me look. <tool_call>{"name": "tide"}</tool_call>') is TurnEnd.TOOL_CALL
    assert end_of_text(' {"name": "tide"}') is TurnEnd.UNKNOWN  # the client may have asked for JSON
    assert end_of_text("High water is at noon.") is TurnEnd.ANSWER


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("tool_call", "tool_call"),
        ("tool_calls", "tool_call"),
        ("tool_use", "tool_call"),
        ("end_turn", "answer"),
        ("stop", "answer"),
        ("max_tokens", "length"),
        ("abort", "abort"),
        ("error", "error"),
        ("content_filter", "unknown"),
        (["###"], "unknown"),
        (None, "unknown"),
    ],
)
def test_the_words_of_the_common_interfaces_are_known(word: object, end: str) -> None:
    assert TurnEnd.named(word) is TurnEnd(end)


FILES = {
    "tokenizer.json": {"added_tokens": [{"id": 7, "content": "<tool_call>"}]},
    "tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "<tool_call>"}}},
    "tekken.json": {"special_tokens": [{"rank": 7, "token_str": "<tool_call>"}]},
}


@pytest.mark.parametrize("name", FILES)
def test_added_tokens_are_read_from_the_tokenizers_own_files(name: str, tmp_path: Path) -> None:
    assert added_tokens(tmp_path) == {}
    (tmp_path / name).write_text(json.dumps(FILES[name]))
    assert added_tokens(tmp_path) == {7: "<tool_call>"}


@pytest.mark.parametrize("contents", ["", "[]", '{"added_tokens": [{"id": "x"}]}', "[" * 100_000])
def test_a_damaged_file_is_named(contents: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        added_tokens(tmp_path)
