"""What is written to a tier, and when: the chunks that wait, and how many may be written per day, so that a disk lasts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cargohold.offload.manager.base import OffloadKey
from cargohold.protocol import Clock

DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""Unused allowance is saved up for at most this many seconds, so a day may exceed its share by a twenty-fourth."""
START_S: Final = 60.0
"""A start is given what accrues in this many seconds.

What an earlier process wrote is not known. If it were an hour's allowance, an engine that is started again and again would
write many times the limit.
"""
MAX_LOOKS: Final = 4096
"""Maximum number of chunks looked at for one batch: while writes are suspended, all that wait may leave host memory."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks to write in one job.

    Attributes:
        keys: the chunks, in the order in which their turn came.
        parents: the chunk before each in its prefix, or ``None``, parallel to ``keys``.
    """

    keys: tuple[OffloadKey, ...]
    parents: tuple[OffloadKey | None, ...]


class Backlog:
    """Chunks in host memory that are to be written to a tier, in the order of writing.

    Only keys are kept. A chunk that leaves host memory before its turn comes is passed over.

    Args:
        limit: maximum number of chunks; beyond it, those at the front are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Unlike a plain dictionary, it finds the first key fast even when many before it were removed.
        self._parents: OrderedDict[OffloadKey, OffloadKey | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._parents

    def add(self, keys: Iterable[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Append chunks that do not wait already; ``parents`` has the chunk before each in its prefix, or ``None``."""
        waiting = self._parents
        for key in keys:
            waiting.setdefault(key, parents[key])
        while len(waiting) > self._limit:
            waiting.popitem(last=False)

    def postpone(self, keys: Iterable[OffloadKey]) -> None:
        """Move waiting chunks of ``keys``, which were just used, to the end: the last of the prefix in front of the first."""
        for key in reversed(list(keys)):
            if key in self._parents:
                self._parents[key] = self._parents.pop(key)

    def take(self, limit: int, ready: Callable[[Sequence[OffloadKey]], Sequence[OffloadKey]]) -> Batch | None:
        """Take out the chunks whose turn it is, at most ``limit``, of any prefixes.

        While many requests generate, each step completes a chunk of some of them: a job for each would cost more than the
        chunk itself.

        Args:
            limit: maximum number of chunks, at least 1.
            ready: returns those of the given chunks that are to be written and still in host memory, in their order.

        Returns:
            The batch; ``None`` if nothing waits, or none of the first ``MAX_LOOKS`` chunks is ready. Chunks that are not ready
            are taken out, too.
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
        """Drop all waiting chunks."""
        self._parents.clear()


class Allowance:
    """An allowance of chunks that accrues evenly over the day, and can be saved up for an hour.

    At least one chunk can be saved up, and is given at the start, however small the allowance is.

    Args:
        per_day: chunks per day.
        clock: monotonic time in seconds.
    """

    def __init__(self, per_day: int, clock: Clock) -> None:
        self._per_s = per_day / DAY_S
        self._limit = max(1.0, self._per_s * BURST_S)
        self._clock = clock
        self._saved = max(1.0, self._per_s * START_S)
        self._counted_at = clock()

    @property
    def available(self) -> int:
        """Number of chunks that may be written now."""
        now = self._clock()
        self._saved = min(self._limit, self._saved + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        return int(self._saved)

    def spend(self, num_chunks: int) -> None:
        """Take ``num_chunks`` chunks, which are being written, off the allowance."""
        self._saved -= num_chunks
