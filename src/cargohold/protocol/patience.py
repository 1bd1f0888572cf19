"""Whether something takes too long, told by somebody who does not look all the time."""

from __future__ import annotations

from collections.abc import Hashable

from cargohold.protocol.factory import Clock

MIN_LOOKS = 4
"""More than there are steps in flight: what has ended is heard of by then."""
MAX_GRACE_S = 1.0


class Patience:
    """Tells what does not end from what ended while nobody looked.

    Whoever looks once a step may be away for minutes: nobody wants another step, or the process was stopped for a while. What
    is overdue at the first look after that has probably ended long ago, and the next steps will say so. So it must be found
    overdue again, several times and for a while.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._overdue: Hashable = None
        self._since = 0.0
        self._num_looks = 0

    def ends_with(self, overdue: Hashable, limit_s: float) -> bool:
        """Whether patience is over with what is overdue now. Call it at each look, and look once a step at most.

        Args:
            overdue: what it is, the oldest of several; ``None`` if nothing is.
            limit_s: after how long it was overdue; a tenth of it, but not more than a second, is the while.
        """
        if overdue is None:
            self._overdue = None
            return False  # nearly always
        now = self._clock()
        if overdue != self._overdue:
            self._overdue, self._since, self._num_looks = overdue, now, 0
        self._num_looks += 1
        has_waited = now - self._since >= min(MAX_GRACE_S, limit_s / 10)
        return self._num_looks >= MIN_LOOKS and has_waited
