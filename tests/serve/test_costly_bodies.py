"""Bodies that are small to send and dear to read: what they cost is bounded, for all other requests wait meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from cargohold.serve.anthropic import AnthropicMessage, MessagesBody, Prompt
from cargohold.serve.cache import HintsBody, PinBody, PrefetchBody
from cargohold.serve.interfaces import Message
from cargohold.serve.openai import ChatBody, CompletionBody

BODIES: Any = (
    CompletionBody,
    ChatBody,
    Message,
    MessagesBody,
    Prompt,
    AnthropicMessage,
    HintsBody,
    PinBody,
    PrefetchBody,
)
WRONG = [1.5] * 1000
"""A number with a fraction is wrong for whatever lists have here."""


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_list_is_read_up_to_its_first_wrong_item(kind: type[BaseModel]) -> None:
    for name in kind.model_fields:
        for value in (WRONG, [WRONG] * 1000):
            assert num_errors(kind, {name: value}) < 30, name


def num_errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0
