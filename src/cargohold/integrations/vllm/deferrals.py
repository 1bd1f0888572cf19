"""Requests that the connector told to ask again, and for how long it has kept them waiting."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.protocol import Clock, Patience


@dataclass(slots=True)
class _Wait:
    """The wait of one request.

    Attributes:
        patience: decides when the wait is too long; each request has its own, for vLLM does not ask for all in the same steps.
        seconds: how long the request has waited.
    """

    patience: Patience
    seconds: float = 0.0


class Deferrals:
    """Measures how long each request has waited for the connector's answer, and for nothing else.

    vLLM asks again only when it has a place for the request, which may be minutes later. So the time between two steps counts
    only for requests about which vLLM asked again at its end.

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
        """Note that a request was told to ask again. Returns whether that was the first time."""
        is_first = request_id not in self._waits and request_id not in self._asked
        self._asked.add(request_id)
        return is_first

    def forget(self, request_id: str) -> None:
        """Forget a request that has its answer, or needs none any more."""
        self._waits.pop(request_id, None)
        self._asked.discard(request_id)

    def clear(self) -> None:
        """Forget all requests: the connector is asked no more."""
        self._waits.clear()
        self._asked.clear()

    def note_step(self, limit_s: float) -> str | None:
        """Count the time since the last step. Returns a request that has waited longer than ``limit_s``, if there is one."""
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
            if wait.patience.has_run_out(overdue, limit_s):
                late = late or request_id
        return late
