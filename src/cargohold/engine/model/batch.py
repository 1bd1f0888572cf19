"""Paged KV memory, and a step's index tensors over it. All index arithmetic is here.

All tokens of a step lie in one row, request after request. Requests with one token (decoding) are attended to together, in
batches of similar length. Longer ones (prefill) are attended to one by one, in tiles of queries, so that a mask never exceeds
one tile and nothing far above the diagonal is computed::

    keys ->      prefix        this step
    queries   |###########|\\            |   tile 0
              |###########|##\\          |
              |###########|####\\        |   tile 1
              |###########|######\\      |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cargohold.engine.core.request import ScheduledTokens, SchedulerStep
from cargohold.protocol import KVCacheGroup, KVCacheLayout
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


Int64Array = npt.NDArray[np.int64]
QUERY_TILE = 512


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of one request that share a mask.

    Attributes:
        rows: their rows in the batch.
        keys: the keys they may see, within the request's gathered keys.
        mask: additive, shape ``(queries, keys)``; ``None`` if the pattern is exactly causal.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request with several tokens.

    Attributes:
        half_rows: rows of ``PagedKV.half_rows`` with its keys in layer slot 0; shape ``(blocks,)``.
        tiles: its queries.
    """

    half_rows: torch.Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Decodes:
    """Requests with one token each, padded to the same number of blocks.

    Attributes:
        rows: their rows in the batch; shape ``(requests,)``.
        half_rows: rows of ``PagedKV.half_rows`` with their keys in layer slot 0, request after request. Padding reads the
            request's last block again: the content of another block is unknown. Shape ``(requests * blocks,)``.
        num_blocks: blocks per request.
        mask: additive, shape ``(requests, 1, 1, blocks * block_tokens)``.
    """

    rows: torch.Tensor
    half_rows: torch.Tensor
    num_blocks: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Index tensors that the layers of one KV-cache group need for a step.

    Attributes:
        write_rows: rows of ``PagedKV.token_rows`` where the tokens' keys go, in layer slot 0.
        written: rows of the batch that are written; ``None`` for all. The others' KV is in place already.
        unwritten_rows: rows of ``PagedKV.token_rows`` in layer slot 0, of keys and of values, that lie after the last token
            in a block that a request enters with this step; ``None`` if there are none. They must be set to zero: masks hide
            them, but a mask is added to numbers, and does not hide those that are not finite.
        num_layers: layers of the group.
        prefills: requests with several tokens.
        decodes: requests with one.
    """

    write_rows: torch.Tensor
    written: torch.Tensor | None
    unwritten_rows: torch.Tensor | None
    num_layers: int
    prefills: tuple[Prefill, ...]
    decodes: tuple[Decodes, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass.

    Attributes:
        token_ids: shape ``(1, tokens)``.
        positions: shape ``(1, tokens)``.
        sample_rows: rows whose logits are needed, in the order of ``sampled``.
        sampled: the shares that get a token.
        groups: per KV-cache group.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    sampled: tuple[ScheduledTokens, ...]
    groups: tuple[GroupBatch, ...]


def build_batch(step: SchedulerStep, groups: Sequence[KVCacheGroup], kv: PagedKV) -> Batch:
    """Lay the step's requests out in one row and compute where their KV is."""
    device = kv.storage.device
    shares = step.scheduled
    starts = np.cumsum([0] + [share.num_scheduled_tokens for share in shares])
    sampled = [at for at, share in enumerate(shares) if share.sample is not None]
    positions = np.concatenate(
        [np.arange(s.num_computed_tokens, s.num_computed_tokens + s.num_scheduled_tokens) for s in shares]
    )
    token_ids = np.concatenate([np.asarray(share.token_ids, dtype=np.int64) for share in shares])
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device).unsqueeze(0),
        positions=torch.from_numpy(positions).to(device).unsqueeze(0),
        sample_rows=torch.tensor([int(starts[at + 1]) - 1 for at in sampled], device=device, dtype=torch.int64),
        sampled=tuple(shares[at] for at in sampled),
        groups=tuple(_GroupBuilder(group, shares, starts, kv).build(positions) for group in groups),
    )


