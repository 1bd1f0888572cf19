"""Counters of the connectors, as the engine adds them up."""

from __future__ import annotations

from collections.abc import Callable

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.protocol import metrics


def test_stats_count_what_was_moved(tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(
        tiny_model("llama"),
        block_tokens=8,
        num_device_blocks=16,
        max_model_len=100,
        offload=OffloadConfig(host_bytes="8MiB"),
    )
    prompts = [[number, *range(64)] for number in range(3)]
    for prompt in prompts:
        llm.generate(prompt, SamplingParams(max_tokens=1))
    stats = llm.stats()
    # 65 tokens are eight whole blocks.
    assert stats[metrics.COPIED_BLOCKS.of("store")] == stats[metrics.PLANNED_BLOCKS.of("store")] == 24
    assert metrics.COPIED_BLOCKS.of("load") not in stats
    assert stats[metrics.READY_CHUNKS] == stats[metrics.STORED.of("host")] == 24
    restored = llm.generate(prompts[0], SamplingParams(max_tokens=1))[0].metrics.restored_tokens["host"]
    assert restored == 64
    assert llm.stats()[metrics.COPIED_BLOCKS.of("load")] == 8
    assert llm.stats() == llm.stats(), "asking changes nothing"


def test_both_sides_of_a_connector_count_under_one_name(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """Found by looking: the workers of the lazy connector counted for the eager one."""
    offload = [OffloadConfig(mode="lazy", host_bytes="8MiB", lookahead_blocks=15), OffloadConfig(host_bytes="8MiB")]
    llm = make_llm(tiny_model("llama"), block_tokens=8, num_device_blocks=16, max_model_len=100, offload=offload)
    for number in range(3):
        llm.generate([number, *range(64)], SamplingParams(max_tokens=1))
    stats = llm.stats()
    for name in ("lazy", "offloading"):
        copied, planned = metrics.COPIED_BLOCKS.of("store"), metrics.PLANNED_BLOCKS.of("store")
        assert stats[copied._replace(connector=name)] == stats[planned._replace(connector=name)] > 0


def test_there_is_nothing_to_count_without_a_connector(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(tiny_model("llama"))
    llm.generate([1, 2, 3], SamplingParams(max_tokens=1))
    assert llm.stats() == {}


def test_what_came_in_has_gone_or_is_there(tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]) -> None:
    for offload in (OffloadConfig(host_bytes="64KiB"), OffloadConfig(mode="lazy", host_bytes="64KiB")):
        llm = make_llm(tiny_model("llama"), block_tokens=8, num_device_blocks=16, max_model_len=100, offload=offload)
        for number in range(12):
            llm.generate([number, *range(90)], SamplingParams(max_tokens=1))
        stats = llm.stats()
        evicted = stats[metrics.REMOVED.of("host", "evicted")]
        assert evicted > 0
        num_ready = stats[metrics.READY_CHUNKS]
        assert num_ready == stats[metrics.STORED.of("host")] - evicted
        llm.reset_cache()
        gone = {series.labels[1]: count for series, count in llm.stats().items() if series.family is metrics.REMOVED}
        assert gone == {"evicted": evicted, "reset": num_ready}
