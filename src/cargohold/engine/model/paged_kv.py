"""The paged KV memory of one worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cargohold.protocol import KVCacheLayout
from cargohold.tiers import HostMemory


@dataclass(frozen=True, slots=True)
class PagedKV:
    """KV memory, block-major: one block is one contiguous piece, whatever group it serves.

    ::

        storage   | block 0 (null) | block 1 | block 2 | ...
        a block   | layer slot 0: K, V | layer slot 1: K, V | ...
        K or V    | token 0: heads x head_dim | token 1 | ... | token block_tokens - 1

    Attributes:
        storage: ``uint8``, shape ``(num_blocks, block_bytes)``. The null block is never read.
        token_rows: the same memory, one row per token and K or V: shape
            ``(num_blocks * layers * 2 * block_tokens, heads * head_dim)``.
        half_rows: the same memory, one row per block, layer slot and K or V: shape
            ``(num_blocks * layers * 2, block_tokens * heads * head_dim)``.
        layers_per_group: layer slots in a block.
        block_tokens: tokens per block.
        num_heads: key/value heads on this worker.
        head_dim: numbers per head.
    """

    storage: torch.Tensor
    token_rows: torch.Tensor
    half_rows: torch.Tensor
    layers_per_group: int
    block_tokens: int
    num_heads: int
    head_dim: int

    @classmethod
    def allocate(
        cls, layout: KVCacheLayout, *, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> PagedKV:
        """Allocate zeroed memory for ``layout``. On a CPU pages are committed when first written."""
        block_tokens = layout.groups[0].block_tokens
        layers_per_group = max(len(group.layer_names) for group in layout.groups)
        shape = (layout.num_blocks, layout.block_bytes)
        if device.type == "cpu":
            storage = torch.from_numpy(
                HostMemory(*shape).rows
            )  # torch.zeros would write to every page: seconds per GiB
        else:
            storage = torch.zeros(shape, dtype=torch.uint8, device=device)
        numbers = storage.view(dtype)
        token_rows = numbers.view(-1, num_heads * head_dim)
        assert token_rows.shape[0] == layout.num_blocks * layers_per_group * 2 * block_tokens, "block_bytes is off"
        half_rows = numbers.view(-1, block_tokens * num_heads * head_dim)
        return cls(storage, token_rows, half_rows, layers_per_group, block_tokens, num_heads, head_dim)

    @property
    def block_stride(self) -> int:
        """Rows of ``half_rows`` per block."""
        return self.layers_per_group * 2
