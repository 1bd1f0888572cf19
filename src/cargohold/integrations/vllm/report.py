"""The report in the log at start: what will be kept, how large it is, and what each option came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cargohold.connector.factory import Offload
from cargohold.connector.lazy import LazyOffloadConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.integrations.vllm.stages import Parts
from cargohold.protocol import KVCacheLayout
from cargohold.units import format_bytes


def start_report(layout: KVCacheLayout, offload: Offload | Sequence[Offload], parts: Parts) -> list[str]:
    """Lines for the log.

    Args:
        layout: the paged KV; of the largest worker where they differ.
        offload: the connectors' options.
        parts: what all workers hold together.
    """
    pool_bytes = (layout.num_blocks - 1) * parts.all_block_bytes
    workers = f" on each of {layout.world_size} workers" if layout.world_size > 1 else ""
    at_most = "at most " if parts.are_unequal(layout.world_size) else ""
    blocks = f"{layout.num_blocks - 1} blocks of {at_most}{format_bytes(layout.block_bytes)}{workers}"
    lines = [f"device pool: {blocks}, {format_bytes(pool_bytes)} in all"]
    for group, num_layers in zip(layout.groups, parts.num_layers, strict=True):
        window = f" of {group.window_tokens} tokens" if group.window_tokens else ""
        lines.append(
            f"group {group.index}: {num_layers} layers, {group.kind.value.replace('_', ' ')}{window}, "
            f"{group.block_tokens} tokens per block, {format_bytes(parts.all_block_bytes / group.block_tokens)} per token"
        )
    lines.extend(_connector_lines(layout, list(offload) if isinstance(offload, Sequence) else [offload], parts))
    return lines


def _connector_lines(layout: KVCacheLayout, offloads: Sequence[Offload], parts: Parts) -> Iterator[str]:
    for offload in offloads:
        if isinstance(offload, LazyOffloadConfig):
            yield f"lazy: {_tier(layout, offload.common(), parts)}; filled with what the device is about to evict"
            yield from (f"below it: {tier.describe()}" for tier in offload.tiers)
        elif isinstance(offload, OffloadConfig):
            generated = "prompts and answers" if offload.store_generated else "prompts"
            yield f"eager: {_tier(layout, offload, parts)}; {generated}, evicted by {offload.policy}"
            yield from (f"below it: {tier.describe()}" for tier in offload.tiers)
        else:
            yield f"{type(offload).__name__}: a connector of its own"


def _tier(layout: KVCacheLayout, config: OffloadConfig, parts: Parts) -> str:
    num_slots = OffloadingFactory(config).num_slots(layout)
    shared = ", an equal share for every worker," if parts.are_unequal(layout.world_size) else ""
    return (
        f"{format_bytes(config.num_host_bytes)} of host memory{shared} for {num_slots} chunks of "
        f"{config.blocks_per_chunk} block(s), {format_bytes(parts.all_block_bytes * config.blocks_per_chunk)} each"
    )
