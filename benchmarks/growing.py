"""What a generated chunk costs each policy, in steps of Python's interpreter: behind short and long prompts, in a full tier.

Steps are counted, not time, so the figures are the same on every machine, and no run of luck hides a chunk that costs its whole
prompt. What one step in C does, such as copying a slice, counts as one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from statistics import mean
from types import FrameType
from typing import Any

from cargohold.cache import StoreOffer, TierManager, make_manager
from cargohold.cache.policies import POLICIES

SHAPES = ("answers", "branches")
"""Each chunk continues the one before; or all of them continue the prompt, as many short answers to it do."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement.

    Attributes:
        capacity: slots of the tier, all of which hold prompts at first.
        prompt_chunks: chunks per prompt.
        num_requests: requests that complete a chunk in each step, each behind a prompt of its own.
        num_steps: number of steps.
    """

    capacity: int
    prompt_chunks: int
    num_requests: int
    num_steps: int


LARGE = [Sizes(16_384, prompt, 32, 100) for prompt in (32, 512)]
SMALL = [Sizes(1_024, prompt, 8, 24) for prompt in (16, 128)]


def run(*, quick: bool) -> dict[str, Any]:
    rows = [
        {"policy": policy, "shape": shape, **vars(sizes), **measure(policy, shape, sizes)}
        for policy in POLICIES
        for shape in SHAPES
        for sizes in (SMALL if quick else LARGE)
    ]
    return {"rows": rows}


def measure(policy: str, shape: str, sizes: Sizes) -> dict[str, float]:
    """Return interpreter steps per chunk: on average, and in the step of the engine in which they are most."""
    manager = make_manager(policy, sizes.capacity)
    manager.admit_all()
    prompts = [
        _chunks(f"prompt {number}", sizes.prompt_chunks) for number in range(sizes.capacity // sizes.prompt_chunks)
    ]
    for prompt in prompts:
        manager.prepare_store(prompt).commit()
    ends = [prompt[-1] for prompt in prompts[-sizes.num_requests :]]
    counts = []
    for step in range(sizes.num_steps):
        chunks = _chunks(f"step {step}", len(ends))
        counts.append(count_steps(lambda: _store(manager, chunks, ends)) / len(ends))  # noqa: B023  # called at once
        if shape == "answers":
            ends = chunks
    manager.check()
    return {"mean": round(mean(counts), 1), "most": round(max(counts), 1)}


def _store(manager: TierManager, chunks: list[bytes], parents: list[bytes]) -> None:
    offers = [StoreOffer((chunk,), parent) for chunk, parent in zip(chunks, parents, strict=True)]
    manager.prepare_stores(offers).commit()


def _chunks(name: str, count: int) -> list[bytes]:
    return [sha256(f"{name} {number}".encode()).digest() + bytes(4) for number in range(count)]


def count_steps(call: Callable[[], object]) -> int:
    """Count the instructions that Python's interpreter executes for a call."""
    num_steps = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal num_steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_steps
