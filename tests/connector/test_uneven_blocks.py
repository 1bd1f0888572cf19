"""A model whose groups use different parts of a block, 2, 2 and 1 layers of it: nothing is kept of what nobody uses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.cache import OffloadManager, make_manager
from cargohold.protocol import metrics
from cargohold.tiers import DiskTierConfig, SharedTierConfig, TierConfig
from tests.models import VOCAB_SIZE

SAMPLING = SamplingParams(max_tokens=5)
OPTIONS: dict[str, Any] = {"block_tokens": 4, "num_device_blocks": 90, "max_model_len": 110}


def ask(llm: LLM) -> tuple[list[tuple[int, ...]], int]:
    """Answers to prompts that are together larger than the pool, and the tokens that were restored for them."""
    generator = random.Random(8)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(80)] for _ in range(3)]
    outputs = [llm.generate([prompt], SAMPLING)[0] for prompt in prompts]
    return [output.token_ids for output in outputs], sum(sum(o.metrics.restored_tokens.values()) for o in outputs)


@pytest.fixture
def expected(tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]) -> list[tuple[int, ...]]:
    return ask(make_llm(tiny_model("gemma3"), prefix_caching=False, **OPTIONS))[0]


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_what_is_written_below_host_memory_is_as_long_as_the_groups_own_part(
    kind: str,
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
) -> None:
    tier: TierConfig = SharedTierConfig(url=tmp_path.as_uri())
    if kind == "disk":
        tier = DiskTierConfig(directory=str(tmp_path), max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="1MiB", tiers=[tier], restore="always", restore_timeout_s=60.0)
    first = make_llm(tiny_model("gemma3"), offload=offload, **OPTIONS)
    assert ask(first)[0] == expected
    told = first.stats()
    block_bytes = first.plan.layout.block_bytes
    written, num_chunks = told[metrics.MOVED.of(kind, "in")], told[metrics.STORED.of(kind)]
    assert 0.5 * block_bytes * num_chunks < written < 0.95 * block_bytes * num_chunks
    assert told[metrics.TIER_READY.of("host")] == written, "all of it is in host memory still"
    first.close()
    second = make_llm(tiny_model("gemma3"), offload=offload, **OPTIONS)
    tokens, num_restored = ask(second)
    assert tokens == expected and num_restored >= 200


@pytest.mark.parametrize("own", ["transfer", "manager"])
def test_managers_and_transfers_of_ones_own_need_not_know_of_it(
    own: str, expected: list[tuple[int, ...]], tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    made_by: dict[str, Any] = {
        "transfer": "cargohold.transfer.cpu:make_transfer_worker",
        "manager": f"{__name__}:plain_manager",
    }
    options: dict[str, Any] = {own: made_by[own]}
    offload = OffloadConfig(host_bytes="1MiB", **options)
    llm = make_llm(tiny_model("gemma3"), offload=offload, **OPTIONS)
    assert ask(llm)[0] == expected
    tokens, num_restored = ask(llm)
    assert tokens == expected and num_restored >= 100


def plain_manager(capacity: int, *, record_events: bool) -> OffloadManager:

    return make_manager("lru", capacity, record_events=record_events)
