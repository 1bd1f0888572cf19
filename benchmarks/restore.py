"""Time to first token of a question about a context that comes back: computed, from disk or host memory, on the device.

Three contexts, of which the pool holds one, are visited in turn, with a question that was never asked before; engines without
and with offloading take turns. After a restart, an engine finds the context on disk. Every visit asserts where its context came
from, and the answers must be the same. Medians.
"""

from __future__ import annotations

import random
import tempfile
from statistics import median
from typing import Any

from cargohold import LLM, DiskTierConfig, OffloadConfig, SamplingParams
from cargohold.cli.demo import require_offloading

MODEL = "smollm2"
BLOCK_TOKENS = 16
QUESTION_TOKENS = 48
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


def run(*, quick: bool) -> dict[str, Any]:
    lengths, repeats = ([64], 1) if quick else ([500, 1000, 2000, 4000], 5)
    return {
        "workload": {
            "model": MODEL,
            "dtype": "float32",
            "block_tokens": BLOCK_TOKENS,
            "question_tokens": QUESTION_TOKENS,
            "repeats": repeats,
        },
        "rows": [_measure(length, repeats) for length in lengths],
    }


def _measure(length: int, repeats: int) -> dict[str, Any]:
    """Measure visits to three contexts, of which the pool holds one: a visit finds its context only right after another one.

    Each visit asks something that was never asked before.
    """
    generator = random.Random(length)
    contexts, questions, others = (
        [[generator.randrange(40_000) for _ in range(size)] for _ in range(count)]
        for size, count in ((length, 3), (QUESTION_TOKENS, repeats), (QUESTION_TOKENS, repeats))
    )
    blocks = -(-(length + QUESTION_TOKENS) // BLOCK_TOKENS) + 2
    visits = Visits(length)
    options: dict[str, Any] = {"num_device_blocks": blocks, "block_tokens": BLOCK_TOKENS, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskTierConfig(directory=directory, max_bytes="8GiB")
        options_with_disk = options | {"offload": OffloadConfig(host_bytes="2GiB", tiers=[disk], restore="always")}
        with LLM(MODEL, **options) as plain, LLM(MODEL, **options_with_disk) as offloading:
            for context in contexts:
                offloading.generate([context], SAMPLING)
                offloading.settle()
            for at, question in enumerate(questions):
                context = contexts[at % len(contexts)]
                plain.generate([contexts[(at + 1) % len(contexts)]], SAMPLING)
                visits.visit("recomputed", plain, context + question)
                visits.visit("restored", offloading, context + question)
                visits.visit("on_device", offloading, context + others[at])
        for at, question in enumerate(questions):
            with LLM(MODEL, **options_with_disk) as restarted:
                restarted.generate([[at + 1] * BLOCK_TOKENS], SAMPLING)  # the first pass takes longer than others
                visits.visit("from_disk", restarted, contexts[at % len(contexts)] + question)
    return {
        "context_tokens": length,
        **{f"{name}_s": round(median(of), 5) for name, of in visits.times.items()},
        "identical": visits.are_identical("recomputed", "restored", "from_disk"),
    }


class Visits:
    """Collects times to the first token, and generated tokens, by where the context came from.

    Args:
        length: tokens of a context.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[tuple[int, ...]]] = {}

    def visit(self, name: str, llm: LLM, prompt: list[int]) -> None:
        """Ask once. Asserts that the context came from where ``name`` says."""
        output = llm.generate([prompt], SAMPLING)[0]
        require_offloading(llm)
        llm.settle()
        metrics, least = output.metrics, self._length - BLOCK_TOKENS - 1
        assert metrics.ttft_s is not None
        match name:
            case "recomputed":
                assert metrics.device_tokens < BLOCK_TOKENS * 4
            case "on_device":
                assert metrics.device_tokens >= least, metrics
            case _:
                tier = {"from_disk": "disk", "restored": "host"}[name]
                assert metrics.restored_tokens.get(tier, 0) >= least, metrics
        self.times.setdefault(name, []).append(metrics.ttft_s)
        self.tokens.setdefault(name, []).append(output.token_ids)

    def are_identical(self, *names: str) -> bool:
        """Whether the answers to the same questions are the same."""
        return len({tuple(self.tokens[name]) for name in names}) == 1
