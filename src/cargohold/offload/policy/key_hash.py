"""Hashes of many keys at once.

``hash`` takes some 90 ns for a key that was not hashed before, and a call for each; one product of a matrix takes 35.
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

    Strongly universal for random weights: whoever does not know them cannot choose keys that collide. D. Lemire and O. Kaser,
    "Strongly universal string hashing is fast", The Computer Journal 57, 2014.

    All keys must have the same length, which is that of the first ones.

    Args:
        seed: where the weights come from: the same seed, the same hashes. ``None``: from a secret of this process.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self._key_bytes = 0
        self._weights = np.empty(0, dtype=np.uint64)
        self._words: np.dtype[np.unsignedinteger[Any]] = np.dtype(np.uint8)
        self._split, self._weight_list = Struct(""), [0]

    def __call__(self, keys: Sequence[bytes]) -> Hashes:
        """One hash per key. Raises ``ValueError`` if their lengths differ."""
        joined = b"".join(keys)
        if len(joined) != len(keys) * self._key_bytes:
            self._learn_length(keys)
        sums = np.frombuffer(joined, self._words).reshape(len(keys), len(self._weights)) @ self._weights
        return (sums >> _UPPER_HALF).astype(np.uint32)

    def of(self, key: bytes) -> int:
        """The hash of one key: the same as among others. Raises ``ValueError`` if its length differs from theirs."""
        if len(key) != self._key_bytes:
            self._learn_length([key])
        weighted: int = sum(map(mul, self._split.unpack(key), self._weight_list))
        return weighted >> 32 & _MASK

    def _learn_length(self, keys: Sequence[bytes]) -> None:
        """Draw weights for keys of this length. Mutates everything."""
        if self._key_bytes or len(set(map(len, keys))) > 1:
            raise ValueError(
                f"keys of one tier have one length, not {sorted({self._key_bytes, *map(len, keys)} - {0})}"
            )
        self._key_bytes = len(keys[0])
        self._words = np.dtype(np.uint8 if self._key_bytes % _WORD_BYTES else "<u4")
        num_words = self._key_bytes // self._words.itemsize
        self._weights = self._random.integers(0, 1 << 64, num_words, dtype=np.uint64)
        self._split = Struct(f"<{num_words}{'B' if self._words.itemsize == 1 else 'I'}")
        self._weight_list = self._weights.tolist()
