"""Calls of tools in what a model has written: found in its text, or left in it where they are none.

Models write calls as their chat templates have taught them. Two conventions cover most open models::

    <tool_call>{"name": "tide", "arguments": {"at": "noon"}}</tool_call>    Hermes, Qwen; SmolLM writes a list in the tags
    {"name": "tide", "parameters": {"at": "noon"}}                          Llama; Mistral writes a list. The whole answer

Both are looked for, whatever the template. It is a call only if it names a tool that the client has offered. Whatever else
looks like one is text, and the client gets every character of it.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final, NoReturn

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MARK: Final = "[TOOL_CALLS]"
"""Mistral's models begin calls with it. Most of their tokenizers leave it out of the text."""
_BETWEEN: Final = re.compile(r"[\s;]*")
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Templates of Mistral's models take no other."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the client is to carry out.

    Attributes:
        name: of one of its tools.
        arguments: a JSON object, as text.
        number: of the call in its answer, from 0.
        call_id: by which the client says what came of it.
    """

    name: str
    arguments: str
    number: int = 0
    call_id: str = field(default_factory=lambda: "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH)))


Part = str | ToolCall


def text_in(parts: Iterable[Part]) -> str:
    """What is said in an answer besides calls."""
    return "".join(part for part in parts if isinstance(part, str))


def calls_in(parts: Iterable[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


class _Place(Enum):
    """Where in an answer the reader is."""

    BEGINNING = auto()  # nothing but white space so far
    JSON = auto()  # the answer may be calls as a whole
    TEXT = auto()
    TAG = auto()  # after an opening tag


class _Found(Enum):
    """What a text is that was taken for calls."""

    CALLS = auto()
    HALF = auto()  # it ends within a string
    TEXT = auto()


class AnswerReader:
    """Reads one answer, piece by piece, and tells text from calls.

    Text is passed on as soon as it can be no call. A call is passed on when it is whole, because only then is it known to be
    one. White space around calls is dropped.

    Args:
        tools: names that may be called; with none, all is text.
        max_calls: how many calls are wanted; what follows them is dropped.

    Attributes:
        num_calls: calls that were found so far.
    """

    def __init__(self, tools: Collection[str] = (), max_calls: int | None = None) -> None:
        self._tools = frozenset(tools)
        self._max_calls = max_calls
        self._place = _Place.BEGINNING
        self._rest = ""
        self._space = ""
        self._num_searched = 0
        self._is_behind_call = False
        self._parts: list[Part] = []
        self.num_calls = 0

    def read(self, text: str, *, finished: bool) -> list[Part]:
        """What is known now that ``text`` has followed; all of it once ``finished``."""
        if not self._tools:
            return [text] if text else []
        self._rest += text
        while self._rest and self._go_on(finished):
            pass
        if finished and not self.num_calls:
            self._parts += [self._space] if self._space else []
        parts, self._parts = self._parts, []
        return parts

    def _go_on(self, finished: bool) -> bool:
        """Read what the rest begins with. Returns whether to go on with what is left."""
        match self._place:
            case _Place.BEGINNING:
                begin = self._rest.lstrip()[:1]
                self._place = _Place.JSON if begin in {"{", "["} else _Place.TEXT
                if not begin and not finished:
                    self._place = _Place.BEGINNING
                    return False
            case _Place.JSON:
                if not finished:
                    return False
                if self._called(self._rest.lstrip().removeprefix(_MARK)) is _Found.CALLS:
                    self._rest = ""
                self._place = _Place.TEXT
            case _Place.TEXT:
                return self._read_text(finished)
            case _Place.TAG:
                return self._read_tag(finished)
        return True

    def _read_text(self, finished: bool) -> bool:
        text, tag, _ = self._rest.partition(_OPEN)
        if tag:
            self._place, self._num_searched = _Place.TAG, len(_OPEN)
        elif not finished:
            text = text[: len(text) - _num_begun(text)]
        self._rest = self._rest[len(text) :]
        self._say(text)
        return bool(tag)

    def _read_tag(self, finished: bool) -> bool:
        end = self._rest.find(_CLOSE, self._num_searched)
        if end < 0 and not finished:
            self._num_searched = max(len(_OPEN), len(self._rest) - len(_CLOSE) + 1)
            return False
        inside = self._rest[len(_OPEN) : end if end >= 0 else None]
        behind = self._rest[end + len(_CLOSE) :] if end >= 0 else ""
        found = self._called(inside)
        if found is _Found.HALF and end >= 0:  # the closing tag is part of an argument
            self._num_searched = end + len(_CLOSE)
            return True
        if found is not _Found.CALLS:
            self._say(_OPEN)
            behind = self._rest[len(_OPEN) :]
        self._rest, self._place = behind, _Place.TEXT
        return True

    def _say(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said and not self._has_enough:
            self._parts.append(said.lstrip() if self._is_behind_call else said)
            self._is_behind_call = False

    def _called(self, text: str) -> _Found:
        """Pass on the calls that ``text`` consists of, if it does."""
        try:
            calls = _calls(text, self._tools)
        except json.JSONDecodeError as error:
            return _Found.HALF if error.msg.startswith("Unterminated string") else _Found.TEXT
        except (ValueError, RecursionError):
            return _Found.TEXT
        for call in calls:
            if not self._has_enough:
                self._parts.append(replace(call, number=self.num_calls))
                self.num_calls += 1
        self._space, self._is_behind_call = "", True
        return _Found.CALLS

    @property
    def _has_enough(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls


def _num_begun(text: str) -> int:
    """How many characters at the end of the text may be the beginning of a tag."""
    return next((number for number in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:number])), 0)


def _calls(text: str, tools: Collection[str]) -> list[ToolCall]:
    """The calls that a text consists of: objects, lists of them, or several after each other.

    Raises:
        ValueError: it is not JSON, or no call, or of none of these tools.
    """
    calls: list[ToolCall] = []
    at = _end_of_gap(text, 0)
    while at < len(text) or not calls:
        value, at = _DECODER.raw_decode(text, at)
        calls += [_call(item, tools) for item in (value if isinstance(value, list) else [value])]
        at = _end_of_gap(text, at)
    return calls


def _end_of_gap(text: str, at: int) -> int:
    gap = _BETWEEN.match(text, at)
    assert gap is not None  # it may be empty
    return gap.end()


def _call(item: object, tools: Collection[str]) -> ToolCall:
    match item:
        case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
            if isinstance(arguments, str):
                arguments = _DECODER.decode(arguments)
            if name in tools and isinstance(arguments, dict):
                return ToolCall(name, json.dumps(arguments))
    raise ValueError("no call of a tool that was offered")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)
