"""What the log says at start of what will be kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, DiskTierConfig, OffloadConfig, SharedTierConfig
from cargohold.connector.factory import Offload, equal_parts, never_found, start_report
from cargohold.protocol import NULL_CONNECTOR, AttentionKind, KVCacheGroup, KVCacheLayout

FULL = KVCacheGroup(0, AttentionKind.FULL, 32, ("layer",))


def test_a_report_names_every_group_and_what_its_layers_keep() -> None:
    groups = (
        FULL,
        KVCacheGroup(1, AttentionKind.SLIDING_WINDOW, 32, ("a", "b"), window_tokens=64),
        KVCacheGroup(2, AttentionKind.CHUNKED_LOCAL, 32, ("c",), window_tokens=128),
        KVCacheGroup(3, AttentionKind.RECURRENT, 32, ("d",)),
    )
    layout = KVCacheLayout(groups, num_blocks=9, block_bytes=1024, hash_block_tokens=32, world_size=2)
    assert start_report(layout, None, equal_parts(layout)) == [
        "device pool: 8 blocks of 1.0 KiB on each of 2 workers, 16 KiB in all",
        "group 0: 1 layer, full attention, 32 tokens per block, 64 B per token",
        "group 1: 2 layers, sliding window of 64 tokens, 32 tokens per block, 64 B per token",
        "group 2: 1 layer, chunked local attention in parts of 128 tokens, 32 tokens per block, 64 B per token",
        "group 3: 1 layer, recurrent state, 32 tokens per block, 64 B per token",
        "no connector: KV that leaves the device pool is computed again",
    ]


def test_of_one_thing_a_report_speaks_as_of_one() -> None:
    group = KVCacheGroup(0, AttentionKind.FULL, 1, ("layer",))
    layout = KVCacheLayout((group,), num_blocks=2, block_bytes=4096, hash_block_tokens=1)
    assert start_report(layout, OffloadConfig(host_bytes="4KiB"), equal_parts(layout)) == [
        "device pool: 1 block of 4.0 KiB, 4.0 KiB in all",
        "group 0: 1 layer, full attention, 1 token per block, 4.0 KiB per token",
        (
            "exclusive: 4.0 KiB of host memory for 1 chunk of 1 block, 4.0 KiB each; "
            "prompts and answers that the device pool has no room for, evicted by reuse-index"
        ),
        "both together hold 2 times as much as the device pool",
    ]


@pytest.mark.parametrize(("host_bytes", "is_little"), [(10 * 1024, False), (9 * 1024, True)])
def test_host_memory_that_adds_hardly_anything_is_named(host_bytes: int, is_little: bool) -> None:
    layout = KVCacheLayout((FULL,), num_blocks=101, block_bytes=1024, hash_block_tokens=32)
    line = start_report(layout, OffloadConfig(host_bytes=host_bytes), equal_parts(layout))[-1]
    assert line.startswith(f"both together hold 1.{'09' if is_little else '1'} times as much as the device pool")
    assert line.endswith("raise host_bytes") == is_little


def test_a_report_says_that_the_same_is_kept_once() -> None:
    layout = KVCacheLayout((FULL,), 9, 1024, hash_block_tokens=32, world_size=8, num_replicas=8)
    assert start_report(layout, OffloadConfig(host_bytes="1MiB"), equal_parts(layout))[-2] == (
        "exclusive: 1.0 MiB of host memory for 1,008 chunks of 1 block, 1.0 KiB each, "
        "kept once for 8 workers that hold the same; "
        "prompts and answers that the device pool has no room for, evicted by reuse-index"
    )


def test_a_report_says_what_is_below_host_memory() -> None:
    layout = KVCacheLayout((FULL,), num_blocks=9, block_bytes=1024, hash_block_tokens=32)
    offload = OffloadConfig(
        mode="lazy",
        host_bytes="1MiB",
        tiers=[
            DiskTierConfig(directory="/var/kv", max_bytes="200GiB"),
            SharedTierConfig(url="redis://:secret@h/0"),
            SharedTierConfig(url="s3://b/kv", max_bytes="1GiB"),
        ],
    )
    assert start_report(layout, offload, equal_parts(layout))[-4:] == [
        (
            "lazy: 1.0 MiB of host memory for 1,008 chunks of 1 block, 1.0 KiB each; "
            "prompts and answers that the device pool is about to evict, evicted by reuse-index"
        ),
        "below it: /var/kv, 200 GiB at most, evicted by lru",
        "below it: redis://h/0",
        "below it: s3://b/kv, 1.0 GiB at most",
    ]


def test_a_report_has_every_one_of_several_connectors() -> None:
    layout = KVCacheLayout((FULL,), num_blocks=9, block_bytes=1024, hash_block_tokens=32)
    offload: list[Offload] = [OffloadConfig(host_bytes="1MiB", policy="lru", store_generated=False), NULL_CONNECTOR]
    report = start_report(layout, offload, equal_parts(layout))
    nested: Any = [[offload[0]], offload[1]]
    assert start_report(layout, nested, equal_parts(layout)) == report
    assert report[-3:] == [
        (
            "exclusive: 1.0 MiB of host memory for 1,008 chunks of 1 block, 1.0 KiB each; "
            "prompts that the device pool has no room for, evicted by lru"
        ),
        "both together hold 127 times as much as the device pool",
        f"{type(NULL_CONNECTOR).__name__}: a connector of its own",
    ]


def test_an_engine_logs_it_before_it_loads_its_model(
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = DiskTierConfig(directory=tmp_path, max_bytes="64MiB", reserve_bytes=0)
    with caplog.at_level(logging.INFO, logger="cargohold"):
        llm = make_llm(tiny_model("llama"), offload=OffloadConfig(host_bytes="1MiB", tiers=[disk]))
    said = caplog.messages
    assert said[0].startswith(f"device pool: {llm.plan.layout.num_blocks - 1:,} blocks of ")
    assert said[4] == f"below it: {tmp_path}, 64 MiB at most, evicted by lru"
    assert said[-1].startswith("disk tier in ") and said[-1].endswith("0 chunks are there")


def test_what_no_prompt_can_fill_is_said() -> None:
    """Found by use: a model's blocks of 544 tokens with max_model_len 400 kept nothing, and nobody said so."""
    groups = (FULL, KVCacheGroup(1, AttentionKind.RECURRENT, 544, ("d",)))
    layout = KVCacheLayout(groups, num_blocks=9, block_bytes=1024, hash_block_tokens=32)
    offload: list[Offload] = [OffloadConfig(host_bytes="1MiB"), OffloadConfig(mode="lazy", host_bytes="1MiB")]
    (first, second) = never_found(offload, layout, 544)
    assert first == (
        "connectors[0]: nothing of any prompt is ever restored: a chunk of 1 block of group 1 has 544 tokens, and "
        "max_model_len is 544; raise it above 544, or make blocks smaller"
    )
    assert second.startswith("connectors[1]: ")
    assert not list(never_found(offload, layout, 545))
    assert not list(never_found(NULL_CONNECTOR, layout, 1))
