"""Stamps of recency, leaf first."""

from __future__ import annotations

from typing import Final

import numpy as np

from cargohold.offload.policy.oldest_first import ABSENT, Stamps

_SPACING: Final = 1 << 20
"""Between uses, so that chunks stored later fit in behind those of the same prefix. No prefix has more chunks."""

REFRESHED_AFTER_PART: Final = 8
"""A growing prefix counts as used again when so many uses were counted since that they fill this part of the tier."""


class StampClock:
    """Gives stamps, and counts uses of chunks. Later operations give larger stamps."""

    def __init__(self) -> None:
        self._now = 0

    def next_stamps(self, num_chunks: int) -> Stamps:
        """Stamps for chunks used now, in prefix order: the further behind, the smaller. Mutates the clock."""
        self._now += _SPACING * num_chunks
        return stamps_below(self._now, num_chunks)

    def uses_since(self, stamp: int) -> int:
        """How many chunks were used since a stamp was given."""
        return (self._now - stamp) // _SPACING


def stamps_below(stamp: int, num_chunks: int) -> Stamps:
    """Stamps for chunks, in prefix order, that follow a chunk with ``stamp``: used with it, but further behind."""
    return np.arange(stamp - 1, stamp - 1 - num_chunks, -1, dtype=np.int64)


def new_stamps(capacity: int) -> Stamps:
    """One stamp per slot, all ``ABSENT``."""
    return np.full(capacity, ABSENT, dtype=np.int64)
