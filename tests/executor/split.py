"""Models that several workers can divide, and conversations that are served with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cargohold import LLM, OffloadConfig, SamplingParams

MakeModel = Callable[..., str]
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "block_tokens": 8,
    "num_device_blocks": 32,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
}
OFFLOAD = OffloadConfig(host_bytes="8MiB")


def prompts() -> list[list[int]]:
    """Conversations of two turns, visited in turn; together they are larger than the pool."""
    talks = [[(number * 31 + at * at) % 199 for at in range(80)] for number in range(5)]
    return [talk[:length] for length in (40, 80) for talk in talks]


def serve(llm: LLM) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of all answers, and how many prompt tokens were restored."""
    outputs = [llm.generate(prompt, SAMPLING)[0] for prompt in prompts()]
    return [out.token_ids for out in outputs], sum(sum(out.metrics.restored_tokens.values()) for out in outputs)
