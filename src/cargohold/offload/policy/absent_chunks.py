"""What is remembered of chunks that are not in the tier."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.key_hash import Hashes
from cargohold.offload.policy.reuse_model import NUM_TAGS

Tags = Hashes
"""A short digest of each key, the same in every run. It may be shared: good for statistics, not for identity."""

Uses = npt.NDArray[np.uint8]
Times = npt.NDArray[np.int64]

_ENTRIES_PER_SLOT: Final = 2
_MIN_ENTRIES: Final = 1 << 14
_USES_MASK: Final = 0xFF
_USES: Final = np.uint32(_USES_MASK)


class AbsentChunks:
    """How often chunks were used, and when last, by tag.

    A table with one place for each tag and no order: what comes later overwrites what was there. It forgets at random, costs
    eight bytes an entry, and asks for no upkeep. A wrong tag is a wrong guess about one chunk, nothing more.

    Args:
        capacity: slots of the tier.

    Attributes:
        is_empty: whether nothing was ever remembered: until the tier is full for the first time.
    """

    def __init__(self, capacity: int) -> None:
        self.is_empty = True
        bits = (max(_MIN_ENTRIES, capacity * _ENTRIES_PER_SLOT) - 1).bit_length()
        self._mask = np.uint32(min((1 << bits), NUM_TAGS) - 1)
        # One row each, for one cache miss: the tag, whose lowest bits the place tells, over the uses; and the time.
        self._entries = np.full((int(self._mask) + 1, 2), 0, dtype=np.uint32)
        # The same memory: single elements are read and written three times faster this way.
        self._entry_view = self._entries.data

    def recall(self, tags: Tags, now: int) -> tuple[Uses, Times]:
        """How often each chunk was used before, and how long ago the last time; zero where nothing is known."""
        entries = self._entries[tags & self._mask]
        known, times = entries[:, 0], entries[:, 1]
        uses = np.where((known ^ tags) <= _USES, known & _USES, 0)
        # Modulo 2**32, like the times: longer than that nobody needs to tell.
        return uses.astype(np.uint8), (np.uint32(now % NUM_TAGS) - times).astype(np.int64)

    def recall_one(self, tag: int, now: int) -> tuple[int, int]:
        """``recall`` for one chunk: while a request generates, they come one by one."""
        place = tag & int(self._mask)
        known = self._entry_view[place, 0]
        uses = known & _USES_MASK if known ^ tag <= _USES_MASK else 0
        return uses, (now - self._entry_view[place, 1]) % NUM_TAGS

    def remember(self, tags: Tags, uses: Uses, times: Times) -> None:
        """Chunks leave the tier, or did not get in."""
        if not len(tags):
            return
        self.is_empty = False
        if len(tags) == 1:
            (tag,), (use,), (time,) = tags.tolist(), uses.tolist(), times.tolist()
            place = tag & int(self._mask)
            self._entry_view[place, 0] = tag & ~_USES_MASK | use
            self._entry_view[place, 1] = time % NUM_TAGS
            return
        entries = np.empty((len(tags), 2), dtype=np.uint32)
        entries[:, 0] = (tags & ~_USES) | uses
        entries[:, 1] = times % NUM_TAGS
        self._entries[tags & self._mask] = entries
