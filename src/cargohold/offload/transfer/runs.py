"""Runs of neighbouring blocks and rows, which can be copied at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def consecutive_runs(block_ids: Sequence[int], rows: Sequence[int], max_length: int) -> Iterator[tuple[int, int, int]]:
    """Cut parallel sequences into runs in which both count up by one, so that each run is one copy.

    Yields:
        First block, first row, and length; at most ``max_length`` long.
    """
    start = 0
    for at in range(1, len(block_ids) + 1):
        if (
            at == len(block_ids)
            or at - start == max_length
            or block_ids[at] != block_ids[at - 1] + 1
            or rows[at] != rows[at - 1] + 1
        ):
            yield block_ids[start], rows[start], at - start
            start = at