class _GroupBuilder:
    """Builds one group's part of a batch."""

    def __init__(self, group: KVCacheGroup, shares: Sequence[ScheduledTokens], starts: Int64Array, kv: PagedKV) -> None:
        self._group = group
        self._shares = shares
        self._starts = starts
        self._kv = kv
        self._device = kv.storage.device
        self._dtype = kv.token_rows.dtype
        self._tables = [np.asarray(share.block_ids[group.index], dtype=np.int64) for share in shares]

    def build(self, positions: Int64Array) -> GroupBatch:
        """Build it. ``positions`` are those of the whole row."""
        write_rows, written = self._writes(positions)
        unwritten_rows = self._unwritten_rows()
        return GroupBatch(
            write_rows=torch.from_numpy(write_rows).to(self._device),
            written=None if written is None else torch.from_numpy(written).to(self._device),
            unwritten_rows=torch.from_numpy(unwritten_rows).to(self._device) if len(unwritten_rows) else None,
            num_layers=len(self._group.layer_names),
            prefills=tuple(self._prefill(at) for at, s in enumerate(self._shares) if s.num_scheduled_tokens > 1),
            decodes=tuple(self._decodes()),
        )

    def _writes(self, positions: Int64Array) -> tuple[Int64Array, Int64Array | None]:
        block_tokens = self._kv.block_tokens
        blocks = np.concatenate(
            [
                table[positions[start:end] // block_tokens]
                for table, start, end in zip(self._tables, self._starts, self._starts[1:], strict=False)
            ]
        )
        rows = blocks * (self._kv.block_stride * block_tokens) + positions % block_tokens
        if all(share.write_from <= share.num_computed_tokens for share in self._shares):
            return rows, None
        write_from = np.repeat([share.write_from for share in self._shares], np.diff(self._starts))
        written = np.flatnonzero(positions >= write_from)
        return rows[written], written

    def _unwritten_rows(self) -> Int64Array:
        block_tokens = self._kv.block_tokens
        places = []
        for table, share in zip(self._tables, self._shares, strict=True):
            end = share.num_computed_tokens + share.num_scheduled_tokens
            num_filled = end % block_tokens
            if num_filled and (share.is_first or num_filled <= share.num_scheduled_tokens):
                first = table[end // block_tokens] * (self._kv.block_stride * block_tokens)
                places.append(first + np.arange(num_filled, block_tokens))
        if not places:
            return np.empty(0, dtype=np.int64)
        keys = np.concatenate(places)
        return np.concatenate((keys, keys + block_tokens))

    def _first_block(self, num_computed_tokens: int) -> int:
        return self._group.num_skipped_tokens(num_computed_tokens) // self._kv.block_tokens

    def _prefill(self, at: int) -> Prefill:
        share = self._shares[at]
        row, start, count = int(self._starts[at]), share.num_computed_tokens, share.num_scheduled_tokens
        first_block = self._first_block(start)
        num_blocks = -(-(start + count) // self._kv.block_tokens)
        first_key = first_block * self._kv.block_tokens
        tiles = []
        for low, high in self._tile_bounds(start, start + count):
            # Keys before the first query's window are seen by none of the tile's queries.
            seen_from = max(first_key, self._group.num_skipped_tokens(low))
            tiles.append(
                Tile(
                    rows=slice(row + low - start, row + high - start),
                    keys=slice(seen_from - first_key, high - first_key),
                    mask=self._tile_mask(low, high, seen_from),
                )
            )
        blocks = self._tables[at][first_block:num_blocks] * self._kv.block_stride
        return Prefill(torch.from_numpy(blocks).to(self._device), tuple(tiles))

    def _tile_bounds(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        if start == 0 and self._is_causal(end):
            yield start, end  # the kernel skips what is above the diagonal by itself
            return
        for low in range(start, end, QUERY_TILE):
            yield low, min(low + QUERY_TILE, end)

    def _is_causal(self, num_tokens: int) -> bool:
        return self._group.num_skipped_tokens(num_tokens - 1) == 0

    def _tile_mask(self, low: int, high: int, seen_from: int) -> torch.Tensor | None:
        if low == seen_from and self._is_causal(high):
            return None
        queries = torch.arange(low, high, device=self._device).unsqueeze(1)
        keys = torch.arange(seen_from, high, device=self._device).unsqueeze(0)
        hidden = keys > queries
        if self._group.window_tokens is not None:
            hidden |= keys <= queries - self._group.window_tokens
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _decodes(self) -> Iterator[Decodes]:
        by_size: dict[int, list[int]] = defaultdict(list)
        for at, share in enumerate(self._shares):
            if share.num_scheduled_tokens == 1:
                # Requests within a factor of two of each other are padded to the longest of them.
                by_size[self._num_seen_blocks(share).bit_length()].append(at)
        for members in by_size.values():
            yield self._decode_batch(members)

    def _num_seen_blocks(self, share: ScheduledTokens) -> int:
        return share.num_computed_tokens // self._kv.block_tokens + 1 - self._first_block(share.num_computed_tokens)

    def _decode_batch(self, members: Sequence[int]) -> Decodes:
        block_tokens = self._kv.block_tokens
        num_blocks = max(self._num_seen_blocks(self._shares[at]) for at in members)
        half_rows = np.empty((len(members), num_blocks), dtype=np.int64)
        mask = np.full((len(members), num_blocks * block_tokens), -np.inf, dtype=np.float32)
        for row, at in enumerate(members):
            query = self._shares[at].num_computed_tokens
            first = self._first_block(query)
            blocks = self._tables[at][first : query // block_tokens + 1]
            half_rows[row, : len(blocks)] = blocks * self._kv.block_stride
            half_rows[row, len(blocks) :] = blocks[-1] * self._kv.block_stride
            offset = first * block_tokens
            mask[row, self._group.num_skipped_tokens(query) - offset : query + 1 - offset] = 0
        return Decodes(
            rows=torch.from_numpy(self._starts[np.asarray(members)]).to(self._device),
            half_rows=torch.from_numpy(half_rows.reshape(-1)).to(self._device),
            num_blocks=num_blocks,
            mask=torch.from_numpy(mask).to(device=self._device, dtype=self._dtype)[:, None, None, :],
        )
