"""Which chunks to load and to store, and where their blocks are: pure functions over plain data.

A chunk is ``k = blocks_per_chunk`` consecutive blocks of one group. A tier has a slot per chunk; block ``i`` of the chunk in
slot ``s`` is the tier's row ``s * k + i``::

    blocks of the request    0   1 | 2   3 | 4   5 | 6          k = 2
    computed on the device   x   x   x |
    hit in the tier                  :   chunk 1, chunk 2       the first destination lies inside chunk 1
    destinations                     3 | 4   5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cargohold.protocol import NULL_BLOCK_ID, KVCacheGroup


class BlocksToStore(NamedTuple):
    """Chunks of one group of a request, and the blocks to copy. Columns, not one object per chunk: a prompt has hundreds.

    Attributes:
        chunks: numbers of the chunks in the group, ascending.
        block_ids: ids of the device blocks, ``blocks_per_chunk`` for each chunk; null where nothing is copied.
    """

    chunks: Sequence[int]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlocksToLoad:
    """The blocks of one group that a load fills. Columns, not one object per block: a long prompt has thousands.

    Attributes:
        numbers: numbers of the blocks in the request's block table of the group, from 0.
        block_ids: ids of the device blocks, parallel to ``numbers``.
        chunks: numbers of the chunks that contain these blocks, each once.
    """

    numbers: Sequence[int]
    block_ids: Sequence[int]
    chunks: Sequence[int]


def blocks_to_load(
    table: Sequence[int], block_tokens: int, blocks_per_chunk: int, num_computed_tokens: int, num_hit_tokens: int
) -> BlocksToLoad:
    """Return a group's blocks between the computed tokens and the end of the hit. Null blocks are left out.

    Args:
        table: block ids of the request in the group.
        block_tokens: tokens per block of the group.
        blocks_per_chunk: blocks per chunk.
        num_computed_tokens: number of leading tokens that are on the device.
        num_hit_tokens: number of leading tokens that will be on the device after the load.
    """
    numbers: Sequence[int] = range(num_computed_tokens // block_tokens, num_hit_tokens // block_tokens)
    block_ids = table[numbers[0] : numbers[-1] + 1] if numbers else ()
    if NULL_BLOCK_ID in block_ids:
        numbers = [number for number in numbers if table[number] != NULL_BLOCK_ID]
        block_ids = [table[number] for number in numbers]
    if blocks_per_chunk == 1:
        return BlocksToLoad(numbers, block_ids, numbers)
    return BlocksToLoad(numbers, block_ids, list(dict.fromkeys(number // blocks_per_chunk for number in numbers)))


def rows_to_load(blocks: BlocksToLoad, slots: Sequence[int], blocks_per_chunk: int) -> Sequence[int]:
    """Return the tier's row for each of ``blocks``; ``slots`` are those of their chunks, parallel to ``blocks.chunks``."""
    if blocks_per_chunk == 1:
        return slots
    slot_of = dict(zip(blocks.chunks, slots, strict=True))
    return [
        slot_of[number // blocks_per_chunk] * blocks_per_chunk + number % blocks_per_chunk for number in blocks.numbers
    ]


def blocks_to_store(
    group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, first_chunk: int, end_chunk: int
) -> BlocksToStore:
    """Return the chunks in ``[first_chunk, end_chunk)`` that can be stored.

    A chunk is left out if one of its blocks that a later request could need is null: its KV is gone. In a window group, blocks
    before the window of the chunk's last token are never needed, so they may be null; null blocks are not copied.
    """
    block_ids = table[first_chunk * blocks_per_chunk : end_chunk * blocks_per_chunk]
    if NULL_BLOCK_ID not in block_ids:
        return BlocksToStore(range(first_chunk, end_chunk), block_ids)
    chunks: list[int] = []
    kept: list[int] = []
    for chunk in range(first_chunk, end_chunk):
        start, end = chunk * blocks_per_chunk, (chunk + 1) * blocks_per_chunk
        needed_from = group.num_skipped_tokens(end * group.block_tokens - 1) // group.block_tokens
        if NULL_BLOCK_ID not in table[max(start, needed_from) : end]:
            chunks.append(chunk)
            kept += table[start:end]
    return BlocksToStore(chunks, kept)


def rows_to_store(
    block_ids: Sequence[int], starts: Sequence[int], slots: Sequence[int], blocks_per_chunk: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the device blocks to copy for some chunks, and the tier's row for each. Null blocks are left out.

    Args:
        block_ids: ids of device blocks.
        starts: for each chunk, where in ``block_ids`` its ``blocks_per_chunk`` blocks begin.
        slots: the slots of the chunks, parallel to ``starts``.
        blocks_per_chunk: blocks per chunk.
    """
    if blocks_per_chunk == 1:
        return tuple([block_ids[start] for start in starts]), tuple(slots)
    copies = [
        (block_id, slot * blocks_per_chunk + at)
        for start, slot in zip(starts, slots, strict=True)
        for at, block_id in enumerate(block_ids[start : start + blocks_per_chunk])
        if block_id != NULL_BLOCK_ID
    ]
    return tuple([block_id for block_id, _ in copies]), tuple([row for _, row in copies])
