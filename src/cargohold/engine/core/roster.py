"""The requests alive, where each of them is, and the limits under which they are scheduled."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request import Request, RequestStatus
from cargohold.protocol import FinishedTransfers

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


# --- requests that hold blocks and compute tokens in every step -------------------------------------------------------


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


# --- requests whose blocks a connector's workers still write or read --------------------------------------------------


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


# --- the requests alive -----------------------------------------------------------------------------------------------


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


class LoadFailurePolicy(Enum):
    """What becomes of a request whose load failed."""

    RECOMPUTE = "recompute"
    """The request's tokens are computed instead, which only takes time."""
    FAIL = "fail"
    """The request ends with an error."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies of the scheduler.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
        max_model_len: longest sequence, prompt and generated tokens together.
        policy: which request is served first.
        prefix_caching: whether blocks on the device are reused across requests.
        load_failure_policy: what becomes of a request whose load failed.
        load_timeout_s: a connector that has not ended a load after this time is turned off. A connector has deadlines of
            its own; this one is for connectors that miss them.
        emit_events: whether KV events are collected.
        emit_salted_events: whether that includes events of salted requests' blocks.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: QueuePolicy = QueuePolicy.FCFS
    prefix_caching: bool = True
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    load_timeout_s: float = 120.0
    emit_events: bool = False
    emit_salted_events: bool = False

    @property
    def give_up_loads_after_s(self) -> float:
        """See ``SchedulerEnvironment``: early enough that a connector that gives a load up is not turned off for it."""
        return self.load_timeout_s / 2
