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


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """A chunk of a request, and those of its blocks that take part in a transfer.

    Attributes:
        index: number of the chunk in its group, from the start of the request.
        positions: places inside the chunk, ascending.
        block_ids: the device blocks there, parallel to ``positions``.
    """

    index: int
    positions: tuple[int, ...]
    block_ids: tuple[int, ...]


def chunks_to_load(
    group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, num_computed_tokens: int, num_hit_tokens: int
) -> list[ChunkBlocks]:
    """The chunks that fill a group's blocks between what is computed and the end of the hit. Null blocks need nothing.

    Args:
        table: block ids of the request.
        num_computed_tokens: leading tokens that are on the device.
        num_hit_tokens: leading tokens that will be after the load.
    """
    first, end = num_computed_tokens // group.block_tokens, num_hit_tokens // group.block_tokens
    return list(_by_chunk(table, range(first, end), blocks_per_chunk))


def chunks_to_store(
    group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, first_chunk: int, end_chunk: int
) -> list[ChunkBlocks]:
    """The chunks in ``[first_chunk, end_chunk)`` that can be stored.

    A chunk is left out if a block is null that a later request could need: its KV is gone. In a window group the blocks before
    what the chunk's last token sees are never needed, so they may be null; they are not copied.
    """
    chunks: list[ChunkBlocks] = []
    for index in range(first_chunk, end_chunk):
        start, end = index * blocks_per_chunk, (index + 1) * blocks_per_chunk
        needed_from = group.num_skipped_tokens(end * group.block_tokens - 1) // group.block_tokens
        if NULL_BLOCK_ID not in table[max(start, needed_from) : end]:
            chunks += _by_chunk(table, range(start, end), blocks_per_chunk)
    return chunks


def chunk_rows(chunk: ChunkBlocks, slot: int, blocks_per_chunk: int) -> Iterator[int]:
    """The tier's rows for a chunk's blocks."""
    return (slot * blocks_per_chunk + position for position in chunk.positions)


def _by_chunk(table: Sequence[int], blocks: range, blocks_per_chunk: int) -> Iterator[ChunkBlocks]:
    for index in range(blocks.start // blocks_per_chunk, -(-blocks.stop // blocks_per_chunk)):
        start = index * blocks_per_chunk
        kept = [
            at
            for at in range(max(blocks.start, start), min(blocks.stop, start + blocks_per_chunk))
            if table[at] != NULL_BLOCK_ID
        ]
        if kept:
            yield ChunkBlocks(index, tuple(at - start for at in kept), tuple(table[at] for at in kept))
