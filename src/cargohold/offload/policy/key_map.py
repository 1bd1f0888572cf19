"""A map from keys to small integers, for a million keys and more, without long pauses of the scheduler's thread.

When a ``dict`` has used up its table, by growing or by mere turnover, it copies all of it at once: some 50 ms at a million
keys. So a large map consists of several dicts, and the first byte of a key (a digest, so as good as random) says which one has
it. Their shares are unequal on purpose: equal ones would fill up together and be copied in the same call.

Values are ``int`` and keys ``bytes``, which the garbage collector does not follow, so its full collections skip the map.

Looking up a key that is absent costs two or three cache misses in a large ``dict``, half a microsecond; most chunks of a new
prompt are absent. So a large map can be asked through a small filter (``find``). A store of few chunks does not: it writes to
the places that its look-ups have brought into the processor's caches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.key_hash import common_length

_MAX_DICT_KEYS: Final = 150_000
_NUM_PARTS: Final = 16
_PLACES_PER_KEY: Final = 8
_NUM_WORDS: Final = 2
_WORD: Final = np.dtype("<u4")
_MIN_KEY_BYTES: Final = _NUM_WORDS * 4
_MAX_COUNT: Final = 120
_MAX_UNCOUNTED: Final = 512
_MANY: Final = 256
"""If at least so many keys are looked up at once, asking the filter first is faster even if others follow."""
_ONE: Final = np.uint8(1)


class KeyMap:
    """A mapping from keys to integers, made for look-ups of many keys in one call.

    Args:
        capacity: expected maximum number of keys. More fit, but then the longest pause grows.
    """

    def __init__(self, capacity: int) -> None:
        parts: list[dict[bytes, int]] = [{} for _ in range(1 if capacity <= _MAX_DICT_KEYS else _NUM_PARTS)]
        self._parts = parts
        self._only = parts[0] if len(parts) == 1 else None
        self._filter = KeyFilter(0 if self._only is not None else capacity)
        # By first byte: the part, and its ``get`` method, so that a look-up is one call.
        self._part_of = [parts[part] for part in _spread(len(parts))]
        self._get_of = [part.get for part in self._part_of]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def get(self, key: bytes) -> int | None:
        """Return the value of a key, or ``None``."""
        return self._get_of[key[0]](key)

    def get_many(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the value of each key, or ``None``. Fastest if all are absent, or all are there.

        Raises ``ValueError`` in a large map if a key has not the length of those that are there.
        """
        if (only := self._only) is not None:
            return [None] * len(keys) if only.keys().isdisjoint(keys) else list(map(only.get, keys))
        self._filter.check_lengths(keys)
        if len(keys) >= _MANY:
            return list(map(self.find(keys).get, range(len(keys))))
        get_of = self._get_of
        return [get_of[key[0]](key) for key in keys]

    def find(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return the values of the keys that are there, by their place in ``keys``. Faster than ``get_many`` if few are."""
        if (only := self._only) is not None and only.keys().isdisjoint(keys):
            return {}
        get_of = self._get_of
        candidates = range(len(keys)) if only is not None else self._filter.candidates(keys)
        return {at: value for at in candidates if (value := get_of[keys[at][0]](keys[at])) is not None}

    def add(self, keys: Sequence[bytes], values: Iterable[int]) -> None:
        """Map keys, all of which were looked up and are absent and different, to ``values``, which are parallel to them."""
        if self._only is not None:
            self._only.update(zip(keys, values, strict=True))
            return
        self._filter.add(keys)
        part_of = self._part_of
        for key, value in zip(keys, values, strict=True):
            part_of[key[0]][key] = value

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys, all of which must be there."""
        if (only := self._only) is not None:
            for key in keys:
                del only[key]
            return
        self._filter.remove(keys)
        part_of = self._part_of
        for key in keys:
            del part_of[key[0]][key]

    def clear(self) -> None:
        """Remove all keys."""
        self._filter.clear()
        for part in self._parts:
            part.clear()

    def values(self) -> Iterator[int]:
        """Iterate over every value, in no particular order."""
        return (value for part in self._parts for value in part.values())


class KeyFilter:
    """A counting Bloom filter: tells which of many keys are certainly absent. It takes one in twenty absent keys for present.

    Of several groups' chunks at the same place of a prefix, which have the same digest, it takes all for present if one is.

    B. Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM 13, 1970, with two places for each key: its
    first two words of four bytes. Keys are digests, so hashing them once more would spread them no better. If many keys agree
    in these bytes, a count gets near its limit, and the filter holds every key for possible from then on. If keys are shorter
    than two words, it does so from the start.

    Changes are counted many at a time, which costs a fraction of counting them in small batches; until then, keys that were
    added are in a set.

    Args:
        capacity: expected maximum number of keys.
    """

    def __init__(self, capacity: int) -> None:
        num_places = 1 << (_PLACES_PER_KEY * capacity).bit_length()
        self._mask = np.uint32(num_places - 1)
        self._key_bytes = 0
        self._counts = np.full(num_places, 0, dtype=np.uint8)
        self._knows_all = True
        # Not counted yet. A key may be in a list twice, if it came, went and came again.
        self._added: list[bytes] = []
        self._added_once: set[bytes] = set()
        self._removed: list[bytes] = []

    def check_lengths(self, keys: Sequence[bytes]) -> None:
        """Raise ``ValueError`` unless all keys have the length of those that were added."""
        if set(map(len, keys)) != {self._key_bytes} and keys:
            common_length(keys, self._key_bytes)

    def candidates(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Return the indices in ``keys`` of the keys that may be there. They must have the length of those that were added."""
        if not self._key_bytes:
            return ()  # nothing was ever added
        if not self._added_once.isdisjoint(keys):
            self._count()
        if not self._knows_all:
            return range(len(keys))
        counts = self._counts[self._places(keys)]
        found: list[int] = np.minimum(counts[:, 0], counts[:, 1]).nonzero()[0].tolist()
        return found

    def add(self, keys: Sequence[bytes]) -> None:
        """Add keys that are not there yet. They must have one length, that of those that were added before."""
        if not self._key_bytes and keys:
            self._key_bytes = common_length(keys, 0)
            self._knows_all = self._key_bytes >= _MIN_KEY_BYTES
        if not self._knows_all:
            return
        self._added += keys
        if len(self._added) >= _MAX_UNCOUNTED:
            self._count()
        else:
            self._added_once.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys that are there."""
        if not self._knows_all:
            return
        self._removed += keys
        if len(self._removed) >= _MAX_UNCOUNTED:
            self._count()

    def clear(self) -> None:
        """Remove every key."""
        self._forget_uncounted()
        self._counts[:] = 0
        self._key_bytes = 0
        self._knows_all = True

    def _count(self) -> None:
        """Count what was added and removed. Mutates everything."""
        if self._added_once.isdisjoint(self._removed):
            added, removed = self._added, self._removed
        else:  # keys that came and went: counting every coming would make their places look crowded
            net = Counter(self._added)
            net.subtract(self._removed)
            added = [key for key, times in net.items() if times > 0]
            removed = [key for key, times in net.items() if times < 0]
        places = np.sort(self._places(added), axis=None)
        np.add.at(self._counts, places, _ONE)
        # Before a count overflows: from now on, every key may be there.
        is_crowded = (places[_MAX_COUNT:] == places[:-_MAX_COUNT]).any()
        self._knows_all = not is_crowded and self._counts[places].max(initial=0) <= _MAX_COUNT
        np.subtract.at(self._counts, self._places(removed), _ONE)
        self._forget_uncounted()

    def _forget_uncounted(self) -> None:
        self._added.clear()
        self._added_once.clear()
        self._removed.clear()

    def _places(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """Return both places of each key, one row per key."""
        joined = b"".join(keys)
        places: npt.NDArray[np.uint32] = self._mask & np.ndarray(
            (len(keys), _NUM_WORDS), _WORD, joined, strides=(self._key_bytes, _WORD.itemsize)
        )
        return places


def _spread(num_parts: int) -> list[int]:
    """Return the part that each first byte of a key belongs to.

    Shares grow geometrically, the last being nearly twice the first. Dicts double when they are full, so the moments at which
    the parts double are spread evenly over each doubling of the whole map.
    """
    weights = [2 ** (part / num_parts) for part in range(num_parts)]
    ends = [256 * end / sum(weights) for end in accumulate(weights)]
    return [min(bisect_right(ends, byte), num_parts - 1) for byte in range(256)]
