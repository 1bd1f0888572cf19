"""Time to first token of a long context that comes back: recomputed, restored from host memory, found on the device."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from cargohold import LLM, OffloadConfig, SamplingParams

MODEL = "smollm2"
BLOCK_TOKENS = 16


def run(*, quick: bool) -> dict[str, Any]:
    lengths, repeats = ([64], 1) if quick else ([500, 1000, 2000, 4000], 5)
    return {
        "workload": {"model": MODEL, "dtype": "float32", "block_tokens": BLOCK_TOKENS, "repeats": repeats},
        "rows": [_measure(length, repeats) for length in lengths],
    }


def _measure(length: int, repeats: int) -> dict[str, Any]:
    """Three contexts of which the pool holds one: each visit finds its context evicted, unless it was the last one."""
    generator = random.Random(length)
    contexts = [[generator.randrange(40_000) for _ in range(length)] for _ in range(3)]
    blocks = -(-length // BLOCK_TOKENS) + 4
    times: dict[str, list[float]] = {"recomputed": [], "restored": [], "on_device": []}
    tokens: dict[str, set[tuple[int, ...]]] = {name: set() for name in times}
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"num_device_blocks": blocks, "block_tokens": BLOCK_TOKENS, "dtype": "float32"}
    with LLM(MODEL, **options) as plain, LLM(MODEL, offload=OffloadConfig(host_bytes="2GiB"), **options) as offloading:
        for context in contexts:
            offloading.generate([context], sampling)
        for at in range(repeats):
            context = contexts[at % len(contexts)]
            plain.generate([contexts[(at + 1) % len(contexts)]], sampling)
            for name, llm in (("recomputed", plain), ("restored", offloading), ("on_device", offloading)):
                output = llm.generate([context], sampling)[0]
                assert output.metrics.ttft_s is not None
                times[name].append(output.metrics.ttft_s)
                tokens[name].add(output.token_ids)
                _check(name, output.metrics.device_tokens, sum(output.metrics.restored_tokens.values()), length)
    return {
        "context_tokens": length,
        **{f"{name}_s": round(median(of), 5) for name, of in times.items()},
        "restored_speedup": round(
            median(a / b for a, b in zip(times["recomputed"], times["restored"], strict=True)), 1
        ),
        "restored_over_on_device": round(
            median(a / b for a, b in zip(times["restored"], times["on_device"], strict=True)), 2
        ),
        "identical": len({frozenset(of) for of in tokens.values()}) == 1,
    }


def _check(name: str, device_tokens: int, restored_tokens: int, length: int) -> None:
    """A row measures what its name says, or nothing."""
    long_enough = length - BLOCK_TOKENS - 1
    found = {"recomputed": 0, "restored": restored_tokens, "on_device": device_tokens}[name]
    if name == "recomputed":
        assert device_tokens < BLOCK_TOKENS * 4
    else:
        assert found >= long_enough, (name, device_tokens, restored_tokens)
