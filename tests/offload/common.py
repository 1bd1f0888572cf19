"""A small tree of prefixes, and names for its chunks."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from itertools import product

BRANCHES = 2
DEPTH = 6


@lru_cache(maxsize=4096)
def key(path: tuple[int, ...], group: int = 0) -> bytes:
    """Key of the chunk at the end of a path: like a real one, a digest and a group."""
    return sha256(bytes(path)).digest() + group.to_bytes(4, "little")


def chain(path: tuple[int, ...]) -> list[bytes]:
    """Keys of all chunks of a path, in prefix order."""
    return [key(path[:end]) for end in range(1, len(path) + 1)]


def numbered(*numbers: int) -> list[bytes]:
    """Keys of chunks that have nothing to do with each other."""
    return [sha256(number.to_bytes(8, "big")).digest() + bytes(4) for number in numbers]


EVERY_PATH = [path for depth in range(1, DEPTH + 1) for path in product(range(BRANCHES), repeat=depth)]
EVERY_KEY = [key(path) for path in EVERY_PATH]
PARENT = {key(path): key(path[:-1]) for path in EVERY_PATH if len(path) > 1}
