"""Time to first token of a long context that comes back: recomputed, restored from disk or host memory, on the device."""

from __future__ import annotations

import random
import tempfile
from statistics import median
from typing import Any

from cargohold import LLM, DiskTierConfig, OffloadConfig, SamplingParams
from cargohold.cli.demo import require_offloading

MODEL = "smollm2"
BLOCK_TOKENS = 16
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


def run(*, quick: bool) -> dict[str, Any]:
    lengths, repeats = ([64], 1) if quick else ([500, 1000, 2000, 4000], 5)
    return {
        "workload": {"model": MODEL, "dtype": "float32", "block_tokens": BLOCK_TOKENS, "repeats": repeats},
        "rows": [_measure(length, repeats) for length in lengths],
    }


def _measure(length: int, repeats: int) -> dict[str, Any]:
    """Measure visits to three contexts, of which the pool holds one: a visit finds its context only right after another one."""
    generator = random.Random(length)
    contexts = [[generator.randrange(40_000) for _ in range(length)] for _ in range(3)]
    blocks = -(-length // BLOCK_TOKENS) + 4
    visits = Visits(length)
    options: dict[str, Any] = {"num_device_blocks": blocks, "block_tokens": BLOCK_TOKENS, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as directory:
        disk = DiskTierConfig(directory=directory, max_bytes="8GiB")
        options_with_disk = options | {"offload": OffloadConfig(host_bytes="2GiB", tiers=[disk], restore="always")}
        with LLM(MODEL, **options) as plain, LLM(MODEL, **options_with_disk) as offloading:
            for context in contexts:
                offloading.generate([context], SAMPLING)
                offloading.settle()
            for at in range(repeats):
                context = contexts[at % len(contexts)]
                plain.generate([contexts[(at + 1) % len(contexts)]], SAMPLING)
                visits.visit("recomputed", plain, context)
                visits.visit("restored", offloading, context)
                visits.visit("on_device", offloading, context)
        for at in range(repeats):
            with LLM(MODEL, **options_with_disk) as restarted:
                restarted.generate([[at + 1] * BLOCK_TOKENS], SAMPLING)  # the first pass takes longer than others
                visits.visit("from_disk", restarted, contexts[at % len(contexts)])
    return {
        "context_tokens": length,
        **{f"{name}_s": round(median(of), 5) for name, of in visits.times.items()},
        "restored_speedup": round(visits.ratio("recomputed", "restored"), 1),
        "from_disk_speedup": round(visits.ratio("recomputed", "from_disk"), 1),
        "restored_over_on_device": round(visits.ratio("restored", "on_device"), 2),
        "identical": len({frozenset(of) for of in visits.tokens.values()}) == 1,
    }


class Visits:
    """Collects times to the first token, and generated tokens, by where the context came from.

    Args:
        length: tokens of a context.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, set[tuple[int, ...]]] = {}

    def visit(self, name: str, llm: LLM, context: list[int]) -> None:
        """Ask once. Asserts that the context came from where ``name`` says."""
        output = llm.generate([context], SAMPLING)[0]
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
        self.tokens.setdefault(name, set()).add(output.token_ids)

    def ratio(self, slow: str, fast: str) -> float:
        """Median of the quotients of times, visit by visit."""
        return median(a / b for a, b in zip(self.times[slow], self.times[fast], strict=True))
