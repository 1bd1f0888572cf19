"""Requests that wait to be admitted, in the order in which they will be tried."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from enum import Enum

from cargohold.engine.core.request import Request

SortKey = tuple[int, int]


class QueuePolicy(Enum):
    """Which request is served first."""

    FCFS = "fcfs"
    """First come, first served."""
    PRIORITY = "priority"
    """Lowest ``priority`` first; first come, first served among equals."""


def _fcfs(request: Request) -> SortKey:
    return 0, request.arrival


def _priority(request: Request) -> SortKey:
    return request.priority, request.arrival


class WaitingQueue:
    """A queue sorted by urgency.

    A request that comes back (preempted, or told "not yet" by a connector) regains its place among the others, because its
    urgency has not changed. So returning requests need no special case, and several of them keep their order.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self.urgency: Callable[[Request], SortKey] = _fcfs if policy is QueuePolicy.FCFS else _priority
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put ``request`` where its urgency says."""
        insort(self._requests, request, key=self.urgency)

    def remove(self, request: Request) -> None:
        """Take ``request`` out; it must be in."""
        at = bisect_left(self._requests, self.urgency(request), key=self.urgency)
        assert self._requests[at] is request, f"request {request.request_id} is not waiting"
        del self._requests[at]
