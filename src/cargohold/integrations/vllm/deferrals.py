"""Requests that the connector told to ask again, and for how long it has kept them waiting."""

from __future__ import annotations

from cargohold.protocol import Clock, Patience


class Deferrals:
    """How long each request has waited for the connector's answer, and for nothing else.

    vLLM asks again only while it has a place for the request, which may be minutes later. So of the time between two steps
    only that counts after which it was asked again.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._patience = Patience(clock)
        self._waited: dict[str, float] = {}
        self._asked: set[str] = set()
        self._last_step = clock()

    def __len__(self) -> int:
        return len(self._waited.keys() | self._asked)

    def note(self, request_id: str) -> bool:
        """A request was told to ask again; whether for the first time."""
        is_first = request_id not in self._waited and request_id not in self._asked
        self._asked.add(request_id)
        return is_first

    def forget(self, request_id: str) -> None:
        """It has its answer, or needs none any more."""
        self._waited.pop(request_id, None)
        self._asked.discard(request_id)

    def clear(self) -> None:
        """Nobody is asked any more."""
        self._waited.clear()
        self._asked.clear()

    def end_step(self, limit_s: float) -> str | None:
        """Call it when a step has been scheduled; a request that has waited for longer than this, if there is one."""
        asked, self._asked = sorted(self._asked), set()
        before, self._last_step = self._last_step, self._clock()
        if not asked:
            return None
        for request_id in asked:
            waited = self._waited.get(request_id)
            self._waited[request_id] = 0.0 if waited is None else waited + self._last_step - before
        late = next((request_id for request_id in asked if self._waited[request_id] > limit_s), None)
        return late if self._patience.ends_with(late, limit_s) else None
