"""Keeps KV events until they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cargohold.protocol import AllBlocksCleared, KVEvent

MAX_KEPT_EVENTS: Final = 100_000
"""About 80 MB. One step that computes long prompts makes hundreds of events."""


class KeptEvents:
    """Keeps events up to a limit, because a program may have stopped taking them.

    When there are too many, all of them are dropped. The events taken next then begin with one for each of their media, which
    says that it was cleared. So an index of the events may lack prefixes that a medium holds, but never has others.

    Args:
        limit: most events to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: list[KVEvent] = []
        self._dropped_media: set[str] = set()

    def add(self, events: Sequence[KVEvent]) -> None:
        """Add the events of a step."""
        self._events += events
        if len(self._events) > self._limit:
            self._dropped_media.update(event.medium for event in self._events)
            self._events = []

    def take(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        events = [*map(AllBlocksCleared, sorted(self._dropped_media)), *self._events]
        self._events = []
        self._dropped_media.clear()
        return events
