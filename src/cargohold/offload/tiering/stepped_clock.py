"""Time in which an engine steps."""

from __future__ import annotations

from typing import Final

from cargohold.protocol import Clock

PAUSE_S: Final = 2.0
"""Nobody steps: well above what an engine sleeps that has nothing to compute while transfers run."""


class SteppedClock:
    """Monotonic time that stands still while nobody steps.

    An engine from which nobody wants anything may not step for hours, and a process may be stopped. What ended meanwhile is
    heard of in the next steps, so deadlines are in this time: they pass for what does not end, not while nobody looks.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._time = 0.0
        self._num_in_flight = 0
        self._looked_at = clock()

    def __call__(self) -> float:
        """Seconds since it was made, but for pauses."""
        now = self._clock()
        if self._num_in_flight or now - self._looked_at < PAUSE_S:
            self._time += now - self._looked_at
        self._looked_at = now
        return self._time

    def begin_step(self) -> None:
        """The workers get a step, however long it takes. Others may be in flight."""
        self()
        self._num_in_flight += 1

    def end_step(self) -> None:
        """The workers have reported a step."""
        self()
        self._num_in_flight = max(0, self._num_in_flight - 1)
