"""How a turn ended: which words there are for it, and which tokens of a model tell that a tool is called."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cargohold.errors import one_line


class TurnEnd(Enum):
    """How a request ended, as far as its engine knows.

    It says what continues the session: a tool that answers within seconds, or a person who may not come back.
    """

    UNKNOWN = "unknown"
    """The engine cannot tell, or the request has not ended."""
    ANSWER = "answer"
    """The model has ended its turn, and calls no tool."""
    TOOL_CALL = "tool_call"
    """The model has ended its turn, and calls a tool."""
    LENGTH = "length"
    """The engine has cut it off: at ``max_tokens`` or another limit."""
    ABORT = "abort"
    """It was ended from outside: by its client, or because the engine pauses."""
    ERROR = "error"
    """The request has failed."""

    @classmethod
    def named(cls, word: object) -> TurnEnd:
        """Return what a word of ours, of OpenAI's ``finish_reason`` or of Anthropic's ``stop_reason`` means."""
        return _WORDS.get(word, cls.UNKNOWN) if isinstance(word, str) else cls.UNKNOWN


_WORDS: Final = {end.value: end for end in TurnEnd} | {
    "tool_calls": TurnEnd.TOOL_CALL,
    "function_call": TurnEnd.TOOL_CALL,
    "tool_use": TurnEnd.TOOL_CALL,
    "stop": TurnEnd.ANSWER,
    "end_turn": TurnEnd.ANSWER,
    "stop_sequence": TurnEnd.ANSWER,
    "max_tokens": TurnEnd.LENGTH,
}

_CALL: Final = re.compile(r"tool_?call|function_?call|<\|call\|>|start_action|action_start", re.IGNORECASE)
"""Begins a call for Hermes, Qwen, GLM, Mistral, DeepSeek, Kimi, Phi, Granite, gpt-oss, Cohere and InternLM."""
_SOMETIMES: Final = re.compile(r"python_tag")
"""Llama begins some calls with it, and writes others as plain JSON."""


class ToolTokens:
    """The tokens with which a model begins a call of a tool.

    Args:
        added: the model's tokens besides those of its plain vocabulary, by id.
    """

    def __init__(self, added: Mapping[int, str]) -> None:
        # DeepSeek writes a special character for each "_".
        words = {token: text.replace("\N{LOWER ONE EIGHTH BLOCK}", "_") for token, text in added.items()}
        always = {token for token, text in words.items() if _CALL.search(text)}
        self._calls = frozenset(always | {token for token, text in words.items() if _SOMETIMES.search(text)})
        self._begin_all = bool(always)

    def end_of(self, token_ids: Sequence[int]) -> TurnEnd:
        """Return how an answer ended that the model itself has ended; ``UNKNOWN`` if it may call without such a token."""
        if not self._calls.isdisjoint(token_ids):
            return TurnEnd.TOOL_CALL
        return TurnEnd.ANSWER if self._begin_all else TurnEnd.UNKNOWN


def end_of_text(text: str) -> TurnEnd:
    """Return how an answer ended that the model itself has ended: ``UNKNOWN`` if it is JSON, as some calls are."""
    if _CALL.search(text):
        return TurnEnd.TOOL_CALL
    return TurnEnd.UNKNOWN if text.lstrip()[:1] in {"{", "["} else TurnEnd.ANSWER


def added_tokens(place: Path) -> dict[int, str]:
    """Return the tokens that a tokenizer has besides its plain vocabulary, by id, as the files in its directory say.

    Raises:
        ValueError: a file is not what it should be; names it.
        OSError: a file cannot be read.
    """
    tokens: dict[int, str] = {}
    for name, read in (
        ("tokenizer.json", lambda file: {token["id"]: token["content"] for token in file.get("added_tokens") or ()}),
        (
            "tokenizer_config.json",
            lambda file: {int(token): one["content"] for token, one in file.get("added_tokens_decoder", {}).items()},
        ),
        ("tekken.json", lambda file: {one["rank"]: one["token_str"] for one in file.get("special_tokens") or ()}),
    ):
        path = place / name
        if path.is_file():
            tokens |= _read(path, read)
    return tokens


def _read(path: Path, read: Any) -> dict[int, str]:
    try:
        return {operator.index(token): str(text) for token, text in read(json.loads(path.read_bytes())).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error
