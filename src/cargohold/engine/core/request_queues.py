"""The requests alive, where each of them is, the limits under which they are scheduled, and which of them may start now."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

from cargohold.engine.core.kv_cache_manager import KVCacheManager, LocalHit
from cargohold.engine.core.request import Request, RequestStatus, StepPlan
from cargohold.protocol import Clock, ConnectorGuard, KVConnectorTransferResults

SortKey = tuple[int, int]


class QueuePolicy(Enum):
    """Which request is served first."""

    FCFS = "fcfs"
    """First come, first served."""
    PRIORITY = "priority"
    """Lowest ``priority`` first; first come, first served among equals."""


class SortedRequests:
    """Requests sorted by urgency, the most urgent first.

    A request that comes back (preempted, or deferred by a connector) regains its place among the others, because its
    urgency has not changed. So returning requests need no special case, and several of them keep their order.

    Args:
        urgency: sort key.
    """

    def __init__(self, urgency: Callable[[Request], SortKey]) -> None:
        self._urgency = urgency
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, at: int) -> Request:
        return self._requests[at]

    def add(self, request: Request) -> None:
        """Put ``request`` where its urgency says."""
        insort(self._requests, request, key=self._urgency)

    def remove(self, request: Request) -> None:
        """Take ``request`` out; it must be in."""
        at = bisect_left(self._requests, self._urgency(request), key=self._urgency)
        assert self._requests[at] is request, f"request {request.request_id} is not here"
        del self._requests[at]


# --- requests whose blocks a connector's workers still write or read --------------------------------------------------


@dataclass(slots=True)
class AsyncLoad:
    """An asynchronous load.

    Attributes:
        request: the request that it is for.
        started: when it began.
        failed: whether nothing that was loaded may be used.
        invalid_block_ids: ids of its blocks that hold garbage.
    """

    request: Request
    started: float
    failed: bool = False
    invalid_block_ids: set[int] = field(default_factory=set)


class TransferTable:
    """Keeps track of the requests whose blocks are in use by transfers.

    A request is *loading* from the allocation of its destination blocks until its load ends, even if it is aborted meanwhile:
    a copy may still write there. It is *sending* from its end until the connector reports that it no longer reads its blocks.
    """

    def __init__(self) -> None:
        self._loads: dict[str, AsyncLoad] = {}
        self._sending: dict[str, Request] = {}

    @property
    def num_loads(self) -> int:
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
        self._loads[request.request_id] = AsyncLoad(request, now)

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

    def strays(self, finished: KVConnectorTransferResults) -> list[str]:
        """Ids in ``finished`` of requests that have no such transfer."""
        return sorted(
            (finished.finished_recving - self._loads.keys()) | (finished.finished_sending - self._sending.keys())
        )

    def end_loads(self, finished: KVConnectorTransferResults) -> Iterator[AsyncLoad]:
        """Take out the loads that ended; there must be no strays."""
        for request_id in sorted(finished.finished_recving):
            load = self._loads.pop(request_id)
            load.failed = request_id in finished.failed_recving
            yield load

    def end_sends(self, finished: KVConnectorTransferResults) -> Iterator[Request]:
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


class RequestQueues:
    """Moves requests between waiting, loading and running, with their blocks.

    Args:
        policy: which request is served first.
        kv: the requests' blocks.

    Attributes:
        waiting: requests that may be admitted.
        running: requests that compute. Their urgency is the same, so that none runs at the cost of a more urgent one.
        transfers: requests whose blocks a connector's workers still use, ended ones among them.
    """

    def __init__(self, policy: QueuePolicy, kv: KVCacheManager) -> None:
        weight = int(policy is QueuePolicy.PRIORITY)
        self._urgency: Callable[[Request], SortKey] = lambda request: (weight * request.priority, request.arrival)
        self.waiting, self.running = SortedRequests(self._urgency), SortedRequests(self._urgency)
        self.transfers = TransferTable()
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._kv = kv
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[str]:
        return list(self._requests)

    def get(self, request_id: str) -> Request | None:
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
        request.status = RequestStatus.RUNNING
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
        return max([self.running[-1], *loaded], key=self._urgency)

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


class Verdict(Enum):
    """The result of an attempt to admit a request."""

    RUNS = auto()
    """The request has its blocks and is part of the step."""
    LOADS = auto()
    """The request has its blocks and waits for a connector to fill them."""
    DEFERRED = auto()
    """A connector does not know yet what it has, or has broken while it was notified of the blocks; try again in the next step.

    Requests after this one may go first.
    """
    NO_ROOM = auto()
    """There are not enough blocks. Requests after this one must wait too, or it would never get them."""


class QueueAdmission:
    """Admits waiting requests.

    Looks up the device pool first, then asks the connector for more; allocates; tells the connector.

    Attributes:
        num_deferred_lookups: number of requests that the connector has answered "not yet" so far.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        queues: RequestQueues,
        connector: ConnectorGuard,
        clock: Clock,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._connector = connector
        self._clock = clock
        self.num_deferred_lookups = 0
        # When requests were deferred, by id: those of this step, and those of the step before.
        self._deferred: dict[str, float] = {}
        self._deferred_before: dict[str, float] = {}

    def begin_step(self, num_places: int) -> None:
        """Begin to plan a step. A deferred request that is not tried in it waits for a place, no longer for the connector.

        So do those that were after ``num_places`` others.
        """
        self._deferred_before, self._deferred = dict(islice(self._deferred.items(), max(0, num_places))), {}

    def try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Admit ``request`` if possible; mutates pool, queues and plan unless the verdict is DEFERRED or NO_ROOM."""
        deferred_at = self._deferred_before.pop(request.request_id, None)
        if deferred_at is not None:
            request.times.load_wait_s += self._clock() - deferred_at
        verdict = self._try_admit(request, plan)
        if verdict is Verdict.DEFERRED:
            self._deferred[request.request_id] = self._clock()
        return verdict

    def _try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        # One spare block per running request and group for the next token, or the newcomer would soon cause a preemption.
        num_spare = len(self._queues.running) * len(self._kv.layout.groups)
        if self._kv.holds_blocks(request):
            return self._start_loaded(request, plan, num_spare)
        hit = self._kv.find_local_hit(request)
        num_external, is_async = 0, False
        if request.ask_connector:
            answer, is_async = self._connector.get_num_new_matched_tokens(request, hit.num_tokens)
            if answer is None:
                self.num_deferred_lookups += not request.was_deferred
                request.was_deferred = True
                return Verdict.DEFERRED
            num_external = answer
        if is_async:
            return self._start_loading(request, hit, num_external, num_spare)
        return self._start(request, plan, hit, num_external, num_spare)

    def _start(self, request: Request, plan: StepPlan, hit: LocalHit, num_external: int, num_spare: int) -> Verdict:
        # The last token is computed even if its KV is there: generation starts from its logits.
        num_computed = min(hit.num_tokens + num_external, request.num_tokens - 1)
        num_new = min(request.num_tokens - num_computed, plan.num_tokens_left)
        if not self._kv.allocate_first(request, hit, num_external, num_computed + num_new, num_spare):
            return Verdict.NO_ROOM
        self._note_admission(request, hit, num_external)
        request.num_computed_tokens = num_computed
        if not self._tell_connector(request, num_external):
            return Verdict.DEFERRED
        plan.add(request, num_new, self._kv.block_ids(request.request_id), loads_in_step=num_external > 0)
        self._queues.run(request)
        return Verdict.RUNS

    def _start_loading(self, request: Request, hit: LocalHit, num_external: int, num_spare: int) -> Verdict:
        if not self._kv.allocate_first(request, hit, num_external, hit.num_tokens + num_external, num_spare):
            return Verdict.NO_ROOM
        self._note_admission(request, hit, num_external)
        if not self._tell_connector(request, num_external):
            return Verdict.DEFERRED
        request.times.loading_since = self._clock()
        self._queues.load(request)
        self._queues.transfers.start_load(request, self._clock())
        return Verdict.LOADS

    def _start_loaded(self, request: Request, plan: StepPlan, num_spare: int) -> Verdict:
        num_new = min(request.num_tokens - request.num_computed_tokens, plan.num_tokens_left)
        if not self._kv.allocate_more(request, request.num_computed_tokens + num_new, num_spare):
            return Verdict.NO_ROOM
        self._tell_connector(request, 0)
        plan.add(request, num_new, self._kv.block_ids(request.request_id))
        self._queues.run(request)
        return Verdict.RUNS

    def _note_admission(self, request: Request, hit: LocalHit, num_external: int) -> None:
        request.num_device_tokens = hit.num_tokens
        request.num_external_tokens = num_external
        if request.times.first_scheduled is None:
            request.times.first_scheduled = self._clock()
            request.num_first_device_tokens = hit.num_tokens

    def _tell_connector(self, request: Request, num_external: int) -> bool:
        """Tell the connector of the allocation. If it breaks and so will not load, take the blocks back; return ``False``."""
        self._connector.update_state_after_alloc(request, self._kv.block_ids(request.request_id), num_external)
        if num_external == 0 or self._connector.broken is None:
            return True
        self._kv.free(request)
        request.num_computed_tokens = request.num_device_tokens = request.num_external_tokens = 0
        return False
