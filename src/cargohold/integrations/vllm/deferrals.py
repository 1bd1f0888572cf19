"""Requests that the connector told to ask again, and for how long it has kept them waiting."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.protocol import Clock, Patience


@dataclass(slots=True)
class _Wait:
    """One request's.

    Attributes:
        patience: its own: others may be asked for in steps in which there is no place for this one.
        seconds: how long it has waited.
    """

    patience: Patience
    seconds: float = 0.0


class Deferrals:
    """How long each request has waited for the connector's answer, and for nothing else.

    vLLM asks again only while it has a place for the request, which may be minutes later. So of the time between two steps
    only that counts after which it was asked again.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._asked: set[str] = set()
        self._last_step = clock()

    def __len__(self) -> int:
        return len(self._waits.keys() | self._asked)

    def note(self, request_id: str) -> bool:
        """A request was told to ask again; whether for the first time."""
        is_first = request_id not in self._waits and request_id not in self._asked
        self._asked.add(request_id)
        return is_first

    def forget(self, request_id: str) -> None:
        """It has its answer, or needs none any more."""
        self._waits.pop(request_id, None)
        self._asked.discard(request_id)

    def clear(self) -> None:
        """Nobody is asked any more."""
        self._waits.clear()
        self._asked.clear()

    def note_step(self, limit_s: float) -> str | None:
        """A step was scheduled; returns a request that has waited for longer than this, if there is one."""
        asked, self._asked = sorted(self._asked), set()
        before, self._last_step = self._last_step, self._clock()
        late = None
        for request_id in asked:
            wait = self._waits.get(request_id)
            if wait is None:
                self._waits[request_id] = _Wait(Patience(self._clock))
                continue
            wait.seconds += self._last_step - before
            overdue = request_id if wait.seconds > limit_s else None
            if wait.patience.ends_with(overdue, limit_s):
                late = late or request_id
        return late
