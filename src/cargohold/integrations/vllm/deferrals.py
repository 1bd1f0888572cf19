"""Requests that the connector told to ask again, and for how long it has kept them waiting."""

from __future__ import annotations

from cargohold.protocol import Clock


class Deferrals:
    """How long each request has waited for the connector's answer, and for nothing else.

    vLLM asks again only while it has a place for the request, which may be minutes later. So only the time between two steps
    counts in both of which it was asked.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited: dict[str, float] = {}
        self._asked: set[str] = set()
        self._asked_before: set[str] = set()
        self._last_step = clock()

    def __len__(self) -> int:
        return len(self._waited)

    def note(self, request_id: str) -> bool:
        """A request was told to ask again; whether for the first time."""
        is_first = request_id not in self._waited
        self._waited.setdefault(request_id, 0.0)
        self._asked.add(request_id)
        return is_first

    def forget(self, request_id: str) -> None:
        """It has its answer, or needs none any more."""
        self._waited.pop(request_id, None)
        self._asked.discard(request_id)
        self._asked_before.discard(request_id)

    def clear(self) -> None:
        """Nobody is asked any more."""
        self._waited.clear()
        self._asked.clear()
        self._asked_before.clear()

    def end_step(self, limit_s: float) -> str | None:
        """Call it when a step has been scheduled; a request that has waited for longer than this, if there is one."""
        now = self._clock()
        for request_id in self._asked & self._asked_before:
            self._waited[request_id] += now - self._last_step
        self._last_step = now
        self._asked, self._asked_before = set(), self._asked
        return next((request_id for request_id, waited in self._waited.items() if waited > limit_s), None)
