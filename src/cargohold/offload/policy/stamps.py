"""Stamps of recency: of chunks used together, the last has the oldest stamp, so that leaves are evicted first."""

from __future__ import annotations

from typing import Final

import numpy as np

from cargohold.offload.policy.oldest_first import NO_STAMP, Stamps

_SPACING: Final = 1 << 20
"""Distance of the stamps of two uses, so that chunks stored later fit in behind those of their prefix. No prefix is longer."""

REFRESHED_AFTER_PART: Final = 8
"""A growing prefix counts as used again if more chunks than this part (an eighth) of the tier were used since its last use."""


class StampClock:
    """Makes stamps, and counts uses of chunks. Later calls give larger stamps."""

    def __init__(self) -> None:
        self._now = 0

    def next_stamps(self, num_chunks: int) -> Stamps:
        """Return stamps for chunks used now, in prefix order: descending. Mutates the clock."""
        self._now += _SPACING * num_chunks
        return stamps_below(self._now, num_chunks)

    def uses_since(self, stamp: int) -> int:
        """Return how many chunks were used since ``stamp`` was made."""
        return (self._now - stamp) // _SPACING


def stamps_below(stamp: int, num_chunks: int) -> Stamps:
    """Return stamps for chunks, in prefix order, that follow a chunk with ``stamp``: descending, just below it."""
    return np.arange(stamp - 1, stamp - 1 - num_chunks, -1, dtype=np.int64)


def new_stamps(capacity: int) -> Stamps:
    """Make an array with one stamp per slot, all ``NO_STAMP``."""
    return np.full(capacity, NO_STAMP, dtype=np.int64)
