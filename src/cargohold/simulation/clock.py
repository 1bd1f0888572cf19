"""Virtual time, which passes only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """A clock of virtual time. Satisfies ``cargohold.protocol.Clock``.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The current time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.now += seconds
