"""A guest with a metric of its own."""

from __future__ import annotations

from cargohold.connector.kernel.guest import Guest, GuestView
from cargohold.connector.kernel.requests import RequestState
from cargohold.protocol import BlockIds
from cargohold.protocol.metrics import counter

ENDED = counter("ended_requests", "requests", "That the connector was told of.", "how", start=["quietly"])


class CountsEnds(Guest):
    """Counts the requests that end."""

    name = "counts-ends"

    def __init__(self, view: GuestView) -> None:
        self._view = view

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        self._view.count(ENDED.of("quietly"), 1)
