"""A clock that counts only the time in which an engine steps."""

from __future__ import annotations

from typing import Final

from cargohold.protocol import Clock

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
