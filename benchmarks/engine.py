"""The embedded engine beside plain transformers with its own cache: prefill, decode, and what batching gives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cargohold import LLM, SamplingParams
from cargohold.engine.model.files import locate_model

MODEL = "smollm2"


def run(*, quick: bool) -> dict[str, Any]:
    lengths, num_decodes, repeats, batch = ([48], 4, 1, 2) if quick else ([64, 512, 2000], 32, 5, 8)
    generator = random.Random(0)
    plain = AutoModelForCausalLM.from_pretrained(locate_model(MODEL), dtype=torch.float32).eval()
    # Few blocks, so that they are used again and again: the first touch of memory takes time of the system, not of the engine.
    with LLM(MODEL, dtype="float32", prefix_caching=False, num_device_blocks=160) as llm:
        vocab = llm.plan.info.vocab_size
        single = [
            _compare(plain, llm, [generator.randrange(vocab) for _ in range(length)], num_decodes, repeats)
            for length in lengths
        ]
        prompts = [[generator.randrange(vocab) for _ in range(128)] for _ in range(batch)]
        batching = _batching(llm, prompts, num_decodes, repeats)
    return {
        "workload": {"model": MODEL, "dtype": "float32", "generated_tokens": num_decodes, "repeats": repeats},
        "single": single,
        "batching": batching,
    }


def _compare(plain: Any, llm: LLM, prompt: list[int], num_decodes: int, repeats: int) -> dict[str, Any]:
    """Measure both engines in turns, after two rounds that are not counted."""
    rounds = [(_plain(plain, prompt, num_decodes), _ours(llm, prompt, num_decodes)) for _ in range(repeats + 2)][2:]
    row: dict[str, Any] = {"prompt_tokens": len(prompt)}
    for at, what in enumerate(("prefill", "decode")):
        theirs, ours = median(a[at] for a, _ in rounds), median(b[at] for _, b in rounds)
        row[f"{what}_transformers_s"] = round(theirs, 5)
        row[f"{what}_cargohold_s"] = round(ours, 5)
        row[f"{what}_ratio"] = round(median(b[at] / a[at] for a, b in rounds), 3)
    return row


@torch.inference_mode()
def _plain(model: Any, prompt: list[int], num_decodes: int) -> tuple[float, float]:
    """Seconds for the prompt, and seconds per generated token."""
    cache = DynamicCache()
    start = time.perf_counter()
    output = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
    token = output.logits[:, -1:].argmax(-1)
    first = time.perf_counter()
    for _ in range(num_decodes):
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return first - start, (time.perf_counter() - first) / num_decodes


def _ours(llm: LLM, prompt: list[int], num_decodes: int) -> tuple[float, float]:
    metrics = llm.generate([prompt], _sampling(num_decodes + 1))[0].metrics
    assert metrics.ttft_s is not None
    assert metrics.total_s is not None
    return metrics.ttft_s, (metrics.total_s - metrics.ttft_s) / num_decodes


def _batching(llm: LLM, prompts: Sequence[list[int]], num_tokens: int, repeats: int) -> dict[str, Any]:
    sampling = _sampling(num_tokens)
    rounds = [
        (
            _timed(lambda: [llm.generate([prompt], sampling) for prompt in prompts]),
            _timed(lambda: llm.generate(list(prompts), sampling)),
        )
        for _ in range(repeats)
    ]
    return {
        "requests": len(prompts),
        "one_by_one_s": round(median(a for a, _ in rounds), 4),
        "together_s": round(median(b for _, b in rounds), 4),
        "speedup": round(median(a / b for a, b in rounds), 2),
    }


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)
