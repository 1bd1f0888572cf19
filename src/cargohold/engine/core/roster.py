"""The requests alive, and where each of them is."""

from __future__ import annotations

from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request import Request, RequestStatus
from cargohold.engine.core.running import RunningRequests
from cargohold.engine.core.transfers import TransferTable
from cargohold.engine.core.waiting_queue import QueuePolicy, WaitingQueue


class Roster:
    """Moves requests between waiting, loading and running, with their blocks.

    Args:
        policy: which request is served first.
        kv: the requests' blocks.

    Attributes:
        waiting: requests that may be admitted.
        running: requests that compute.
        transfers: requests whose blocks a connector's workers still use, ended ones among them.
    """

    def __init__(self, policy: QueuePolicy, kv: KVCacheManager) -> None:
        self.waiting = WaitingQueue(policy)
        self.running = RunningRequests(self.waiting.urgency)
        self.transfers = TransferTable()
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._requests)

    def get(self, request_id: str) -> Request | None:
        """A request that has not ended."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Add a request that has arrived to those that wait."""
        assert request.request_id not in self._requests, f"request {request.request_id} exists already"
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def run(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        self.waiting.remove(request)
        self.running.add(request)

    def load(self, request: Request) -> None:
        """Take a request whose blocks are being filled out of the waiting ones."""
        self.waiting.remove(request)
        request.status = RequestStatus.LOADING

    def wait(self, request: Request) -> None:
        """Put a request back among the waiting ones. It keeps the blocks that it has."""
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def preempt(self, request: Request) -> None:
        """Take all blocks from a request and let it start over. It finds cached blocks again if they are not evicted before."""
        self._take_out(request)
        self._kv.free(request)
        request.num_computed_tokens = request.num_device_tokens = request.num_external_tokens = 0
        request.num_preemptions += 1
        self._preempted_ids.add(request.request_id)
        self.wait(request)

    def least_urgent_holder(self) -> Request:
        """The request that must give up its blocks first: a running one, or one that waits with blocks loaded for it.

        If only running requests gave way, two requests could load and lose their blocks in turns for ever.
        """
        loaded = [request for request in self.waiting if self._kv.holds_blocks(request)]
        return max([self.running.least_urgent(), *loaded], key=self.waiting.urgency)

    def end(self, request: Request) -> None:
        """Take out a request that ends. The caller must free its blocks."""
        self._take_out(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        self._finished_ids.add(request.request_id)

    def has_just_ended(self, request_id: str) -> bool:
        """Whether a request with this id has ended since ``take_news`` was called last."""
        return request_id in self._finished_ids

    def take_news(self) -> tuple[frozenset[str], frozenset[str]]:
        """Ids of the requests that were preempted, and of those that ended, since the last call."""
        preempted, finished = frozenset(self._preempted_ids), frozenset(self._finished_ids)
        self._preempted_ids.clear()
        self._finished_ids.clear()
        return preempted, finished

    def free_unless_in_use(self, request: Request) -> None:
        """Give an ended request's blocks back, unless a transfer still uses them."""
        if not self.transfers.holds(request):
            self._kv.free(request)

    def _take_out(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
