"""Requests whose blocks a connector's workers still write or read, and the end of those transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cargohold.engine.core.request import Request
from cargohold.protocol import FinishedTransfers


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """An asynchronous load that is over.

    Attributes:
        request: the request that it was for.
        failed: whether nothing that was loaded may be used.
        invalid_block_ids: ids of its blocks that hold garbage.
    """

    request: Request
    failed: bool
    invalid_block_ids: frozenset[int]


@dataclass(slots=True)
class _Load:
    request: Request
    started: float
    invalid_block_ids: set[int] = field(default_factory=set)


class TransferTable:
    """Keeps track of the requests whose blocks are in use by transfers.

    A request is *loading* from the allocation of its destination blocks until its load ends, even if it is aborted meanwhile:
    a copy may still write there. It is *sending* from its end until the connector reports that it no longer reads its blocks.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._sending: dict[str, Request] = {}

    @property
    def num_loads(self) -> int:
        """Loads in flight."""
        return len(self._loads)

    @property
    def num_sends(self) -> int:
        """Number of requests that ended and whose blocks the connector keeps."""
        return len(self._sending)

    def __bool__(self) -> bool:
        return bool(self._loads or self._sending)

    def holds(self, request: Request) -> bool:
        """Whether a transfer still uses the request's blocks."""
        return self.has(request.request_id)

    def has(self, request_id: str) -> bool:
        """Whether a transfer still uses the blocks of a request with this id, which may have ended."""
        return request_id in self._loads or request_id in self._sending

    def start_load(self, request: Request, now: float) -> None:
        """Note that a load begins: the request's destination blocks have been allocated."""
        self._loads[request.request_id] = _Load(request, now)

    def start_send(self, request: Request) -> None:
        """Note that the request ended and the connector keeps its blocks."""
        self._sending[request.request_id] = request

    def oldest_load(self) -> tuple[Request, float] | None:
        """The load that began first, and when."""
        if not self._loads:
            return None
        first = next(iter(self._loads.values()))
        return first.request, first.started

    def note_invalid(self, block_ids: frozenset[int], request_ids: list[str]) -> None:
        """Remember that blocks of these requests hold garbage, for those whose load has not ended yet."""
        for request_id in request_ids:
            if request_id in self._loads:
                self._loads[request_id].invalid_block_ids |= block_ids

    def strays(self, finished: FinishedTransfers) -> list[str]:
        """Ids in ``finished`` of requests that have no such transfer."""
        return sorted(
            (finished.finished_recving - self._loads.keys()) | (finished.finished_sending - self._sending.keys())
        )

    def end_loads(self, finished: FinishedTransfers) -> Iterator[EndedLoad]:
        """Take out the loads that ended; there must be no strays."""
        for request_id in sorted(finished.finished_recving):
            load = self._loads.pop(request_id)
            yield EndedLoad(load.request, request_id in finished.failed_recving, frozenset(load.invalid_block_ids))

    def end_sends(self, finished: FinishedTransfers) -> Iterator[Request]:
        """Take out the requests whose blocks are no longer read; there must be no strays."""
        for request_id in sorted(finished.finished_sending):
            yield self._sending.pop(request_id)

    def abandon(self) -> tuple[list[Request], list[Request]]:
        """Forget all transfers, because nothing carries them out any more; returns loading and sending requests."""
        loading = [load.request for load in self._loads.values()]
        sending = list(self._sending.values())
        self._loads.clear()
        self._sending.clear()
        return loading, sending
