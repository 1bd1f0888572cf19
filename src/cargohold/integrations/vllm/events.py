"""KV events as vLLM's publishers send them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.protocol import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


def translate_events(events: Iterable[KVEvent]) -> Iterator[Any]:
    """Ours as vLLM's, in order."""
    for event in events:
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                yield compat.BlockStored(
                    block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
                    parent_block_hash=None if parent is None else compat.convert_block_hash(parent),
                    token_ids=list(event.token_ids),
                    block_size=event.block_tokens,
                    lora_id=None if event.adapter is None else event.adapter.number,
                    medium=event.medium,
                    lora_name=None if event.adapter is None else event.adapter.name,
                    extra_keys=[keys or None for keys in event.extra_keys] or None,
                    group_idx=event.group,
                    locality=event.locality,
                )
            case BlockRemoved():
                yield compat.BlockRemoved(
                    block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
                    medium=event.medium,
                    group_idx=event.group,
                    locality=event.locality,
                )
            case AllBlocksCleared():
                yield compat.AllBlocksCleared()
