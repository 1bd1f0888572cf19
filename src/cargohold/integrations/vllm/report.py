"""What is said at start: what will be kept, how large it is, and what each option came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cargohold.connector.factory import Offload
from cargohold.connector.lazy import LazyOffloadConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.protocol import KVCacheLayout
from cargohold.units import format_bytes


def start_report(layout: KVCacheLayout, offload: Offload | Sequence[Offload]) -> list[str]:
    """Lines for the log.

    Args:
        layout: the paged KV.
        offload: the connectors' options.
    """
    pool_bytes = (layout.num_blocks - 1) * layout.block_bytes * layout.world_size
    workers = f" on each of {layout.world_size} workers" if layout.world_size > 1 else ""
    blocks = f"{layout.num_blocks - 1} blocks of {format_bytes(layout.block_bytes)}{workers}"
    lines = [f"device pool: {blocks}, {format_bytes(pool_bytes)} in all"]
    for group in layout.groups:
        window = f" of {group.window_tokens} tokens" if group.window_tokens else ""
        lines.append(
            f"group {group.index}: {len(group.layer_names)} layers, {group.kind.value.replace('_', ' ')}{window}, "
            f"{group.block_tokens} tokens per block, {_per_token(layout, group.block_tokens)} per token"
        )
    lines.extend(_connector_lines(layout, list(offload) if isinstance(offload, Sequence) else [offload]))
    return lines


def _connector_lines(layout: KVCacheLayout, offloads: Sequence[Offload]) -> Iterator[str]:
    for offload in offloads:
        if isinstance(offload, LazyOffloadConfig):
            yield f"lazy: {_tier(layout, offload.common())}; filled with what the device is about to evict"
        elif isinstance(offload, OffloadConfig):
            generated = "prompts and answers" if offload.store_generated else "prompts"
            yield f"eager: {_tier(layout, offload)}; {generated}, evicted by {offload.policy}"
        else:
            yield f"{type(offload).__name__}: a connector of its own"


def _tier(layout: KVCacheLayout, config: OffloadConfig) -> str:
    num_slots = OffloadingFactory(config).num_slots(layout)
    chunk_bytes = layout.block_bytes * layout.world_size * config.blocks_per_chunk
    return (
        f"{format_bytes(config.num_host_bytes)} of host memory for {num_slots} chunks of {config.blocks_per_chunk} "
        f"block(s), {format_bytes(chunk_bytes)} each"
    )


def _per_token(layout: KVCacheLayout, block_tokens: int) -> str:
    return format_bytes(layout.block_bytes * layout.world_size / block_tokens)
