"""What a tier's look-ups are expected to find, and the clock by which lower tiers measure deadlines."""

from __future__ import annotations

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
