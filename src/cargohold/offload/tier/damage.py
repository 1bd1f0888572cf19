"""Damaged chunks in the log: a medium that spoils everything must not fill it."""

from __future__ import annotations

import logging
import threading
from typing import Final

logger = logging.getLogger(__name__)

NUM_TOLD: Final = 8


class DamageLog:
    """Tells of each of the first damaged chunks, and of more only when their number has doubled. Thread-safe.

    Args:
        tier: how log lines call the tier.
        then: what becomes of such a chunk.
    """

    def __init__(self, tier: str, then: str) -> None:
        self._tier = tier
        self._then = then
        self._lock = threading.Lock()
        self._num_found = 0

    def found(self, chunk: str) -> None:
        """Another one."""
        with self._lock:
            self._num_found += 1
            count = self._num_found
        if count <= NUM_TOLD:
            logger.warning("%s tier: chunk %s is damaged; it is %s", self._tier, chunk, self._then)
        elif count.bit_count() == 1:
            logger.warning("%s tier: %d chunks were damaged so far, and are %s", self._tier, count, self._then)
