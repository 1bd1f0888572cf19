"""Workload and figures of the comparison inside vLLM; runs without vLLM."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

VOCABULARY = 40_000


@dataclass(frozen=True, slots=True)
class Workload:
    """How many prompts are asked, and how long they are.

    Attributes:
        block_tokens: tokens per block of the device pool.
        conversations: number of conversations that take turns.
        in_pool: conversations that a small pool holds.
        context_tokens: tokens of a conversation's first prompt.
        question_tokens: tokens by which each further prompt grows, besides the answer before it.
        answer_tokens: length of an answer.
        revisits: further prompts per conversation.
        bursts: series of prompts that share nothing, to measure time per request without reuse.
        burst_prompts: prompts per series.
    """

    block_tokens: int = 128
    conversations: int = 12
    in_pool: int = 3
    context_tokens: int = 1350
    question_tokens: int = 32
    answer_tokens: int = 16
    revisits: int = 3
    bursts: int = 12
    burst_prompts: int = 2

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.context_tokens + self.revisits * self.question_tokens + (self.revisits + 1) * self.answer_tokens

    def pool_blocks(self, *, is_large: bool) -> int:
        """Blocks of a device pool, the null block among them."""
        per_conversation = -(-self.longest // self.block_tokens)
        return (self.conversations + 2 if is_large else self.in_pool) * per_conversation + 1

    def cacheable(self, prompt_tokens: int, chunk_tokens: int) -> int:
        """Tokens of a prompt that were already in the conversation's last prompt, in whole chunks."""
        known = prompt_tokens - self.question_tokens - self.answer_tokens
        return known // chunk_tokens * chunk_tokens


def random_tokens(seed: str, count: int) -> list[int]:
    """Random tokens of a prompt, or of a part of one; different seeds share no prefix."""
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names in a rotated order, so that each is first once in ``len(names)`` calls with ascending ``by``."""
    at = by % len(names)
    return [*names[at:], *names[:at]]


def ratio(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Quotients of times that were measured side by side: their median, and the quartiles."""
    quotients = [own / other for own, other in zip(times, reference, strict=True)]
    low, _, high = quantiles(quotients, n=4, method="inclusive") if len(quotients) > 1 else quotients * 3
    return {"median": round(median(quotients), 3), "from": round(low, 3), "to": round(high, 3)}


def compare(times: Mapping[str, Sequence[float]], reference: str, unit: str, over: str) -> list[dict[str, Any]]:
    """A row per contender: median time in milliseconds under the name ``unit``, ratio to ``reference`` under ``over``."""
    return [
        {"contender": name, unit: round(1e3 * median(of), 1), over: ratio(of, times[reference])}
        for name, of in times.items()
    ]
