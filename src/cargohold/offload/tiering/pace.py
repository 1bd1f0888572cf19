"""Predicts how long work takes, and what it is good for, from how it went lately."""

from __future__ import annotations

from cargohold.protocol import Clock

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
