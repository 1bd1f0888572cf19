"""A small tree of prefixes, and keys for its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import product

from cargohold.cache import make_manager

BRANCHES = 2
DEPTH = 6


@lru_cache(maxsize=4096)
def key(path: tuple[int, ...], group: int = 0) -> bytes:
    """Key of the chunk at the end of a path: a digest and a group, like a real key."""
    return sha256(bytes(path)).digest() + group.to_bytes(4, "little")


def chain(path: tuple[int, ...]) -> list[bytes]:
    """Keys of all chunks of a path, in prefix order."""
    return [key(path[:end]) for end in range(1, len(path) + 1)]


def numbered(*numbers: int) -> list[bytes]:
    """Keys of chunks that have nothing to do with each other."""
    return [sha256(number.to_bytes(8, "big")).digest() + bytes(4) for number in numbers]


EVERY_PATH = [path for depth in range(1, DEPTH + 1) for path in product(range(BRANCHES), repeat=depth)]
EVERY_KEY = [key(path) for path in EVERY_PATH]


def hits_of(policy: str, requests: Iterable[Sequence[bytes]], capacity: int) -> int:
    """Number of prefix hits of requests that come one after the other, each of which is stored as a whole."""
    manager = make_manager(policy, capacity)
    hits = 0
    for keys in requests:
        length = len(manager.lookup_run(keys))
        hits += length
        manager.touch(keys)
        handle = manager.prepare_store(keys[length:], keys[length - 1] if length else None)
        handle.commit()
    manager.check()
    return hits
