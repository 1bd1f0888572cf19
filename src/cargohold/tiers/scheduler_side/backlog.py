"""Chunks that are to be written to a tier: their order, those that it did not take, and how many it may take in a day."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Final

from cargohold.cache.manager import OffloadKey
from cargohold.protocol import Clock

DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""Unused allowance is saved up for at most this many seconds, so a day may exceed its share by a twenty-fourth."""
START_S: Final = 60.0
"""A start is given what accrues in this many seconds.

What an earlier process wrote is not known. If it were an hour's allowance, an engine that is started again and again would
write many times the limit.
"""
MAX_TRIES: Final = 12
"""A chunk that a tier does not take for now is offered to it so many times, and after that when it is used."""
RETRY_S: Final = 0.1
"""Seconds after which it is offered again; each further time, twice as many."""
MAX_RETRY_S: Final = 10.0
MAX_LOOKS: Final = 4096
"""Maximum number of chunks looked at for one batch: while writes are suspended, all that wait may leave host memory."""


class Backlog:
    """Chunks in host memory that are to be written to a tier, in the order of writing.

    Only keys are kept. A chunk that leaves host memory before its turn comes is passed over.

    Args:
        limit: maximum number of chunks; beyond it, those at the front are dropped.
        max_retry_s: maximum number of seconds after which a chunk that the tier has not taken comes again.

    Attributes:
        parents: the chunks, each with the chunk before it in its prefix, or ``None``.
    """

    def __init__(self, limit: int, max_retry_s: float = MAX_RETRY_S) -> None:
        self._limit = limit
        self.max_retry_s = max_retry_s
        self.parents: dict[OffloadKey, OffloadKey | None] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.parents

    def add(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Append chunks that do not wait already; ``parents`` has the chunk before each in its prefix, or ``None``."""
        self.parents.update(zip(keys, map(parents.__getitem__, keys), strict=True))
        if len(self.parents) > self._limit:
            self._take_first(len(self.parents) - self._limit)

    def postpone(self, keys: Iterable[OffloadKey]) -> None:
        """Move waiting chunks of ``keys``, which were just used, to the end: the last of the prefix in front of the first."""
        for key in reversed(list(keys)):
            if key in self.parents:
                self.parents[key] = self.parents.pop(key)

    def take(
        self, limit: int, ready: Callable[[Sequence[OffloadKey]], Sequence[OffloadKey]]
    ) -> dict[OffloadKey, OffloadKey | None]:
        """Take out the chunks whose turn it is, at most ``limit``, of any prefixes.

        While many requests generate, each step completes a chunk of some of them: a job for each would cost more than the
        chunk itself.

        Args:
            limit: maximum number of chunks, at least 1.
            ready: returns those of the given chunks that are to be written and still in host memory, in their order.

        Returns:
            The chunks in the order of writing, each with the chunk before it in its prefix; none if nothing waits, or none of
            the first ``MAX_LOOKS`` chunks is ready. Chunks that are not ready are taken out, too.
        """
        parents: dict[OffloadKey, OffloadKey | None] = {}
        num_looks = min(len(self.parents), MAX_LOOKS)
        while num_looks and len(parents) < limit:
            num_next = min(num_looks, limit - len(parents))
            num_looks -= num_next
            looked_at = self._take_first(num_next)
            keys = ready(list(looked_at))
            parents.update(looked_at if len(keys) == num_next else {key: looked_at[key] for key in keys})
        return parents

    def clear(self) -> None:
        """Drop all waiting chunks."""
        self.parents.clear()

    def _take_first(self, count: int) -> dict[OffloadKey, OffloadKey | None]:
        # Many at once: a dict steps over what was removed in front of the first one each time that it looks for that.
        first = dict(islice(self.parents.items(), count))
        for key in first:
            del self.parents[key]
        return first


@dataclass(slots=True)
class _Untaken:
    """A chunk that a tier has not taken.

    Attributes:
        parent: the chunk before it.
        num_tries: how many times it was offered.
        again_at: time from which it may be offered again.
        backlog: where it goes to be offered again by itself; ``None`` if it waits for a use, or waits in a backlog.
    """

    parent: OffloadKey | None = None
    num_tries: int = 0
    again_at: float = 0.0
    backlog: Backlog | None = None
    is_refused: bool = False


class RetryQueue:
    """Chunks that a tier has not taken: it failed, put them off, or had no room for them.

    What failed or was put off is offered again by itself, a few times, each time later. After that, and if there was no room,
    it is offered again when it is used.

    Args:
        limit: maximum number of chunks; beyond it, those that were not taken first are forgotten.
        clock: monotonic time in seconds.

    Attributes:
        times: when chunks are offered again by themselves, the first one first. Some may have been forgotten since.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._chunks: dict[OffloadKey, _Untaken] = {}
        self.times: list[tuple[float, OffloadKey]] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._chunks

    def is_coming(self, key: OffloadKey) -> bool:
        """Whether a chunk is offered again by itself."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.backlog is not None

    def why(self, key: OffloadKey) -> str:
        """Return why the tier has not taken a chunk, as the end of a sentence about the tier; empty if that is not known."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return ""
        return "has no room for it" if chunk.is_refused else "did not accept it in time"

    def add(self, key: OffloadKey, parent: OffloadKey | None, backlog: Backlog, *, is_refused: bool) -> None:
        """Note that a chunk, which came from ``backlog``, was not taken."""
        chunk = self._chunks.setdefault(key, _Untaken())
        again_at = self._clock() + min(RETRY_S * (2**chunk.num_tries - 1), backlog.max_retry_s)
        num_tries = min(chunk.num_tries + 1, MAX_TRIES)
        is_coming = num_tries < MAX_TRIES and not is_refused
        self._chunks[key] = _Untaken(parent, num_tries, again_at, backlog if is_coming else None, is_refused)
        if is_coming:
            heappush(self.times, (again_at, key))
        if len(self._chunks) > self._limit:
            del self._chunks[next(iter(self._chunks))]

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks: the tier has them by now, or they are new again."""
        if self._chunks:  # seldom
            for key in keys:
                self._chunks.pop(key, None)

    def offer_due(self) -> None:
        """Put the chunks whose time has come back into their backlogs."""
        now = self._clock()
        while self.times and self.times[0][0] <= now:
            again_at, key = heappop(self.times)
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.backlog is not None and chunk.again_at == again_at:
                chunk.backlog.add([key], {key: chunk.parent})
                chunk.backlog = None

    def take_used(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys``, which were just used, that may be offered again for that."""
        if not self._chunks:
            return []  # nearly always
        now = self._clock()
        return [
            key
            for key in keys
            if (chunk := self._chunks.get(key)) is not None and chunk.backlog is None and chunk.again_at <= now
        ]

    def clear(self) -> None:
        self._chunks.clear()
        self.times.clear()


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

    def spend(self, num_chunks: float) -> None:
        """Take ``num_chunks`` chunks, which are being written, off the allowance."""
        self._saved -= num_chunks
