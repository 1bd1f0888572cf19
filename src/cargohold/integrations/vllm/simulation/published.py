"""KV events as vLLM publishes them, read back as ours."""

from __future__ import annotations

from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.protocol import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


def from_vllm(event: Any, medium: str) -> KVEvent:
    """One event as a follower would read it.

    Tokens are left out: vLLM's hashes are its own business.

    Args:
        event: vLLM's event.
        medium: the medium of an event that does not name its own.
    """
    match event:
        case compat.BlockStored():
            return BlockStored(
                block_hashes=tuple(event.block_hashes),
                parent_block_hash=event.parent_block_hash,
                token_ids=(),
                block_tokens=event.block_size,
                group=event.group_idx,
                medium=event.medium,
            )
        case compat.BlockRemoved():
            return BlockRemoved(tuple(event.block_hashes), event.group_idx, event.medium)
        case compat.AllBlocksCleared():
            return AllBlocksCleared(medium)
        case _:
            raise TypeError(f"vLLM publishes {event!r}")
