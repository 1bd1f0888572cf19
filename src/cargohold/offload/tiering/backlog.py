"""What waits to be written to a tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cargohold.offload.manager.base import OffloadKey

MAX_LOOKS: Final = 4096
"""Chunks looked at for one batch: after a tier has rested, all that waited may have left host memory meanwhile."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks to write in one job.

    Attributes:
        keys: which, in the order in which their turn came.
        parents: the chunk before each in its prefix, if there is one, parallel to ``keys``.
    """

    keys: tuple[OffloadKey, ...]
    parents: tuple[OffloadKey | None, ...]


class Backlog:
    """Chunks in host memory that a tier does not have, first to be written first.

    Only names are kept. A chunk may leave host memory before its turn comes: then it is passed over.

    Args:
        limit: chunks to remember; the oldest are given up first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Unlike a plain dictionary, it finds the first in no time when many before it have gone.
        self._parents: OrderedDict[OffloadKey, OffloadKey | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._parents

    def add(self, key: OffloadKey, parent: OffloadKey | None) -> None:
        """A chunk is to be written, unless it already waits."""
        self._parents.setdefault(key, parent)
        if len(self._parents) > self._limit:
            self._parents.popitem(last=False)

    def postpone(self, keys: Iterable[OffloadKey]) -> None:
        """These were used just now: they are written last, the end of their prefix before its start."""
        for key in reversed(list(keys)):
            if key in self._parents:
                self._parents[key] = self._parents.pop(key)

    def first(self, limit: int) -> list[OffloadKey]:
        """The chunks whose turn comes first, at most ``limit``."""
        return list(islice(self._parents, limit))

    def take(self, limit: int, is_ready: Callable[[OffloadKey], bool]) -> Batch | None:
        """Take out the chunks whose turn it is, at most ``limit``, whatever prefixes they are of.

        While many requests generate, each step completes a chunk of some: a job for each would cost more than its chunk.

        Args:
            limit: at least 1.
            is_ready: whether a chunk is still in host memory.

        Returns:
            ``None`` also if none of the first ``MAX_LOOKS`` is in host memory; those are taken out all the same.
        """
        keys: list[OffloadKey] = []
        parents: list[OffloadKey | None] = []
        for _ in range(min(len(self._parents), MAX_LOOKS)):
            if len(keys) == limit:
                break
            key, parent = self._parents.popitem(last=False)
            if is_ready(key):
                keys.append(key)
                parents.append(parent)
        return Batch(tuple(keys), tuple(parents)) if keys else None

    def clear(self) -> None:
        """Nothing is to be written any more."""
        self._parents.clear()
