"""Remembers the past uses of chunks that are not in the tier."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.key_hash import Hashes
from cargohold.offload.policy.reuse_model import NUM_TAGS

Tags = Hashes
"""A short digest of each key, the same in every run. Keys may share one: good for statistics, not for identity."""

Uses = npt.NDArray[np.uint8]
Times = npt.NDArray[np.int64]

Places = npt.NDArray[np.intp]

_NOTHING: Final = np.empty(0, dtype=np.intp), np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64)
_ENTRIES_PER_SLOT: Final = 2
_MIN_ENTRIES: Final = 1 << 14
_USES_MASK: Final = 0xFF
_USES: Final = np.uint32(_USES_MASK)


class AbsentChunks:
    """How often chunks were used, and when last, by tag.

    A table with one place for each tag, shared by several tags: a new entry overwrites the old one. So it forgets at random,
    costs eight bytes per entry, and needs no upkeep. A wrong tag means a wrong guess about one chunk, nothing more.

    Args:
        capacity: number of slots of the tier.

    Attributes:
        is_empty: whether nothing was remembered yet, as until the tier is full for the first time.
    """

    def __init__(self, capacity: int) -> None:
        self.is_empty = True
        bits = (max(_MIN_ENTRIES, capacity * _ENTRIES_PER_SLOT) - 1).bit_length()
        self._mask = np.uint32(min((1 << bits), NUM_TAGS) - 1)
        # One row per entry, so that it costs one cache miss: a word with the number of uses in place of the tag's lowest byte,
        # which the row's number implies; and the time.
        self._entries = np.full((int(self._mask) + 1, 2), 0, dtype=np.uint32)
        # No tag of a row agrees with this in the bits that the row's number implies.
        self._entries[:, 0] = ~np.arange(len(self._entries), dtype=np.uint32)
        # The same memory: single elements are read and written three times faster this way.
        self._entry_view = self._entries.data

    def recall(self, tags: Tags, now: int) -> tuple[Places, Uses, Times]:
        """Return the places of known chunks in ``tags``, how often each was used before, and the ages of their last uses."""
        places = tags & self._mask
        differences = self._entries[places, 0] ^ tags
        known = (differences <= _USES).nonzero()[0]
        if not len(known):
            return _NOTHING
        uses, times = self._entries[places[known]].T
        # Modulo 2**32, like the times: nobody needs to know longer ages.
        return known, (uses & _USES).astype(np.uint8), (np.uint32(now % NUM_TAGS) - times).astype(np.int64)

    def recall_one(self, tag: int, now: int) -> tuple[int, int]:
        """Do the same as ``recall`` for one chunk, faster: while a request generates, chunks come one by one."""
        place = tag & int(self._mask)
        known = self._entry_view[place, 0]
        uses = known & _USES_MASK if known ^ tag <= _USES_MASK else 0
        return uses, (now - self._entry_view[place, 1]) % NUM_TAGS

    def remember(self, tags: Tags, uses: Uses, times: Times) -> None:
        """Remember the uses of chunks that leave the tier, or were not stored; ``times`` are those of their last uses."""
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
