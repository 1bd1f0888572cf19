"""KV events as vLLM's publishers send them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.protocol import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class EventTranslator:
    """Translates our KV events into vLLM's.

    Args:
        groups: vLLM's KV-cache groups. Events name their kinds, because routers follow only some kinds of groups.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._kinds = [compat.describe_group(group.kv_cache_spec) for group in groups]

    def translate(self, events: Iterable[KVEvent]) -> Iterator[Any]:
        """Yield vLLM's event for each of ours, in order."""
        for event in events:
            match event:
                case BlockStored():
                    yield self._stored(event)
                case BlockRemoved():
                    yield compat.BlockRemoved(
                        block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
                        medium=event.medium,
                        group_idx=event.group,
                        locality=event.locality,
                    )
                case AllBlocksCleared():
                    yield compat.AllBlocksCleared()

    def _stored(self, event: BlockStored) -> Any:
        parent = event.parent_block_hash
        kind, window = self._kinds[event.group]
        return compat.BlockStored(
            block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
            parent_block_hash=None if parent is None else compat.convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=event.block_tokens,
            lora_id=None if event.adapter is None else event.adapter.number,
            medium=event.medium,
            lora_name=None if event.adapter is None else event.adapter.name,
            extra_keys=[keys or None for keys in event.extra_keys] or None,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=event.locality,
        )
