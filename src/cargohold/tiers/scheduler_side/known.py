"""What is known of a tier: its answers, and what waits to be written to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cargohold.cache.manager import OffloadKey
from cargohold.protocol import Clock


class Presence:
    """Answers of a tier, remembered for a while.

    A tier may evict chunks, and other engines may write to it, so an answer grows old. Acting on an old answer does no harm: a
    chunk that has gone is a miss when it is loaded, and a new chunk is found a little later.

    Args:
        limit: maximum number of answers to remember; the oldest are forgotten first.
        max_age_s: time in seconds for which an answer counts.
        clock: monotonic time in seconds.

    Attributes:
        limit: as given.
    """

    def __init__(self, limit: int, max_age_s: float, clock: Clock) -> None:
        self.limit = limit
        self._max_age_s = max_age_s
        self._clock = clock
        self._answers: OrderedDict[OffloadKey, tuple[bool, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, keys: Iterable[OffloadKey]) -> list[bool | None]:
        """Return whether each chunk is there; ``None`` if there is no answer, or it is too old."""
        oldest = self._clock() - self._max_age_s
        answers = map(self._answers.get, keys)
        return [None if answer is None or answer[1] < oldest else answer[0] for answer in answers]

    def last(self, keys: Iterable[OffloadKey]) -> list[bool | None]:
        """Return the last answer for each chunk, however old; ``None`` if there is none."""
        return [None if answer is None else answer[0] for answer in map(self._answers.get, keys)]

    def not_heard_of(self, keys: Iterable[OffloadKey], for_s: float) -> list[OffloadKey]:
        """Return the chunks about which there was no answer in the last ``for_s`` seconds."""
        answers, oldest = self._answers, self._clock() - for_s
        return [key for key in keys if (answer := answers.get(key)) is None or answer[1] < oldest]

    def note(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Remember answers of the tier, or that chunks were just written to it."""
        answers, now = self._answers, self._clock()
        there, absent = (True, now), (False, now)
        for key, is_there in zip(keys, are_there, strict=True):
            answers.pop(key, None)
            answers[key] = there if is_there else absent
        while len(answers) > self.limit:
            answers.popitem(last=False)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the answers for these chunks."""
        for key in keys:
            self._answers.pop(key, None)

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()


# --- what is written to a tier ----------------------------------------------------------------------------------------

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
