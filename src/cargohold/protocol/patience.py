"""Deciding that something takes too long, when it is looked at only now and then."""

from __future__ import annotations

from collections.abc import Hashable

from cargohold.protocol.factory import Clock

MIN_LOOKS = 4
"""Looks at which something must be overdue: more than the steps in flight, so an end that happened is reported by then."""
MAX_GRACE_S = 1.0
"""Longest time in seconds for which something must stay overdue after it was first found so."""


class Patience:
    """Tells something that does not end from something that ended while nobody looked.

    A caller that looks once a step may be away for minutes: no step is needed, or the process was stopped for a while. A job
    that is overdue at the first look after that has probably ended long ago, and the next steps will report it. So the job
    must be found overdue again, at ``MIN_LOOKS`` looks and for a grace time.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._overdue: Hashable = None
        self._since = 0.0
        self._num_looks = 0

    def has_run_out(self, overdue: Hashable, limit_s: float) -> bool:
        """Whether ``overdue`` has been overdue at enough looks and for long enough. Call it at each look, at most once a step.

        Args:
            overdue: identifies what is overdue now, the oldest of several; ``None`` if nothing is.
            limit_s: time in seconds after which the caller calls something overdue. The grace time is a tenth of it, but not
                more than ``MAX_GRACE_S``.
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
