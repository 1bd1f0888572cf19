"""How many tokens of long prompts a tier holds per GiB, beside how many it could if nothing of it were lost."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.cache.rows import plan_rows
from cargohold.connector.kernel.loads import blocks_to_store
from cargohold.protocol import KVCacheLayout, Stats, metrics

_GIB = 1 << 30


def kept_blocks(layout: KVCacheLayout) -> list[float]:
    """Return how many blocks of each group are kept of one token of a long prompt."""
    kept = []
    for group in layout.groups:
        num_blocks = max(1, group.hit_tokens // group.block_tokens)
        table = range(1, 2 * num_blocks + 1)
        num_kept = len(blocks_to_store(group, table, 1, num_blocks, 2 * num_blocks).chunks)
        kept.append(num_kept / (num_blocks * group.block_tokens))
    return kept


def tokens_per_gib(layout: KVCacheLayout, block_bytes: Sequence[int]) -> int:
    """Return how many tokens a GiB holds if a block of each group takes so many bytes on one worker."""
    of_token = sum(kept * size for kept, size in zip(kept_blocks(layout), block_bytes, strict=True))
    return int(_GIB / (of_token * layout.num_shards))


def held_per_gib(layout: KVCacheLayout) -> int:
    """Return how many tokens a GiB of host memory holds."""
    plan = plan_rows(layout)
    return tokens_per_gib(layout, [count * plan.row_bytes for count in plan.per_block])


def possible_per_gib(layout: KVCacheLayout) -> int:
    """Return how many tokens a GiB would hold if each block took what its group's layers use of it."""
    return tokens_per_gib(layout, layout.group_bytes)


def held_levels(layout: KVCacheLayout, block_bytes: Sequence[int] | None = None) -> Stats:
    """Return both as levels; ``block_bytes`` are the sizes of groups' blocks where the layout does not say them."""
    possible = tokens_per_gib(layout, block_bytes or layout.group_bytes)
    series = metrics.TOKENS_PER_GIB
    return {series.of("held"): held_per_gib(layout), series.of("possible"): possible}
