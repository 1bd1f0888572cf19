"""What a tier's look-ups are expected to find, and the clock by which lower tiers measure deadlines."""

from __future__ import annotations

from typing import Final

from cargohold.protocol import Clock

_KEEP_LONG = 0.95
"""Weight that the long-run share of chunks found keeps with each new look-up."""
_KEEP_LATEST = 0.5
"""Weight that the latest share of chunks found keeps with each new look-up."""


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
