"""How many tokens of long prompts a tier holds per GiB, next to how many it could if nothing of it were lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cargohold.connector.config import OffloadConfig
from cargohold.connector.factory import Offload, own_configs
from cargohold.connector.kernel.offers import blocks_to_store
from cargohold.connector.offloading.factory import chunk_sizes, details_bytes
from cargohold.protocol import KVCacheLayout, Stats, metrics
from cargohold.tiers import tier_names

_GIB = 1 << 30


def kept_blocks(layout: KVCacheLayout) -> list[float]:
    """Return how many blocks of each group are kept of one token of a long prompt."""
    kept = []
    for group in layout.groups:
        num_blocks = max(1, group.hit_tokens // group.block_tokens)
        table = range(1, 2 * num_blocks + 1)
        num_kept = len(blocks_to_store(group, table, 1, num_blocks, 2 * num_blocks)[0])
        kept.append(num_kept / (num_blocks * group.block_tokens))
    return kept


def tokens_per_gib(layout: KVCacheLayout, block_bytes: Sequence[float]) -> int:
    """Return how many tokens a GiB holds if a block of each group takes so many bytes on one worker."""
    of_token = sum(kept * size for kept, size in zip(kept_blocks(layout), block_bytes, strict=True))
    return int(_GIB / (of_token * layout.num_shards))


def held_per_gib(layout: KVCacheLayout, offload: Offload | Sequence[Offload] | None) -> dict[str, int]:
    """Return how many tokens a GiB holds, by tier, of those for which all connectors in ``offload`` say the same."""
    found: dict[str, set[int]] = {}
    for _, config in own_configs(offload):
        for name, chunk_bytes in _taken(config, layout):
            held = tokens_per_gib(layout, [size / config.blocks_per_chunk for size in chunk_bytes])
            found.setdefault(name, set()).add(held)
    return {name: held.pop() for name, held in found.items() if len(held) == 1}


def _taken(config: OffloadConfig, layout: KVCacheLayout) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the tiers of one connector for which that is known, with the bytes that chunks of each group take on one worker."""
    sizes, room = chunk_sizes(config, layout), details_bytes(layout, config.blocks_per_chunk)
    types = [group.number_type for group in layout.groups]
    yield "host", sizes
    for name, tier in zip(tier_names(config.tiers), config.tiers, strict=True):
        if (taken := tier.bytes_taken(sizes, types, room)) is not None:
            yield name, taken


def held_levels(
    layout: KVCacheLayout, offload: Offload | Sequence[Offload] | None, block_bytes: Sequence[int] | None = None
) -> Stats:
    """Return all of them as levels; ``block_bytes`` are the sizes of groups' blocks where the layout does not say them."""
    held = held_per_gib(layout, offload)
    if not held:
        return {}
    levels: dict[str, float] = {"possible": tokens_per_gib(layout, block_bytes or layout.group_bytes)}
    for name, num_tokens in held.items():
        levels["held" if name == "host" else f"held_{name}"] = num_tokens
    return {metrics.TOKENS_PER_GIB.of(what): level for what, level in levels.items()}
