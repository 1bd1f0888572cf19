"""Attention over paged KV, behind Hugging Face transformers' attention interface.

It is registered once under ``PAGED_ATTENTION``. A model set to it hands every layer's queries, keys and values to
``paged_attention``, which writes the new keys and values into their blocks, gathers those that each query may see, and lets
PyTorch's ``scaled_dot_product_attention`` do the rest. So any decoder that uses the interface is served without code of ours
per model. Attention is the only place where requests of a step are kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cargohold.engine.executor import LayerHooks
from cargohold.engine.model.batch import Batch, Decodes, GroupBatch, PagedKV, Prefill
from cargohold.engine.model.info import layer_name

PAGED_ATTENTION = "cargohold_paged"


class Workspace:
    """Room for one layer's gathered keys and values of one attention call, reused so that no page is faulted in twice."""

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        self._buffers = kv.half_rows.new_empty((2, 0, kv.half_rows.shape[1]))

    def gather(self, half_rows: torch.Tensor, layer_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the given blocks in one layer; shape ``(blocks, block_tokens * heads * head_dim)`` each.

        They are overwritten by the next call.
        """
        num_rows = half_rows.shape[0]
        if num_rows > self._buffers.shape[1]:
            self._buffers = self._buffers.new_empty((2, num_rows + num_rows // 4, self._buffers.shape[2]))
        key_rows = half_rows + 2 * layer_slot
        keys, values = self._buffers[0, :num_rows], self._buffers[1, :num_rows]
        torch.index_select(self._kv.half_rows, 0, key_rows, out=keys)
        torch.index_select(self._kv.half_rows, 0, key_rows + 1, out=values)
        return keys, values


class PagedForward:
    """One forward pass over paged KV, handed to every layer's attention.

    Args:
        kv: the KV memory; written.
        batch: where the step's tokens and their KV are.
        layer_places: per layer, its group and its slot in the group's blocks.
        workspace: scratch memory.
        hooks: called around every layer, or ``None``.
    """

    def __init__(
        self,
        kv: PagedKV,
        batch: Batch,
        layer_places: tuple[tuple[int, int], ...],
        workspace: Workspace,
        hooks: LayerHooks | None,
    ) -> None:
        self._kv = kv
        self._batch = batch
        self._layer_places = layer_places
        self._workspace = workspace
        self._hooks = hooks

    def attend(
        self,
        layer: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """One layer's attention.

        Args:
            layer: index of the layer.
            qkv: queries, shape ``(1, query_heads, tokens, head_dim)``; keys and values, shape
                ``(1, heads, tokens, head_dim)``, which are written to the layer's blocks.
            scale: factor on the scores.
            options: further options that the model passes to attention. They are ignored: ``probe`` has found that they can be.

        Returns:
            Shape ``(1, tokens, query_heads, head_dim)``.
        """
        del options
        query, key, value = qkv
        group, slot = self._layer_places[layer]
        batch = self._batch.groups[group]
        if self._hooks is not None:
            self._hooks.wait_for_layer_load(layer_name(layer))
        self._write(batch, slot, key, value)
        if self._hooks is not None:
            self._hooks.save_kv_layer(layer_name(layer))
        queries = query[0].transpose(0, 1)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for decodes in batch.decodes:
            self._decode(decodes, slot, queries, out, scale)
        for prefill in batch.prefills:
            self._prefill(prefill, slot, query, out, scale)
        return out.unsqueeze(0)

    def _write(self, batch: GroupBatch, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key_rows = batch.write_rows + 2 * slot * self._kv.block_tokens
        for rows, numbers in ((key_rows, key), (key_rows + self._kv.block_tokens, value)):
            tokens = numbers[0].transpose(0, 1).reshape(numbers.shape[2], -1)
            if batch.written is not None:
                tokens = tokens[batch.written]
            self._kv.token_rows.index_copy_(0, rows, tokens)
        if batch.unwritten_rows is not None:
            self._kv.token_rows.index_fill_(0, batch.unwritten_rows + 2 * slot * self._kv.block_tokens, 0)

    def _decode(
        self, decodes: Decodes, slot: int, queries: torch.Tensor, out: torch.Tensor, scale: float | None
    ) -> None:
        num_heads, head_dim = self._kv.num_heads, self._kv.head_dim
        shape = (decodes.rows.shape[0], decodes.num_blocks * self._kv.block_tokens, num_heads, head_dim)
        keys, values = self._workspace.gather(decodes.half_rows, slot)
        # The query heads that share a key head become that head's queries: no key is repeated.
        grouped = queries[decodes.rows].view(shape[0], num_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            grouped,
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=decodes.mask,
            scale=scale,
        )
        out[decodes.rows] = attended.reshape(shape[0], -1, head_dim)

    def _prefill(
        self, prefill: Prefill, slot: int, query: torch.Tensor, out: torch.Tensor, scale: float | None
    ) -> None:
        shape = (-1, self._kv.num_heads, self._kv.head_dim)
        keys, values = (
            gathered.view(shape).transpose(0, 1).unsqueeze(0)
            for gathered in self._workspace.gather(prefill.half_rows, slot)
        )
        for tile in prefill.tiles:
            attended = scaled_dot_product_attention(
                query[:, :, tile.rows],
                keys[:, :, tile.keys],
                values[:, :, tile.keys],
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
                scale=scale,
                enable_gqa=True,
            )
            out[tile.rows] = attended[0].transpose(0, 1)


def paged_attention(  # the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged_forward: PagedForward,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, as transformers calls it; see ``PagedForward.attend``."""
    # Paged batches have masks of their own, and ``_no_mask`` has given the model none. A mask here is one that the model made
    # by itself: an option that cannot be ignored, and that the probe refuses.
    options["attention_mask"] = attention_mask
    return paged_forward.attend(_layer_index(module), (query, key, value), scaling, options), None


def register_paged_attention() -> None:
    """Make ``PAGED_ATTENTION`` known to transformers. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  # slow to import

    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    AttentionMaskInterface.register(PAGED_ATTENTION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask for the whole row: requests are kept apart in ``paged_attention``."""


def _layer_index(module: torch.nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index
