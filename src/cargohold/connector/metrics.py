"""What connectors count as operators want it: added up over connectors, in bytes and tokens instead of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cargohold.protocol import Outage, Series, Stats, Tally, level_changes, metrics
from cargohold.protocol.metrics import over_connectors

_MAX_REASONS: Final = 16
_MAX_REASON_CHARS: Final = 200
_MOVED: Final = (
    (metrics.COPIED_BLOCKS.of("load"), metrics.MOVED.of("host", "out")),
    (metrics.COPIED_BLOCKS.of("store"), metrics.MOVED.of("host", "in")),
)


def cache_label(num_restored_tokens: int, num_device_tokens: int, num_prompt_tokens: int) -> str:
    """What a prompt counts as in ``TTFT``. Every chat finds its template's start: less than half is a miss.

    What the device still had is kept apart from what was restored: the engine finds that without any connector.
    """
    if 2 * num_restored_tokens >= num_prompt_tokens:
        return "hit"
    return "device" if 2 * (num_restored_tokens + num_device_tokens) >= num_prompt_tokens else "miss"


def for_operators(
    stats: Stats, block_bytes: float, token_bytes: float, device_token_bytes: float | None = None
) -> Tally:
    """Return connectors' values added up over connectors, in bytes instead of blocks; levels in bytes also in tokens.

    Args:
        stats: the values.
        block_bytes: bytes that are copied of a block on one worker. Where workers or groups differ, their mean.
        token_bytes: bytes of one token's KV in a tier, for all workers.
        device_token_bytes: the same on their devices; ``None`` if it is no other.
    """
    total = over_connectors(stats)
    shown = Tally({moved: total[blocks] * block_bytes for blocks, moved in _MOVED})
    for series, value in total.items():
        if series.family.is_exported:
            shown[series] += value
            if series.family in metrics.IN_TOKENS:
                of_token = (device_token_bytes or token_bytes) if series.labels[0] == "device" else token_bytes
                plain = value
                if series.family is metrics.TIER_READY:  # of packed chunks, what they were before
                    plain = total.get(metrics.TIER_PLAIN.of(*series.labels), value)
                shown[metrics.IN_TOKENS[series.family].of(*series.labels)] += plain / of_token
    return shown


class OutageLevels:
    """Tells of outages as levels, for engines whose metrics take nothing but numbers.

    Args:
        epoch: seconds since 1970 at which the engine's clock was 0.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._levels: Stats = {}
        self._reasons: set[str] = set()

    def take_changes(self, outages: Sequence[Outage]) -> Stats:
        """Return how the levels have changed since the last call."""
        if not outages and not self._levels:
            return {}  # nearly always
        before, self._levels = self._levels, dict(self._told(outages))
        return level_changes(before, self._levels)

    def _told(self, outages: Sequence[Outage]) -> Iterator[tuple[Series, float]]:
        for outage in outages:
            times = outage.since_1970(self._epoch)
            labels = outage.tier, outage.what, self._reason(outage.reason)
            yield metrics.OUTAGE_SINCE.of(*labels), times.since
            if times.retry_at is not None:
                yield metrics.OUTAGE_RETRY.of(*labels), times.retry_at

    def _reason(self, reason: str) -> str:
        """A reason that fits into a label. Each makes a time series, and stores put ids of requests into theirs."""
        reason = " ".join(reason.split())[:_MAX_REASON_CHARS]
        if len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "another reason; see the log"
