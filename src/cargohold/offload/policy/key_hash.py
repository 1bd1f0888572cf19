"""Hashes of many keys at once.

Python's ``hash`` takes some 90 ns for a key that was not hashed before, and one call per key. One matrix product for all keys
takes 35 ns per key.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Hashes: TypeAlias = npt.NDArray[np.uint32]

_WORD_BYTES: Final = 4
_UPPER_HALF: Final = np.uint64(32)
_MASK: Final = (1 << 32) - 1


class KeyHash:
    """Multilinear hashing: the upper half of a weighted sum of a key's words, modulo 2**64.

    Strongly universal for random weights: nobody who does not know them can choose keys that collide. D. Lemire and O. Kaser,
    "Strongly universal string hashing is fast", The Computer Journal 57, 2014.

    All keys must have the same length as the first ones.

    Args:
        seed: seed of the weights: equal seeds give equal hashes. With ``None`` the weights are a secret of this process.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self._key_bytes = 0
        self._weights = np.empty(0, dtype=np.uint64)
        self._words: np.dtype[np.unsignedinteger[Any]] = np.dtype(np.uint8)
        self._split, self._weight_list = Struct(""), [0]

    def __call__(self, keys: Sequence[bytes]) -> Hashes:
        """Return one hash per key. Raises ``ValueError`` if lengths differ, also from those of earlier keys."""
        joined = b"".join(keys)
        if len(joined) != len(keys) * self._key_bytes:
            self._learn_length(keys)
        sums = np.frombuffer(joined, self._words).reshape(len(keys), len(self._weights)) @ self._weights
        return (sums >> _UPPER_HALF).astype(np.uint32)

    def of(self, key: bytes) -> int:
        """Return the hash of one key, as a call with several would. Raises ``ValueError`` if its length is another."""
        if len(key) != self._key_bytes:
            self._learn_length([key])
        weighted: int = sum(map(mul, self._split.unpack(key), self._weight_list))
        return weighted >> 32 & _MASK

    def _learn_length(self, keys: Sequence[bytes]) -> None:
        """Draw weights for the length of the first keys. Mutates everything. Raises ``ValueError`` if lengths differ."""
        self._key_bytes = common_length(keys, self._key_bytes)
        self._words = np.dtype(np.uint8 if self._key_bytes % _WORD_BYTES else "<u4")
        num_words = self._key_bytes // self._words.itemsize
        self._weights = self._random.integers(0, 1 << 64, num_words, dtype=np.uint64)
        self._split = Struct(f"<{num_words}{'B' if self._words.itemsize == 1 else 'I'}")
        self._weight_list = self._weights.tolist()


def common_length(keys: Sequence[bytes], so_far: int) -> int:
    """Return the length of keys, of which there is at least one. Raises ``ValueError`` if lengths differ.

    Args:
        keys: the keys.
        so_far: the length of earlier ones; 0 if there were none.
    """
    lengths = {so_far, *map(len, keys)} - {0}
    if len(lengths) > 1:
        raise ValueError(f"keys of one tier have one length, not {sorted(lengths)}")
    return len(keys[0])
