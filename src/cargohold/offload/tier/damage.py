"""Logging of damaged chunks, limited so that a medium that damages everything does not fill the log."""

from __future__ import annotations

import logging
import threading
from typing import Final

logger = logging.getLogger(__name__)

NUM_TOLD: Final = 8


class DamageLog:
    """Logs each of the first ``NUM_TOLD`` damaged chunks, and then only when their number has doubled. Thread-safe.

    Args:
        tier: the tier's name in log lines.
        then: what is done with a damaged chunk, for the log line, such as ``deleted``.
    """

    def __init__(self, tier: str, then: str) -> None:
        self._tier = tier
        self._then = then
        self._lock = threading.Lock()
        self._num_found = 0

    def found(self, chunk: str) -> None:
        """Count a damaged chunk, and log it if it is due; ``chunk`` names it in the log line."""
        with self._lock:
            self._num_found += 1
            count = self._num_found
        if count <= NUM_TOLD:
            logger.warning("%s tier: chunk %s is damaged; it is %s", self._tier, chunk, self._then)
        elif count.bit_count() == 1:
            logger.warning("%s tier: %d chunks were damaged so far, and are %s", self._tier, count, self._then)
