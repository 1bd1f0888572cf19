"""Agents whose tools take seconds, while the prompts of others take their place in the cache. It knows no engine."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cargohold import Hint

NUM_AGENTS, AGENT_TOKENS, RESULT_TOKENS, ANSWER_TOKENS = 3, 400, 40, 8
NUM_OTHERS, OTHERS_TOKENS = 11, 400
DEVICE_TOKENS, HOST_TOKENS = 832, 2560
"""Room on the device and in host memory: together less than what others ask for while the tools run."""
PIN_FRACTION = 0.5
"""The part of host memory that leases may cover: here three agents are nearly half of what it holds."""


@dataclass(frozen=True)
class Turn:
    """What an engine tells of a request: how many prompt tokens it had not to compute, and its answers to hints."""

    tokens: list[int]
    prompt_tokens: int
    found_tokens: int
    first_s: float
    hint_answers: list[str]


class Engine(Protocol):
    """What the agents need of an engine."""

    async def ask(self, prompt: list[int], hint: Hint | None = None) -> Turn:
        """Generate ``ANSWER_TOKENS`` tokens."""

    async def forget(self) -> None:
        """Forget all prompts, wherever they are kept."""


def text(number: int, num_tokens: int) -> list[int]:
    """A prompt as token ids, so that any model can read it. Two of them differ from the first token on."""
    return [10 + (number * 31 + at * 7) % 90 for at in range(num_tokens)]


async def run_tool(agent: int) -> list[int]:
    """A tool, which takes seconds or minutes in life; returns what it has found."""
    await asyncio.sleep(0.2 + 0.1 * agent)
    return text(50 + agent, RESULT_TOKENS)


async def others(engine: Engine) -> None:
    """Prompts of other users, one after the other."""
    for number in range(NUM_OTHERS):
        await engine.ask(text(60 + number, OTHERS_TOKENS))


async def second_turns(engine: Engine, *, with_hints: bool) -> list[Turn]:
    """Let every agent think, use its tool, and think again; returns the second turns."""
    prompts = [text(agent, AGENT_TOKENS) for agent in range(NUM_AGENTS)]
    leases = [f"agent {agent}" for agent in range(NUM_AGENTS)]
    pins = [Hint.pin(ttl_s=300, lease=lease) if with_hints else None for lease in leases]
    releases = [Hint.release(lease) if with_hints else None for lease in leases]

    first = [await engine.ask(prompt, hint) for prompt, hint in zip(prompts, pins, strict=True)]
    # In life, tools end meanwhile too. Here all others come before, so that the result does not depend on the machine.
    results, _ = await asyncio.gather(asyncio.gather(*map(run_tool, range(NUM_AGENTS))), others(engine))
    prompts = [prompt + turn.tokens + result for prompt, turn, result in zip(prompts, first, results, strict=True)]
    second = [await engine.ask(prompt, hint) for prompt, hint in zip(prompts, releases, strict=True)]

    answers = [answer for turn in (*first, *second) for answer in turn.hint_answers]
    assert answers == ["accepted"] * (2 * NUM_AGENTS if with_hints else 0), answers
    return second


async def compare(engine: Engine) -> None:
    """Play it without and with hints, and print what the agents' second turns found."""
    await engine.ask(text(99, 100))  # the first request of an engine is slow
    without = await second_turns(engine, with_hints=False)
    await engine.forget()
    pinned = await second_turns(engine, with_hints=True)

    print(f"after the tool   prompt {'without a hint':>24} {'pinned':>24}")
    for agent, (lost, kept) in enumerate(zip(without, pinned, strict=True)):
        columns = [f"{turn.found_tokens:>4} found, {turn.first_s * 1000:>5.0f} ms" for turn in (lost, kept)]
        print(f"agent {agent}          {kept.prompt_tokens:>6} {columns[0]:>24} {columns[1]:>24}")
    assert [turn.tokens for turn in pinned] == [turn.tokens for turn in without], "a hint must not change a token"
    assert all(turn.found_tokens > 0.9 * AGENT_TOKENS for turn in pinned)
    assert all(turn.found_tokens < 0.1 * AGENT_TOKENS for turn in without)
    print("The answers are the same.")


def kv_bytes(model: str, num_tokens: int) -> int:
    """Bytes of KV of so many tokens, for a model with full attention in float32."""
    config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return num_tokens * config["num_hidden_layers"] * 2 * int(heads) * int(head) * 4
