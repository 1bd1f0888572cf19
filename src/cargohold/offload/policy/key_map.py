"""A map from keys to small integers, for a million keys and more, without long pauses of the scheduler's thread.

When a ``dict`` has used up its table, by growing or by mere turnover, it copies all of it at once: some 50 ms at a million
keys. So a large map consists of several dicts, and the first byte of a key (a digest, so as good as random) says which one has
it. Their shares are unequal on purpose: equal ones would fill up together and be copied in the same call.

Values are ``int`` and keys ``bytes``, which the garbage collector does not follow, so its full collections skip the map.

Looking up a key that is absent costs two or three cache misses in a large ``dict``, half a microsecond; most chunks of a new
prompt are absent. So a large map asks a small filter first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from cargohold.offload.policy.key_hash import Hashes, KeyHash

_MAX_DICT_KEYS: Final = 150_000
_NUM_PARTS: Final = 16
_PLACES_PER_KEY: Final = 8
_MAX_COUNT: Final = 200
_HASH_BITS: Final = 32
_ONE: Final = np.uint8(1)
_NO_HASHES: Final[Hashes] = np.empty(0, dtype=np.uint32)


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
        """Return the value of each key, or ``None``. Fastest if all are absent."""
        if (only := self._only) is not None:
            return [None] * len(keys) if only.keys().isdisjoint(keys) else list(map(only.get, keys))
        get_of = self._get_of
        candidates = self._filter.candidates(keys)
        if len(candidates) == len(keys):
            return [get_of[key[0]](key) for key in keys]
        values: list[int | None] = [None] * len(keys)
        for at in candidates:
            values[at] = get_of[keys[at][0]](keys[at])
        return values

    def add(self, keys: Sequence[bytes], values: Iterable[int]) -> None:
        """Map keys, all of which must be absent and different, to ``values``, which are parallel to them."""
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

    B. Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM 13, 1970, with two places for each key, from
    one hash whose weights are a secret of the process.

    Args:
        capacity: expected maximum number of keys.
    """

    def __init__(self, capacity: int) -> None:
        num_places = 1 << (_PLACES_PER_KEY * capacity).bit_length()
        self._mask = np.uint32(num_places - 1)
        self._other_bits = np.uint32(max(0, _HASH_BITS - num_places.bit_length() + 1))
        self._hash = KeyHash()
        # Keys that were found to be absent are often added next, so the last places are kept. Only for tuples: the same list
        # may have changed.
        self._last_keys: tuple[bytes, ...] = ()
        self._last_places: tuple[Hashes, Hashes] = _NO_HASHES, _NO_HASHES
        self._counts = np.full(num_places, 0, dtype=np.uint8)
        self._knows_all = True

    def candidates(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Return the indices in ``keys`` of the keys that may be there."""
        if not self._knows_all:
            return range(len(keys))
        places, others = self._places(keys)
        found: list[int] = (np.minimum(self._counts[places], self._counts[others])).nonzero()[0].tolist()
        return found

    def add(self, keys: Sequence[bytes]) -> None:
        """Add keys that are not there yet."""
        for places in self._places(keys):
            np.add.at(self._counts, places, _ONE)
            if (self._counts[places] > _MAX_COUNT).any():
                self._knows_all = False  # before a count overflows: from now on, every key may be there

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys that are there."""
        for places in self._places(keys):
            np.subtract.at(self._counts, places, _ONE)

    def clear(self) -> None:
        """Remove every key."""
        self._counts[:] = 0
        self._knows_all = True

    def _places(self, keys: Sequence[bytes]) -> tuple[Hashes, Hashes]:
        """Return both places of each key: the lowest bits of its hash, and the highest."""
        if keys is self._last_keys:
            return self._last_places
        hashes = self._hash(keys)
        both = hashes & self._mask, hashes >> self._other_bits
        if isinstance(keys, tuple):
            self._last_keys, self._last_places = keys, both
        return both


def _spread(num_parts: int) -> list[int]:
    """Return the part that each first byte of a key belongs to.

    Shares grow geometrically, the last being nearly twice the first. Dicts double when they are full, so the moments at which
    the parts double are spread evenly over each doubling of the whole map.
    """
    weights = [2 ** (part / num_parts) for part in range(num_parts)]
    ends = [256 * end / sum(weights) for end in accumulate(weights)]
    return [min(bisect_right(ends, byte), num_parts - 1) for byte in range(256)]
