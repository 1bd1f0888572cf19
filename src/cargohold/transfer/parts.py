"""Parts of blocks that are as long as a row: the paged KV, for copies row by row.

Each group's blocks are cut from the front; the last part ends with the block, so it may overlap the one before it, and what
they have in common is copied twice::

    a block of 3 rows    |.......................|
    its parts            |---0----|---1----|
                                   |---2----|

All parts with the same number, of the blocks of one group, are a *view*: regions like those of the whole paged KV, only as wide
as a row. Views lie one after the other in the numbers of parts, with a gap, so that no run of neighbours goes over an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any


def span_of(regions: Sequence[Any]) -> int:
    """Return how many numbers a view takes, the gap after it included."""
    return int(regions[0].shape[0]) + 1


def parts_of(
    kv_caches: Sequence[Sequence[Any]], rows_per_block: Sequence[int], row_bytes: int
) -> tuple[list[list[Any]], Callable[[int, int, int], int]]:
    """Return all views, and what tells the number of a part by its group, its block, and its place in the block.

    Args:
        kv_caches: the regions of each group: two-dimensional byte tensors or arrays.
        rows_per_block: rows of a block, by group.
        row_bytes: bytes of a row.

    Raises:
        ValueError: the rows are too short for the blocks of a group, or longer than these.
    """
    views = [
        list(_cut(regions, start, row_bytes))
        for regions, count in zip(kv_caches, rows_per_block, strict=True)
        for start in _starts(sum(region.shape[1] for region in regions), count, row_bytes)
    ]
    first = list(accumulate(rows_per_block, initial=0))
    span = span_of(kv_caches[0])
    return views, lambda group, block_id, at: (first[group] + at) * span + block_id


def _starts(width: int, count: int, row_bytes: int) -> list[int]:
    if not row_bytes <= width <= count * row_bytes:
        raise ValueError(f"a block of {width} bytes does not fit into {count} rows of {row_bytes}")
    return [min(at * row_bytes, width - row_bytes) for at in range(count)]


def _cut(regions: Sequence[Any], start: int, length: int) -> Iterator[Any]:
    """Yield what lies in ``[start, start + length)`` of each block."""
    at = 0
    for region in regions:
        first, end = max(start - at, 0), min(start + length - at, region.shape[1])
        if first < end:
            yield region[:, first:end]
        at += region.shape[1]
