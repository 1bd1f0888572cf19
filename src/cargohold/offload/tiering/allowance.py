"""How much may be written, so that a disk lasts."""

from __future__ import annotations

from cargohold.protocol import Clock

DAY_S = 86_400.0
BURST_S = 3600.0
"""What was not used is kept for so long, and a start is given as much: a day may exceed its share by a twenty-fourth."""


class Allowance:
    """Flows in evenly over the day, and can be saved up for an hour.

    Args:
        per_day: chunks.
        clock: monotonic time in seconds.
    """

    def __init__(self, per_day: int, clock: Clock) -> None:
        self._per_s = per_day / DAY_S
        self._limit = max(1.0, per_day * BURST_S / DAY_S)
        self._clock = clock
        self._saved = self._limit
        self._counted_at = clock()

    @property
    def available(self) -> int:
        """Chunks that may be written now."""
        now = self._clock()
        self._saved = min(self._limit, self._saved + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        return int(self._saved)

    def spend(self, num_chunks: int) -> None:
        """So many are written."""
        self._saved -= num_chunks
