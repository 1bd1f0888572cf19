"""The clients of OpenAI and Anthropic: imported by the first test that uses one, which takes seconds.

Each process that runs tests collects all of them, but runs only some.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anthropic
    import openai

__all__ = ["anthropic", "openai"]


def __getattr__(name: str) -> ModuleType:
    if name not in {"anthropic", "openai"}:
        raise AttributeError(name)
    return import_module(name)
