"""What waits to be written to a tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    def add(self, keys: Iterable[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Chunks are to be written, each with the chunk before it in ``parents``, but for those that already wait."""
        waiting = self._parents
        for key in keys:
            waiting.setdefault(key, parents[key])
        while len(waiting) > self._limit:
            waiting.popitem(last=False)

    def postpone(self, keys: Iterable[OffloadKey]) -> None:
        """These were used just now: they are written last, the end of their prefix before its start."""
        for key in reversed(list(keys)):
            if key in self._parents:
                self._parents[key] = self._parents.pop(key)

    def take(self, limit: int, ready: Callable[[Sequence[OffloadKey]], Sequence[OffloadKey]]) -> Batch | None:
        """Take out the chunks whose turn it is, at most ``limit``, whatever prefixes they are of.

        While many requests generate, each step completes a chunk of some: a job for each would cost more than its chunk.

        Args:
            limit: at least 1.
            ready: those of some chunks that are still in host memory, in their order.

        Returns:
            ``None`` also if none of the first ``MAX_LOOKS`` is in host memory; those are taken out all the same.
        """
        parents: dict[OffloadKey, OffloadKey | None] = {}
        num_looks = min(len(self._parents), MAX_LOOKS)
        while num_looks and len(parents) < limit:
            num_next = min(num_looks, limit - len(parents))
            num_looks -= num_next
            looked_at = dict(self._parents.popitem(last=False) for _ in range(num_next))
            parents.update((key, looked_at[key]) for key in ready(list(looked_at)))
        return Batch(tuple(parents), tuple(parents.values())) if parents else None

    def clear(self) -> None:
        """Nothing is to be written any more."""
        self._parents.clear()
