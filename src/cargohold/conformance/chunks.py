"""Names and contents for chunks: a small tree of prefixes."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from random import Random

from cargohold.offload.keys import offload_key
from cargohold.offload.manager import OffloadKey

NUM_PATHS = 12
MAX_DEPTH = 7


class Tree:
    """Prefixes that share beginnings.

    Args:
        random: what it is drawn from.

    Attributes:
        paths: keys of the chunks of some prefixes, in prefix order; all ends of the tree are among them.
        keys: all chunks.
        parents: the chunk before each that has one.
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
    """The key of a chunk: like a real one, a digest and a group."""
    return offload_key(sha256(name.encode()).digest(), 0)


def contents(name: str, num_bytes: int) -> bytes:
    """What a chunk holds: different for every name."""
    return Random(name).randbytes(num_bytes)  # noqa: S311  # repeatable, on purpose
