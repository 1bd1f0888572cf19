"""Stamps of recency, leaf first."""

from __future__ import annotations

from typing import Final

import numpy as np

from cargohold.offload.policy.oldest_first import ABSENT, Stamps

_SPACING: Final = 1 << 20
"""Between operations, so that chunks stored later fit in behind those of the same prefix. No prefix has more chunks."""


class StampClock:
    """Gives stamps. Later operations give larger ones; within one, the further behind a chunk is, the smaller its stamp."""

    def __init__(self) -> None:
        self._now = 0

    def next_stamps(self, num_chunks: int) -> Stamps:
        """Stamps for chunks used now, in prefix order: descending, and newer than all before. Mutates the clock."""
        self._now += _SPACING * (1 + num_chunks // _SPACING)
        return stamps_below(self._now, num_chunks)


def stamps_below(stamp: int, num_chunks: int) -> Stamps:
    """Stamps for chunks, in prefix order, that follow a chunk with ``stamp``: used with it, but further behind."""
    return np.arange(stamp - 1, stamp - 1 - num_chunks, -1, dtype=np.int64)


def new_stamps(capacity: int) -> Stamps:
    """One stamp per slot, all ``ABSENT``."""
    return np.full(capacity, ABSENT, dtype=np.int64)
