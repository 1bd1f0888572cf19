"""Keys and contents of chunks for tests, and a small tree of prefixes."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from random import Random

from cargohold.cache import OffloadKey
from cargohold.cache.keys import offload_key

NUM_PATHS = 12
MAX_DEPTH = 7


class Tree:
    """A random tree of prefixes that share beginnings.

    Args:
        random: the random numbers it is drawn from.

    Attributes:
        paths: prefixes, each as the keys of its chunks in prefix order; every leaf of the tree ends one of them.
        keys: keys of all chunks, each once.
        parents: for each chunk that has one, the chunk before it in its prefix.
    """

    def __init__(self, random: Random) -> None:
        self.paths: list[list[OffloadKey]] = []
        for number in range(NUM_PATHS):
            stem = random.choice(self.paths)[: random.randint(0, MAX_DEPTH - 2)] if self.paths else []
            length = random.randint(1, MAX_DEPTH - len(stem))
            self.paths.append([*stem, *(key(f"{number} {depth}") for depth in range(length))])
        self.keys = list(dict.fromkeys(chunk for path in self.paths for chunk in path))
        self.parents = {chunk: before for path in self.paths for before, chunk in pairwise(path)}

    def any_path(self, random: Random) -> list[OffloadKey]:
        """The beginning of a path, often all of it."""
        path = random.choice(self.paths)
        return path[: random.choice((len(path), random.randint(1, len(path))))]


def key(name: str) -> OffloadKey:
    """The offload key of the chunk with this name, made of a digest and a group as real ones are."""
    return offload_key(sha256(name.encode()).digest(), 0)


def contents(name: str, num_bytes: int) -> bytes:
    """The bytes of the chunk with this name: random, and the same for the same name."""
    return Random(name).randbytes(num_bytes)  # noqa: S311  # repeatable, on purpose
