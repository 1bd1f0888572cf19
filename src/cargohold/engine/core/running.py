"""Requests that hold blocks and compute tokens in every step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from cargohold.engine.core.request import Request, RequestStatus
from cargohold.engine.core.waiting_queue import SortKey


class RunningRequests:
    """The running requests, most urgent first.

    Args:
        urgency: sort key; the same as the waiting queue's, so that no request runs at the cost of a more urgent one.
    """

    def __init__(self, urgency: Callable[[Request], SortKey]) -> None:
        self._urgency = urgency
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Let ``request`` run."""
        request.status = RequestStatus.RUNNING
        insort(self._requests, request, key=self._urgency)

    def remove(self, request: Request) -> None:
        """Take ``request`` out. The caller must change its status."""
        self._requests.remove(request)

    def least_urgent(self) -> Request:
        """The request that must give way first."""
        return self._requests[-1]

    def snapshot(self) -> list[Request]:
        """The requests now, most urgent first; a copy."""
        return list(self._requests)
