"""What is remembered of chunks that are not in the tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.reuse_model import NUM_TAGS

Tags = npt.NDArray[np.uint32]
Uses = npt.NDArray[np.uint8]
Times = npt.NDArray[np.int64]

_ENTRIES_PER_SLOT: Final = 4
_MIN_ENTRIES: Final = 1 << 14
_NEVER: Final = 0


def tags_of(keys: Sequence[bytes]) -> Tags:
    """A short digest of each key, the same in every run. It may be shared: good for statistics, not for identity."""
    return np.fromiter(map(crc32, keys), np.uint32, len(keys))


class AbsentChunks:
    """How often chunks were used, and when last, by tag.

    A table with one place for each tag and no order: what comes later overwrites what was there. It forgets at random, costs
    nine bytes an entry, and asks for no upkeep. A wrong tag is a wrong guess about one chunk, nothing more.

    Args:
        capacity: slots of the tier.
    """

    def __init__(self, capacity: int) -> None:
        bits = (max(_MIN_ENTRIES, capacity * _ENTRIES_PER_SLOT) - 1).bit_length()
        self._mask = np.uint32(min((1 << bits), NUM_TAGS) - 1)
        self._tags = np.full(int(self._mask) + 1, 0, dtype=np.uint32)
        self._uses = np.full(int(self._mask) + 1, _NEVER, dtype=np.uint8)
        self._times = np.full(int(self._mask) + 1, 0, dtype=np.uint32)

    def recall(self, tags: Tags, now: int) -> tuple[Uses, Times]:
        """How often each chunk was used before, and how long ago the last time; zero where nothing is known."""
        places = tags & self._mask
        uses = np.where(self._tags[places] == tags, self._uses[places], np.uint8(_NEVER))
        # Modulo 2**32, like the times: longer than that nobody needs to tell.
        return uses, (np.uint32(now % NUM_TAGS) - self._times[places]).astype(np.int64)

    def remember(self, tags: Tags, uses: Uses, times: Times) -> None:
        """Chunks leave the tier, or did not get in."""
        places = tags & self._mask
        self._tags[places] = tags
        self._uses[places] = uses
        self._times[places] = (times % NUM_TAGS).astype(np.uint32)
