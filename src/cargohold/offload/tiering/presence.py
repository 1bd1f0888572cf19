"""Remembers which chunks a tier has, from its earlier answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cargohold.offload.manager.base import OffloadKey
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
