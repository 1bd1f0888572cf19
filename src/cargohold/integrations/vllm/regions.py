"""The paged KV's tensors as plain bytes: one row per block, nothing copied.

vLLM hands over one tensor per layer, shaped and strided as its attention backend likes it. Whatever the order of layers,
heads, and keys and values in memory, the bytes of block ``b`` are those of block 0, ``b`` strides further on::

    storage   |..A0....|..A1....|..A2....| ... |..B0....|..B1....| ...        A, B: layers; 0, 1, 2: blocks
                 |<-------->| block stride
              offset |<-->| width

A region is such a row of pieces. Layers of different groups lie over each other, and neighbouring pieces of one block are
one region, so that copies are few and large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Where a contiguous part of every block lies.

    Attributes:
        storage: which allocation, counted in the order of layers. Addresses would say it too, but in another order after a
            restart, when a tier's chunks are read again.
        block_stride: bytes from one block to the next.
        offset: byte in the allocation where block 0's part starts.
        width: its bytes.
    """

    storage: int
    block_stride: int
    offset: int
    width: int

    @property
    def end(self) -> int:
        """Byte after block 0's part."""
        return self.offset + self.width


def regions_of(kv_caches: Mapping[str, Any], num_blocks: int) -> list[torch.Tensor]:
    """Two-dimensional ``uint8`` views of shape ``(num_blocks, width)`` that together hold every block.

    Their order is the same after a restart.

    Args:
        kv_caches: what vLLM registers: per layer a tensor, or several for layers with several states.
        num_blocks: blocks of the pool.

    Raises:
        ValueError: a tensor has no dimension that counts blocks.
    """
    tensors = [tensor for kv_cache in kv_caches.values() for tensor in _tensors(kv_cache)]
    storages = {_address(tensor): tensor for tensor in tensors}
    numbers = {address: number for number, address in enumerate(storages)}
    pieces = [piece for tensor in tensors for piece in pieces_of(tensor, num_blocks, numbers[_address(tensor)])]
    in_order = list(storages.values())
    return [_view(in_order[piece.storage], piece, num_blocks) for piece in merge(pieces)]


def arrangement_of(kv_caches: Mapping[str, Any], num_blocks: int) -> str:
    """How the inside of a block is arranged, for people and to be compared: whatever regions, which are bytes, do not show.

    Args:
        kv_caches: as for ``regions_of``.
        num_blocks: blocks of the pool; another number of them arranges nothing otherwise.
    """
    tensors = {tensor for kv_cache in kv_caches.values() for tensor in _tensors(kv_cache)}
    return " and ".join(sorted({_arrangement(tensor, num_blocks) for tensor in tensors}))


def _arrangement(tensor: torch.Tensor, num_blocks: int) -> str:
    """A tensor's dimensions that are more than 1 within a block, by number and size, in the order in which they lie."""
    at = _block_dimension(tensor.shape, num_blocks)
    sizes = [size // num_blocks if dim == at else size for dim, size in enumerate(tensor.shape)]
    strides = tensor.stride()
    dims = sorted((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: (-strides[dim], dim))
    return f"{str(tensor.dtype).removeprefix('torch.')} {' '.join(f'{dim}:{sizes[dim]}' for dim in dims)}"


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Unite pieces that touch or overlap."""
    merged: list[Piece] = []
    for piece in sorted(set(pieces)):
        last = merged[-1] if merged else None
        is_same_row = last is not None and (last.storage, last.block_stride) == (piece.storage, piece.block_stride)
        if last is not None and is_same_row and piece.offset <= last.end:
            merged[-1] = replace(last, width=max(last.end, piece.end) - last.offset)
        else:
            merged.append(piece)
    return merged


def pieces_of(tensor: torch.Tensor, num_blocks: int, storage: int) -> list[Piece]:
    """The contiguous parts of a block in one tensor, whose allocation has the number ``storage``."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    at = _block_dimension(tensor.shape, num_blocks)
    # An attention kernel may see a block as several smaller ones, one after the other.
    ratio = tensor.shape[at] // num_blocks
    inner = [(ratio, strides[at])]
    inner += [(tensor.shape[dim], strides[dim]) for dim in range(tensor.dim()) if dim != at]
    width, outer = _contiguous(inner, size)
    start = int(tensor.storage_offset()) * size
    return [
        Piece(storage, strides[at] * ratio, start + sum(steps), width)
        for steps in itertools.product(*([step * stride for step in range(count)] for count, stride in outer))
    ]


def _contiguous(dimensions: Sequence[tuple[int, int]], width: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the longest contiguous run, and the dimensions that repeat it; a dimension is a size and a stride."""
    outer: list[tuple[int, int]] = []
    for count, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if count == 1:
            continue
        if stride == width and not outer:
            width *= count
        else:
            outer.append((count, stride))
    return width, outer


def _block_dimension(shape: Sequence[int], num_blocks: int) -> int:
    """Blocks come first, or second, after keys and values."""
    for at in (0, 1):
        if at < len(shape) and shape[at] >= num_blocks and shape[at] % num_blocks == 0:
            return at
    raise ValueError(f"a KV tensor of shape {tuple(shape)} does not say where its {num_blocks} blocks are")


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _tensors(kv_cache: Any) -> list[torch.Tensor]:
    return [kv_cache] if isinstance(kv_cache, torch.Tensor) else list(kv_cache)


def _view(tensor: torch.Tensor, piece: Piece, num_blocks: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.as_strided((num_blocks, piece.width), (piece.block_stride, 1), piece.offset)
