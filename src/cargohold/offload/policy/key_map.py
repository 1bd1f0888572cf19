"""Keys to small integers, for a million keys and more, without a pause that the scheduler would feel.

A ``dict`` that outgrows its table copies all of it at once: some 40 ms at a million keys, also when it does not grow but only
turns over. So a large map is several dicts. The first byte of a key (a digest, so as good as random) says which. Their shares
are unequal on purpose: equal ones would fill up together and resize in the same call.

Values are ``int`` and keys ``bytes``, which the garbage collector does not follow: its full collections skip the whole map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_MAX_DICT_KEYS: Final = 100_000
_NUM_PARTS: Final = 16


class KeyMap:
    """A mapping from keys to integers, asked for many keys at a time.

    Args:
        capacity: how many keys are expected. More fit, but then the longest pause grows.
    """

    def __init__(self, capacity: int) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(1 if capacity <= _MAX_DICT_KEYS else _NUM_PARTS)]
        # By first byte: which part, and its method, so that a look-up in a batch is one call.
        self._part_of = _parts_by_first_byte(self._parts)
        self._get_of = [part.get for part in self._part_of]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def get(self, key: bytes) -> int | None:
        """The value, or ``None``."""
        return self._get_of[key[0]](key)

    def get_many(self, keys: Sequence[bytes]) -> list[int | None]:
        """``get`` for each key."""
        if len(self._parts) == 1:
            return list(map(self._parts[0].get, keys))
        get_of = self._get_of
        return [get_of[key[0]](key) for key in keys]

    def set_many(self, keys: Sequence[bytes], values: Iterable[int]) -> None:
        """Map each key to the value beside it, replacing what was there."""
        if len(self._parts) == 1:
            self._parts[0].update(zip(keys, values, strict=True))
            return
        part_of = self._part_of
        for key, value in zip(keys, values, strict=True):
            part_of[key[0]][key] = value

    def remove_many(self, keys: Iterable[bytes]) -> None:
        """Forget keys, all of which must be there."""
        part_of = self._part_of
        for key in keys:
            del part_of[key[0]][key]

    def clear(self) -> None:
        """Forget everything."""
        for part in self._parts:
            part.clear()

    def items(self) -> Iterable[tuple[bytes, int]]:
        """Every key and its value, in no particular order."""
        return (item for part in self._parts for item in part.items())


def _parts_by_first_byte(parts: list[dict[bytes, int]]) -> list[dict[bytes, int]]:
    # Shares grow geometrically from the first part to twice as much at the last: dicts double when they are full, so the
    # moments at which the parts do are spread evenly over each doubling of the whole.
    weights = [2 ** (index / len(parts)) for index in range(len(parts))]
    total = sum(weights)
    ends = [256 * sum(weights[: index + 1]) / total for index in range(len(parts))]
    ends[-1] = 256
    part_index = 0
    by_byte = []
    for byte in range(256):
        while byte >= ends[part_index]:
            part_index += 1
        by_byte.append(parts[part_index])
    return by_byte
