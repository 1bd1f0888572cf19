"""Bytes that the eager and the lazy connector move, with and without reuse before eviction."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.cli.demo import require_offloading
from cargohold.protocol import metrics

MODEL = "smollm2"
BLOCK_TOKENS = 16
ANSWER_TOKENS = 16
CONNECTORS: dict[str, OffloadConfig] = {
    "eager": OffloadConfig(host_bytes="2GiB"),
    "lazy": OffloadConfig(mode="lazy", host_bytes="2GiB"),
}


def run(*, quick: bool) -> dict[str, Any]:
    context, talks = (64, 2) if quick else (1500, 6)
    blocks_per_talk = (context + 3 * (ANSWER_TOKENS + 32)) // BLOCK_TOKENS + 1
    workloads: dict[str, tuple[list[list[int]], int]] = {
        # A pool for one conversation: every visit finds its context evicted. The demo's case.
        "evicted_before_reuse": (_visits(talks, context, 3), int(1.4 * blocks_per_talk)),
        # A pool for all of them: every visit finds its context on the device.
        "reused_before_eviction": (_visits(talks, context, 3), int(1.5 * talks * blocks_per_talk)),
        # Nothing ever comes back, in a pool for two.
        "never_reused": (_visits(2 * talks, context, 1), 2 * blocks_per_talk),
    }
    return {
        "workload": {"model": MODEL, "block_tokens": BLOCK_TOKENS, "context_tokens": context, "conversations": talks},
        "rows": [
            {"case": case, "connector": name, **_measure(visits, num_blocks, config)}
            for case, (visits, num_blocks) in workloads.items()
            for name, config in CONNECTORS.items()
        ],
    }


def _visits(talks: int, context: int, turns: int) -> list[list[int]]:
    """Prompts of several conversations, visited in turn; each turn adds 32 tokens."""
    generator = random.Random(talks)
    texts = [[generator.randrange(40_000) for _ in range(context + 32 * turns)] for _ in range(talks)]
    return [text[: context + 32 * turn] for turn in range(turns) for text in texts]


def _measure(visits: Sequence[list[int]], num_blocks: int, offload: OffloadConfig) -> dict[str, Any]:
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    with LLM(MODEL, num_device_blocks=num_blocks, block_tokens=BLOCK_TOKENS, offload=offload) as llm:
        outputs = []
        for prompt in visits:
            outputs += llm.generate(prompt, sampling)
            llm.settle()
        require_offloading(llm)
        stats = llm.stats()
        mib = llm.plan.layout.block_bytes / 2**20
    return {
        "stored_mib": round(stats.get(metrics.COPIED_BLOCKS.of("store"), 0) * mib, 1),
        "loaded_mib": round(stats.get(metrics.COPIED_BLOCKS.of("load"), 0) * mib, 1),
        "device_hit_tokens": sum(out.metrics.device_tokens for out in outputs),
        "restored_tokens": sum(sum(out.metrics.restored_tokens.values()) for out in outputs),
        "ttft_median_s": round(median(out.metrics.ttft_s or 0.0 for out in outputs), 4),
    }
