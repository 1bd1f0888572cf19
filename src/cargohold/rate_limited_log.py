"""Warnings whose number somebody else decides, such as a client or a failing medium: they do not fill the log."""

from __future__ import annotations

import logging
import threading
from typing import Final

NUM_TOLD: Final = 8


class SparingLog:
    """Logs each of the first ``NUM_TOLD`` warnings, and then only those whose number is a power of two. Thread-safe.

    Args:
        logger: where to.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._count = 0

    def warning(self, message: str, *args: object) -> None:
        """Count a warning, and log it if it is due. The arguments are those of ``Logger.warning``."""
        with self._lock:
            self._count += 1
            count = self._count
        if count < NUM_TOLD:
            self._logger.warning(message, *args, stacklevel=2)
        elif count.bit_count() == 1:
            self._logger.warning(
                f"{message} (warning %d of this kind; the next one logged is number %d)",
                *args,
                count,
                2 * count,
                stacklevel=2,
            )
