"""Virtual time, which passes only when it is told to, or between two readings."""

from __future__ import annotations

from collections.abc import Callable


class VirtualClock:
    """A clock of virtual time. Satisfies ``cargohold.protocol.Clock``.

    Attributes:
        now: seconds since the start. Reading it lets no time pass, unlike a call.
        before_reading: gives the seconds that pass before each call returns; ``None`` if none do.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.before_reading: Callable[[], float] | None = None

    def __call__(self) -> float:
        """The current time."""
        if self.before_reading is not None:
            self.advance(self.before_reading())
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.now += seconds

    def advance_to(self, time: float) -> None:
        """Let time pass until ``time``, unless it is past already."""
        self.now = max(self.now, time)
