"""KV events until somebody takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cargohold.protocol import AllBlocksCleared, KVEvent

MAX_KEPT_EVENTS: Final = 100_000
"""Some 80 MB. Of long prompts, one step makes hundreds."""


class KeptEvents:
    """Keeps events, but not without end: a program may have stopped taking them.

    When there are too many, all of them are dropped. Whoever takes events then is told first that their media hold nothing any
    more. So an index of the events may lack what a medium holds, but it never has what is not there.

    Args:
        limit: events kept at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: list[KVEvent] = []
        self._dropped_media: set[str] = set()

    def add(self, events: Sequence[KVEvent]) -> None:
        """What happened in a step."""
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
