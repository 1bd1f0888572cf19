"""Conversations in real English, each about a document that comes with its first question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Conversation:
    """A user's questions, turn by turn.

    Attributes:
        topic: name of the document.
        questions: the first one contains the document.
    """

    topic: str
    questions: tuple[str, ...]


def load_conversations(turns: int) -> list[Conversation]:
    """The conversations that come with the package, cut to ``turns`` turns."""
    texts = files("cargohold.cli") / "texts"
    questions: dict[str, list[str]] = json.loads((texts / "questions.json").read_text(encoding="utf-8"))
    return [
        Conversation(topic, (f"{(texts / f'{topic}.txt').read_text(encoding='utf-8')}\n\n{first}", *rest[: turns - 1]))
        for topic, (first, *rest) in questions.items()
    ]
