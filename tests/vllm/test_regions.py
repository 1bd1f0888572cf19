"""Blocks as rows of bytes, whatever the shape and order of the tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest
import torch

from cargohold.integrations.vllm.regions import arrangement_of, regions_of

NUM_BLOCKS = 5

Caches: TypeAlias = Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]]


def block_first() -> tuple[Caches, int]:
    """One allocation; every layer is a strided view of it, blocks outermost."""
    storage = torch.zeros(NUM_BLOCKS, 3, 2, 4, 8)
    return {f"layer{at}": storage[:, at] for at in range(3)}, 3 * 2 * 4 * 8 * 4


def keys_and_values_first() -> tuple[Caches, int]:
    """An allocation per layer, keys and values in halves of it."""
    return {f"layer{at}": torch.zeros(2, NUM_BLOCKS, 4, 8) for at in range(3)}, 3 * 2 * 4 * 8 * 4


def heads_before_tokens() -> tuple[Caches, int]:
    """Shown as (block, token, head), kept as (block, head, token)."""
    return {"layer": torch.zeros(NUM_BLOCKS, 2, 4, 8).transpose(1, 2)}, 2 * 4 * 8 * 4


def kernel_blocks() -> tuple[Caches, int]:
    """A kernel that sees each block as four smaller ones."""
    return {"layer": torch.zeros(NUM_BLOCKS * 4, 4, 8)}, 4 * 4 * 8 * 4


def overlapping_groups() -> tuple[Caches, int]:
    """Layers of two groups over the same bytes, one of them padded."""
    storage = torch.zeros(NUM_BLOCKS, 64)
    return {"full": storage, "state": storage[:, :40]}, 64 * 4


def several_states() -> tuple[Caches, int]:
    """A layer with two states in one page."""
    storage = torch.zeros(NUM_BLOCKS, 64)
    return {"layer": (storage[:, :16], storage[:, 16:64])}, 64 * 4


@pytest.mark.parametrize(
    "make",
    [block_first, keys_and_values_first, heads_before_tokens, kernel_blocks, overlapping_groups, several_states],
)
def test_regions_hold_every_byte_of_a_block_once_and_no_other(
    make: Callable[[], tuple[Caches, int]],
) -> None:
    kv_caches, block_bytes = make()
    regions = regions_of(kv_caches, NUM_BLOCKS)
    assert sum(region.shape[1] for region in regions) == block_bytes
    for region in regions:
        assert region.shape[0] == NUM_BLOCKS
        region[2] = 1
    tensors = [tensor for cache in kv_caches.values() for tensor in (cache if isinstance(cache, tuple) else (cache,))]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    assert sum(_num_ones(tensor) for tensor in storages.values()) == block_bytes
    for tensor in tensors:
        blocks = tensor.movedim(1, 0) if tensor.shape[0] == 2 else tensor.reshape(NUM_BLOCKS, -1)
        assert blocks[2].ne(0).all()
        assert blocks[[0, 1, 3, 4]].eq(0).all()


def test_neighbours_become_one_region() -> None:
    assert len(regions_of(block_first()[0], NUM_BLOCKS)) == 1
    assert len(regions_of(keys_and_values_first()[0], NUM_BLOCKS)) == 6


def test_regions_come_in_the_order_of_layers_wherever_these_lie() -> None:
    layers = [torch.zeros(NUM_BLOCKS, 8) for _ in range(4)]
    for order in (layers, layers[::-1]):
        regions = regions_of({f"layer{at}": layer for at, layer in enumerate(order)}, NUM_BLOCKS)
        for at, (layer, region) in enumerate(zip(order, regions, strict=True)):
            layer.fill_(at + 1)
            assert region.view(torch.float32).eq(at + 1).all()


def test_the_inside_of_a_block_is_told_apart_whatever_the_pool() -> None:
    """Found by reading: another order within a block, or smaller blocks for the kernel, were found as the same KV."""

    def heads_outermost(num_blocks: int) -> torch.Tensor:
        return torch.zeros(2, num_blocks, 4, 8).movedim(0, 1)

    plain = torch.zeros(NUM_BLOCKS, 2, 4, 8)
    tensors = [
        plain,
        torch.zeros(NUM_BLOCKS, 4, 2, 8).transpose(1, 2),  # tokens before heads
        torch.zeros(2 * NUM_BLOCKS, 2, 2, 8),  # a kernel that sees two blocks
        plain.half(),
        torch.zeros(NUM_BLOCKS, 4, 2, 8),
    ]
    arranged = [arrangement_of({"layer": tensor}, NUM_BLOCKS) for tensor in tensors]
    assert len(set(arranged)) == len(arranged)
    assert arrangement_of({"0": plain, "1": plain.clone()}, NUM_BLOCKS) == arranged[0] == "float32 1:2 2:4 3:8"
    for make in (heads_outermost, lambda num_blocks: torch.zeros(num_blocks, 3, 2, 4, 8)[:, 1]):
        few, many = (arrangement_of({"layer": make(count)}, count) for count in (NUM_BLOCKS, 9))
        assert few == many


def test_a_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say where its 5 blocks are"):
        regions_of({"layer": torch.zeros(3, 7)}, NUM_BLOCKS)


def _num_ones(tensor: torch.Tensor) -> int:
    """Sum of all bytes of a tensor's allocation."""
    return int(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).sum())
