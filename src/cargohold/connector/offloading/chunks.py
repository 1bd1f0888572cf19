"""Which chunks to load and to store, and where their blocks are: pure functions over plain data.

A chunk is ``k = blocks_per_chunk`` consecutive blocks of one group. A tier has a slot per chunk; block ``i`` of the chunk in
slot ``s`` is the tier's row ``s * k + i``::

    blocks of the request    0   1 | 2   3 | 4   5 | 6          k = 2
    computed on the device   x   x   x |
    hit in the tier                  :   chunk 1, chunk 2       the first destination lies inside chunk 1
    destinations                     3 | 4   5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cargohold.protocol import NULL_BLOCK_ID, KVCacheGroup

_FIRST = (0,)


@dataclass(slots=True)  # a frozen dataclass takes three times as long to create
class ChunkBlocks:
    """A chunk of a request, and those of its blocks that are stored.

    Attributes:
        index: number of the chunk in its group, from the start of the request.
        positions: positions of these blocks inside the chunk, ascending.
        block_ids: ids of the device blocks, parallel to ``positions``.
    """

    index: int
    positions: tuple[int, ...]
    block_ids: tuple[int, ...]


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


def chunks_to_store(
    group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, first_chunk: int, end_chunk: int
) -> list[ChunkBlocks]:
    """Return the chunks in ``[first_chunk, end_chunk)`` that can be stored.

    A chunk is left out if one of its blocks that a later request could need is null: its KV is gone. In a window group, blocks
    before the window of the chunk's last token are never needed, so they may be null; null blocks are not copied.
    """
    if blocks_per_chunk == 1:
        blocks = zip(range(first_chunk, end_chunk), table[first_chunk:end_chunk], strict=True)
        return [ChunkBlocks(index, _FIRST, (block_id,)) for index, block_id in blocks if block_id != NULL_BLOCK_ID]
    chunks: list[ChunkBlocks] = []
    for index in range(first_chunk, end_chunk):
        start, end = index * blocks_per_chunk, (index + 1) * blocks_per_chunk
        needed_from = group.num_skipped_tokens(end * group.block_tokens - 1) // group.block_tokens
        if NULL_BLOCK_ID not in table[max(start, needed_from) : end]:
            kept = [at for at in range(start, end) if table[at] != NULL_BLOCK_ID]
            if kept:
                positions, block_ids = [at - start for at in kept], [table[at] for at in kept]
                chunks.append(ChunkBlocks(index, tuple(positions), tuple(block_ids)))
    return chunks


def chunk_rows(chunk: ChunkBlocks, slot: int, blocks_per_chunk: int) -> Iterator[int]:
    """Yield the tier's row for each of a chunk's stored blocks."""
    return (slot * blocks_per_chunk + position for position in chunk.positions)
