"""Kinds: what the default policy knows of a chunk, in one number; and a memory for those of chunks that are not in the tier.

::

    kind  = uses * 512 + class
    class = how the turn ended * 80 + level * 20 + (10 if it was the last of its request) + detail

A level is 1, 2 to 3, 4 to 7, or 8 and more uses. The detail of a new chunk is how often the prefix that it continues was used;
that of others, the time between the last two uses, by powers of four.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from cargohold.protocol import TurnEnd

DETAILS: Final = 10
LAST: Final = DETAILS
"""What is added to a kind if the chunk was the last of its request."""
PER_LEVEL: Final = 2 * DETAILS
_NUM_LEVELS: Final = 4
NUM_CLASSES: Final = _NUM_LEVELS * PER_LEVEL
"""Number of classes before the turn has ended, and for each way to end."""
ADDED_BY_END: Final = {end: number * NUM_CLASSES for number, end in enumerate(TurnEnd)}
"""What is added to a kind when the turn that used the chunk last has ended so."""

CLASS_BITS: Final = 9
CLASS: Final = (1 << CLASS_BITS) - 1
"""The bits of a kind that are its class."""
NEW: Final = 1 << CLASS_BITS
"""The kind of a chunk that was used once, behind nothing that is in the tier."""
_MAX_USES: Final = 255
_CONTINUES_OFTEN: Final = 3

_MIN_ENTRIES: Final = 1 << 14
_ENTRIES_PER_SLOT: Final = 2
_USES_MASK: Final = 0xFF
_TIME_BITS: Final = 32
_TIME_MASK: Final = (1 << _TIME_BITS) - 1
_MANY: Final = 32
"""Number of chunks from which on arrays are quicker than a loop."""


def kind_behind(kind: int) -> int:
    """Return the kind of a new chunk behind one of ``kind``."""
    uses = kind >> CLASS_BITS
    if uses == 1:  # the same request goes on, whose chunks come in parts
        return NEW + (kind & CLASS) % DETAILS
    return NEW + min((uses.bit_length() + 1) // 2, _CONTINUES_OFTEN)


def kind_used_again(uses_before: int, age: int) -> int:
    """Return the kind of a chunk used now and ``age`` ago, that is not the last of its request."""
    uses = min(uses_before + 1, _MAX_USES)
    level = min(uses.bit_length(), _NUM_LEVELS) - 1
    detail = min((max(age, 1).bit_length() + 1) // 2, DETAILS - 1)
    return (uses << CLASS_BITS) + level * PER_LEVEL + detail


def is_last(kind: int) -> bool:
    """Whether chunks of this kind were the last of their requests."""
    return (kind & CLASS) % PER_LEVEL >= LAST


def stretches(kinds: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the kind of each stretch of chunks of one kind, and how many there are."""
    if len(kinds) == 1:
        return ((kinds[0], 1),)  # of what is generated, nearly always
    return [(kind, len(list(same))) for kind, same in groupby(kinds)]


class AbsentChunks:
    """How often chunks that are not in the tier were used, and when last, by tag.

    A tag is a short digest of a key, the same in every run. Keys may share one: good for statistics, not for identity. There is
    one place for several tags, so a new entry overwrites an old one: the table forgets at random, costs eight bytes per entry,
    and needs no upkeep. A wrong tag means a wrong guess about one chunk, nothing more.

    Args:
        capacity: number of slots of the tier.
    """

    def __init__(self, capacity: int) -> None:
        num_entries = 1 << min((max(_MIN_ENTRIES, capacity * _ENTRIES_PER_SLOT) - 1).bit_length(), _TIME_BITS)
        self._mask = num_entries - 1
        # The tag with the number of uses in place of its lowest byte, which the place implies; and the time.
        self._known = array("I", bytes(4 * num_entries))
        self._times = array("I", bytes(4 * num_entries))
        # The same memory: many entries cost a third of the time this way.
        self._views = np.frombuffer(self._known, np.uint32), np.frombuffer(self._times, np.uint32)

    def recall(self, tags: Sequence[int], now: int) -> list[tuple[int, int]]:
        """Return the indices of the chunks of which something is known, and their kinds if they are used now."""
        known, mask = self._known, self._mask
        indices: Sequence[int] = range(len(tags))
        if len(tags) >= _MANY:
            wanted = np.array(tags, np.uint32)
            indices = np.flatnonzero((self._views[0][wanted & mask] ^ wanted) <= _USES_MASK).tolist()
        kinds: list[tuple[int, int]] = []
        for at in indices:
            tag = tags[at]
            entry = known[tag & mask]
            uses = entry & _USES_MASK if entry ^ tag <= _USES_MASK else 0
            if uses:
                # Times are modulo 2**32: nobody needs to know longer ages.
                kinds.append((at, kind_used_again(uses, (now - self._times[tag & mask]) & _TIME_MASK)))
        return kinds

    def remember_each(self, tags: Sequence[int], uses: Sequence[int], times: Sequence[int]) -> None:
        """Remember the uses of chunks that leave the tier, or were not stored; ``times`` are those of the last ones."""
        if len(tags) >= _MANY:
            last = np.array(tags, np.uint32)
            known, known_times = self._views
            known[last & self._mask] = last & ~np.uint32(_USES_MASK) | np.array(uses, np.uint32)
            known_times[last & self._mask] = np.array(times, np.int64) & _TIME_MASK
            return
        for tag, num_uses, time in zip(tags, uses, times, strict=True):
            self._known[tag & self._mask] = tag & ~_USES_MASK | num_uses
            self._times[tag & self._mask] = time & _TIME_MASK
