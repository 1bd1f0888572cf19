"""What is known of a tier: its answers, its speed, what waits to be written, in time in which the engine steps."""

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


# --- predicts how long work takes -------------------------------------------------------------------------------------

_KEEP = 0.8
"""Weight that earlier measurements keep with each new one."""
_KEEP_LONG = 0.95
"""Weight that the long-run share of chunks found keeps with each new look-up."""
_KEEP_LATEST = 0.5
"""Weight that the latest share of chunks found keeps with each new look-up."""


class Pace:
    """Fits ``seconds = fixed + each * amount`` to recent measurements, the latest counting most.

    While only one amount was measured, all of the time counts as fixed. The estimate for larger amounts is then too low, so
    that larger amounts are tried, and measured.

    Args:
        clock: monotonic time in seconds.
        max_age_s: time without a measurement after which nothing is predicted any more.
    """

    def __init__(self, clock: Clock, max_age_s: float) -> None:
        self._clock = clock
        self._max_age_s = max_age_s
        self._noted_at = 0.0
        # Weighted sums over measurements: of 1, amount, seconds, amount², amount·seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement: ``amount`` took ``seconds``."""
        fresh = (1.0, amount, seconds, amount * amount, amount * seconds)
        keep = _KEEP if self._is_known() else 0.0
        weight, x, y, xx, xy = (keep * old + new for old, new in zip(self._sums, fresh, strict=True))
        self._sums = (weight, x, y, xx, xy)
        self._noted_at = self._clock()

    def predict(self, amount: float, times: int = 1) -> float | None:
        """Return the seconds that ``amount`` in all takes, done in ``times`` parts; ``None`` if nothing is known."""
        if not self._is_known():
            return None
        fixed, each = self._fit()
        return fixed * times + each * amount

    def amount_in(self, seconds: float) -> float | None:
        """Return the largest amount that takes no longer than ``seconds``, which may be infinite; ``None`` if not known."""
        if not self._is_known():
            return None
        fixed, each = self._fit()
        if fixed > seconds:
            return 0.0
        return (seconds - fixed) / each if each else float("inf")

    def _is_known(self) -> bool:
        return self._sums[0] > 0 and self._clock() - self._noted_at <= self._max_age_s

    def _fit(self) -> tuple[float, float]:
        weight, x, y, xx, xy = self._sums
        spread = xx - x * x / weight
        each = max(0.0, (xy - x * y / weight) / spread) if spread > 1e-9 * xx else 0.0
        fixed = (y - each * x) / weight
        if fixed < 0:
            # The time is proportional to the amount, with some noise.
            return 0.0, xy / xx
        return fixed, each


class LookUpGain:
    """Predicts which part of what a tier is asked for it has.

    Most prompts may be new: then a request that asks an object store waits in vain, even if that is faster than computing.
    Both the average of many look-ups and that of the latest few count, whichever is more: a store in which one prompt in twenty
    is found may be worth asking, and one that others have just filled is soon asked again.
    """

    def __init__(self) -> None:
        self._long = self._latest = 1.0

    @property
    def expected(self) -> float:
        """The part of the chunks asked for, from 0 to 1, that is expected to be found; 1 before anything is known."""
        return max(self._long, self._latest)

    def note(self, part: float) -> None:
        """Add a look-up in which this part of the chunks asked for was found."""
        self._long += (1 - _KEEP_LONG) * (part - self._long)
        self._latest += (1 - _KEEP_LATEST) * (part - self._latest)


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


# --- a clock that counts only the time in which an engine steps -------------------------------------------------------

PAUSE_S: Final = 2.0
"""Seconds without a look at the clock after which the engine counts as not stepping.

Well above the time that an engine with nothing to compute sleeps between steps while transfers run.
"""


class SteppedClock:
    """Monotonic time that stands still while the engine does not step.

    An idle engine may not step for hours, and a process may be stopped. Jobs that ended meanwhile are reported only in the
    next steps. So deadlines are in this time: they pass only while reports can arrive.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._time = 0.0
        self._num_in_flight = 0
        self._looked_at = clock()

    def __call__(self) -> float:
        """Return the seconds since the clock was made, without pauses."""
        now = self._clock()
        if self._num_in_flight or now - self._looked_at < PAUSE_S:
            self._time += now - self._looked_at
        self._looked_at = now
        return self._time

    def begin_step(self) -> None:
        """Note that the workers get a step; time counts until ``end_step``, however long it takes. Steps may overlap."""
        self()
        self._num_in_flight += 1

    def end_step(self) -> None:
        """Note that the workers have reported a step."""
        self()
        self._num_in_flight = max(0, self._num_in_flight - 1)
