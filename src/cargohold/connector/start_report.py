"""The report in the log at start: what will be kept, how large it is, and what each option came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cargohold.connector.factory import Offload
from cargohold.connector.lazy import LazyOffloadConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.protocol import AttentionKind, KVCacheLayout
from cargohold.units import format_bytes, format_count

_KINDS: Final = {
    AttentionKind.FULL: "full attention",
    AttentionKind.SLIDING_WINDOW: "sliding window",
    AttentionKind.CHUNKED_LOCAL: "chunked local attention in parts",
    AttentionKind.RECURRENT: "recurrent state",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the paged KV that all workers hold together.

    Attributes:
        largest_block_bytes: bytes of one block on the worker where it takes the most.
        all_block_bytes: bytes of one block on all workers together.
        num_layers: layers per KV-cache group, on all workers together.
    """

    largest_block_bytes: int
    all_block_bytes: int
    num_layers: tuple[int, ...]

    def are_unequal(self, world_size: int) -> bool:
        """Whether one worker has more than another."""
        return self.largest_block_bytes * world_size != self.all_block_bytes


def equal_parts(layout: KVCacheLayout) -> Parts:
    """The parts where all workers hold shards of the same layers."""
    num_layers = tuple(len(group.layer_names) for group in layout.groups)
    return Parts(layout.block_bytes, layout.block_bytes * layout.world_size, num_layers)


def start_report(layout: KVCacheLayout, offload: Offload | Sequence[Offload] | None, parts: Parts) -> list[str]:
    """Lines for the log.

    Args:
        layout: the paged KV; of the largest worker where they differ.
        offload: the connectors' options; ``None`` if there is no connector.
        parts: what all workers hold together.
    """
    pool_bytes = (layout.num_blocks - 1) * parts.all_block_bytes
    workers = f" on each of {layout.world_size} workers" if layout.world_size > 1 else ""
    at_most = "at most " if parts.are_unequal(layout.world_size) else ""
    num_blocks = format_count(layout.num_blocks - 1, "block")
    blocks = f"{num_blocks} of {at_most}{format_bytes(layout.block_bytes)}{workers}"
    lines = [f"device pool: {blocks}, {format_bytes(pool_bytes)} in all"]
    for group, num_layers in zip(layout.groups, parts.num_layers, strict=True):
        window = f" of {format_count(group.window_tokens, 'token')}" if group.window_tokens else ""
        tokens = format_count(group.block_tokens, "token")
        lines.append(
            f"group {group.index}: {format_count(num_layers, 'layer')}, {_KINDS[group.kind]}{window}, "
            f"{tokens} per block, {format_bytes(parts.all_block_bytes / group.block_tokens)} per token"
        )
    connectors = list(_connector_lines(layout, offload, parts))
    return lines + (connectors or ["no connector: KV that leaves the device pool is computed again"])


def _connector_lines(layout: KVCacheLayout, offload: Offload | Sequence[Offload] | None, parts: Parts) -> Iterator[str]:
    match offload:
        case None:
            return
        case Sequence():
            for child in offload:
                yield from _connector_lines(layout, child, parts)
        case LazyOffloadConfig():
            yield f"lazy: {_tier(layout, offload.common(), parts)}; filled with what the device is about to evict"
            yield from (f"below it: {tier.describe()}" for tier in offload.tiers)
        case OffloadConfig():
            generated = "prompts and answers" if offload.store_generated else "prompts"
            yield f"eager: {_tier(layout, offload, parts)}; {generated}, evicted by {offload.policy}"
            yield from (f"below it: {tier.describe()}" for tier in offload.tiers)
        case _:
            yield f"{type(offload).__name__}: a connector of its own"


def _tier(layout: KVCacheLayout, config: OffloadConfig, parts: Parts) -> str:
    num_slots = OffloadingFactory(config).num_slots(layout)
    shared = ", an equal share for every worker," if parts.are_unequal(layout.world_size) else ""
    blocks = format_count(config.blocks_per_chunk, "block")
    return (
        f"{format_bytes(config.num_host_bytes)} of host memory{shared} for {format_count(num_slots, 'chunk')} of {blocks}, "
        f"{format_bytes(parts.all_block_bytes * config.blocks_per_chunk)} each"
    )
