"""Looks at the engine now and then, so that whoever wants to see it waits for no step."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from cargohold.errors import CargoholdError, EngineDeadError
from cargohold.serve.desk import Desk

_INTERVAL_S: Final = 1.0
_MAX_LINES: Final = 50


class LogLines(logging.Handler):
    """The last warnings and errors of the log: they say what is suspended, and why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[dict[str, Any]] = deque(maxlen=_MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a line."""
        with suppress(TypeError, ValueError):  # a line that cannot be written is none
            self._lines.append({"time": record.created, "level": record.levelname, "text": record.getMessage()})

    def lines(self) -> list[dict[str, Any]]:
        """The lines, the latest first."""
        return list(reversed(self._lines))


class Watch:
    """The engine's counters as they were a second ago.

    Args:
        desk: has the model.

    Attributes:
        stats: the counters; empty before there are any.
        log: the last warnings.
    """

    def __init__(self, desk: Desk) -> None:
        self.stats: Mapping[str, float] = {}
        self.log = LogLines()
        self._desk = desk

    async def run(self) -> None:
        """Look again and again, until this is cancelled."""
        logger = logging.getLogger("cargohold")
        logger.addHandler(self.log)
        try:
            while True:
                await self.look()
                await asyncio.sleep(_INTERVAL_S)
        finally:
            logger.removeHandler(self.log)

    async def look(self, timeout_s: float | None = None) -> None:
        """Look now. A step may take longer than ``timeout_s``: then the counters stay as they were."""
        llm = self._desk.loaded
        if llm is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                self.stats = await llm.stats()
        except TimeoutError:
            pass
        except EngineDeadError as error:
            self._desk.note_end(error)
        except CargoholdError:
            pass  # a connector that cannot count; its requests are told what is wrong with it
