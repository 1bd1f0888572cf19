"""Namespaces of chunks that outlive an engine: only an engine whose KV would be the same bytes may find them."""

from __future__ import annotations

from cargohold.errors import ConfigError
from cargohold.offload.tier import Namespace
from cargohold.offload.tier.chunk_format import room_for_details
from cargohold.offload.tier.weights import digest_model
from cargohold.protocol import KVCacheLayout, ServedModel


def served_model(layout: KVCacheLayout) -> ServedModel:
    """Return the model that the engine serves. Raises ``ConfigError`` if the engine cannot say all that determines its KV."""
    if layout.model is None:
        raise ConfigError("tiers", None, "this engine does not say which model it serves, so KV cannot outlive it")
    if layout.model.obstacle:
        raise ConfigError("tiers", layout.model.name, f"{layout.model.obstacle}, so KV cannot outlive the engine")
    return layout.model


def namespace_of(layout: KVCacheLayout, rank: int, blocks_per_chunk: int) -> Namespace:
    """Return all that determines the bytes of one worker's chunks and the meaning of their keys. Reads the model's files."""
    model = served_model(layout)
    weights, config = digest_model(model)
    return Namespace(
        label=model.name,
        weights=weights,
        config=config,
        dtype=model.dtype,
        layout=_describe(layout, blocks_per_chunk),
        split=f"rank {rank} of {layout.world_size}",
        hashing=f"{layout.hash_block_tokens} tokens per hash",
        details_bytes=room_for_details(
            blocks_per_chunk * max(group.block_tokens for group in layout.groups), blocks_per_chunk
        ),
    )


def _describe(layout: KVCacheLayout, blocks_per_chunk: int) -> str:
    groups = "; ".join(
        f"group {group.index}: {group.kind.value}, window {group.window_tokens}, {group.block_tokens} tokens per block, "
        f"layers {' '.join(group.layer_names)}"
        for group in layout.groups
    )
    return f"{blocks_per_chunk} blocks of {layout.block_bytes} bytes per chunk; {groups}"
