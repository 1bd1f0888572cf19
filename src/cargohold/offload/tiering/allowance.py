"""A limit to how much is written per day, so that a disk lasts."""

from __future__ import annotations

from cargohold.protocol import Clock

DAY_S = 86_400.0
BURST_S = 3600.0
"""Unused allowance is saved up for at most this many seconds, so a day may exceed its share by a twenty-fourth."""
START_S = 60.0
"""A start is given what accrues in this many seconds.

What an earlier process wrote is not known. If it were an hour's allowance, an engine that is started again and again would
write many times the limit.
"""


class Allowance:
    """An allowance of chunks that accrues evenly over the day, and can be saved up for an hour.

    At least one chunk can be saved up, and is given at the start, however small the allowance is.

    Args:
        per_day: chunks per day.
        clock: monotonic time in seconds.
    """

    def __init__(self, per_day: int, clock: Clock) -> None:
        self._per_s = per_day / DAY_S
        self._limit = max(1.0, self._per_s * BURST_S)
        self._clock = clock
        self._saved = max(1.0, self._per_s * START_S)
        self._counted_at = clock()

    @property
    def available(self) -> int:
        """Number of chunks that may be written now."""
        now = self._clock()
        self._saved = min(self._limit, self._saved + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        return int(self._saved)

    def spend(self, num_chunks: int) -> None:
        """Take ``num_chunks`` chunks, which are being written, off the allowance."""
        self._saved -= num_chunks
