"""The scheduler: decides what each step computes, and draws the consequences of what came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cargohold.engine.core.admission import Admission, Verdict
from cargohold.engine.core.config import LoadFailurePolicy, SchedulerConfig
from cargohold.engine.core.context import EngineContext
from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.plan import StepPlan
from cargohold.engine.core.request import FinishReason, Request, RequestStatus
from cargohold.engine.core.running import RunningRequests
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.core.transfers import EndedLoad, TransferTable
from cargohold.engine.core.waiting_queue import WaitingQueue
from cargohold.protocol import (
    CacheReport,
    Clock,
    ConnectorGuard,
    FinishedTransfers,
    KVCacheLayout,
    KVConnectorScheduler,
    KVConnectorSchedulerOutput,
    KVEvent,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """News of one request.

    Attributes:
        request: the request.
        new_token_ids: tokens generated in this step.
        kv_transfer_params: what the connector returns with the response, once the request has ended.
        cache_report: why it hit or missed, once it has ended.
    """

    request: Request
    new_token_ids: tuple[int, ...] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_report: CacheReport = field(default_factory=CacheReport)


class Scheduler:
    """One engine replica's scheduler. Not thread-safe: one thread owns it.

    A step is ``schedule``, execution elsewhere, ``update_from_output``; while ``has_work`` the caller keeps stepping.

    Args:
        config: limits and policies.
        layout: the paged KV cache.
        connector: scheduler side of the KV connector.
        clock: monotonic time in seconds.
        with_context: whether the connector is given a view of the block pool; without, it reports locks instead.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: KVCacheLayout,
        connector: KVConnectorScheduler,
        clock: Clock,
        *,
        with_context: bool = True,
    ) -> None:
        self._config = config
        self._clock = clock
        self.kv = KVCacheManager(layout, prefix_caching=config.prefix_caching, emit_events=config.emit_events)
        self._waiting = WaitingQueue(config.policy)
        self._running = RunningRequests(self._waiting.urgency)
        self._transfers = TransferTable()
        self._requests: dict[str, Request] = {}
        self.connector = ConnectorGuard(connector, layout.num_blocks)
        if with_context:
            self.connector.bind_scheduler_context(EngineContext(self.kv, self._waiting))
        self._admission = Admission(config, self.kv, self.connector, self._transfers, clock)
        self._connector_dropped = False
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._updates: list[RequestUpdate] = []
        self._plan: StepPlan | None = None
        self._num_arrivals = 0
        self._last_progress = clock()

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ``RequestError`` if a connector refuses it."""
        assert request.request_id not in self._requests, f"request {request.request_id} exists already"
        self.connector.on_new_request(request)
        if not self._requests:
            self._last_progress = self._clock()
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def finish_request(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestUpdate | None:
        """End a request in whatever state it is; ``None`` if it has ended already.

        Its blocks are freed at once, or when the transfers that use them have ended.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.status, request.finish_reason, request.error = RequestStatus.FINISHED, reason, error
        request.times.finished = self._clock()
        self._finished_ids.add(request_id)
        keeps_blocks, params = self.connector.request_finished(request, self.kv.block_ids(request))
        report = self.connector.explain(request_id)
        if keeps_blocks:
            self._transfers.start_send(request)
        self._free_unless_in_use(request)
        return RequestUpdate(request, kv_transfer_params=params, cache_report=report)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._requests)

    def waiting_requests(self) -> tuple[Request, ...]:
        """Requests not running yet, in the order in which they will be tried."""
        return tuple(self._waiting)

    def has_work(self) -> bool:
        """Whether another step is needed: requests unfinished, transfers in flight, references held by the connector."""
        return bool(self._requests or self._transfers or self._must_drop_connector or self.connector.has_pending_work())

    # --- stepping -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerStep:
        """Decide the next step. An empty one still carries the connector's messages."""
        assert self._plan is None, "the last step's output was not handed in"
        self._check_progress()
        plan = StepPlan(self._config.max_num_batched_tokens)
        everyone_fits = self._schedule_running(plan)
        if everyone_fits:
            self._admit_waiting(plan)
        if plan.is_empty and self._waiting:
            self._resolve_deadlock()
        if not plan.is_empty:
            self._last_progress = self._clock()
        was_broken = self.connector.broken is not None
        step = SchedulerStep(
            scheduled=plan.shares(),
            preempted_req_ids=frozenset(self._preempted_ids),
            finished_req_ids=frozenset(self._finished_ids),
            drop_connector=self._must_drop_connector,
        )
        metadata = self.connector.build_connector_meta(step)
        if self.connector.broken is not None and not was_broken:
            # Loads promised for this very step will not happen.
            for request in plan.take_out_loading():
                self._preempt(request)
        self._finished_ids.clear()
        self._preempted_ids.clear()
        self._plan = plan
        return SchedulerStep(
            scheduled=plan.shares(),
            preempted_req_ids=step.preempted_req_ids,
            finished_req_ids=step.finished_req_ids,
            connector_metadata=metadata,
            drop_connector=self._must_drop_connector,
        )

    def update_from_output(self, output: StepOutput) -> list[RequestUpdate]:
        """Draw the consequences of the step last scheduled; returns what changed for which request."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step was scheduled"
        must_drop = self._must_drop_connector
        self._absorb_connector_output(output, plan)
        for request, share in plan:
            # Requests that ended or lost their blocks meanwhile have nothing to add.
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += share.num_scheduled_tokens
                self.kv.cache_blocks(request, request.num_computed_tokens)
                if share.sample is not None:
                    self._append_token(request, output.sampled[request.request_id])
        if must_drop:
            self._release_broken_connector()
        updates, self._updates = self._updates, []
        return updates

    def take_events(self) -> list[KVEvent]:
        """KV events of the device pool and of the connector's tiers since the last call, in order per medium."""
        return [*self.kv.take_events(), *self.connector.take_events()]

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and in the connector. ``False`` if something in flight forbids it.

        The connector is asked only when the device pool could be reset, so ``False`` from the pool means that nothing was
        forgotten anywhere.
        """
        if self._requests or self._transfers or self.connector.num_held_references:
            return False
        return self.kv.pool.reset_cache() and self.connector.reset_cache()

    def check_settled(self) -> None:
        """Verify that nothing is left behind once all work is done. Raises ``AssertionError`` naming what is."""
        assert not self.has_work(), "work is pending"
        assert not self._running and not self._waiting
        self.kv.check()
        pool = self.kv.pool
        assert pool.num_free_blocks == pool.num_usable_blocks, (
            f"{pool.num_usable_blocks - pool.num_free_blocks} device blocks are still referenced"
        )

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Plan the running requests' next tokens; whether all kept their blocks."""
        num_running = len(self._running)
        for request in self._running.snapshot():
            if plan.num_tokens_left == 0 or request.status is not RequestStatus.RUNNING:
                break
            num_new = min(request.num_tokens - request.num_computed_tokens, plan.num_tokens_left)
            if self._make_room(request, request.num_computed_tokens + num_new):
                plan.add(request, num_new, self.kv.block_ids(request))
        return len(self._running) == num_running

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        # The least urgent goes first; it may be the request itself.
        while not self.kv.allocate_more(request, num_tokens):
            victim = self._running.least_urgent()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan) -> None:
        for request in list(self._waiting):
            if plan.num_tokens_left == 0:
                break
            if len(self._running) + self._transfers.num_loads >= self._config.max_num_seqs:
                break
            verdict = self._admission.try_admit(request, plan, num_running=len(self._running))
            if verdict is Verdict.NO_ROOM:
                break
            if verdict is Verdict.RUNS:
                self._waiting.remove(request)
                self._running.add(request)
            elif verdict is Verdict.LOADS:
                self._waiting.remove(request)

    def _resolve_deadlock(self) -> None:
        """Nothing can run although requests wait: take blocks back from loaded requests that the first one needs."""
        if self._running or self._transfers or self.connector.has_pending_work() or self._must_drop_connector:
            return  # whatever is in flight will end and change things
        holders = [request for request in self._waiting if self.kv.holds_blocks(request)]
        if holders:
            victim = holders[-1]
            self._waiting.remove(victim)
            self._preempt(victim)

    def _preempt(self, request: Request) -> None:
        """Take all blocks from a request and let it start over; cached ones it will find again while they last."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_device_tokens = request.num_external_tokens = 0
        request.num_preemptions += 1
        self._preempted_ids.add(request.request_id)
        self._waiting.add(request)

    # --- drawing consequences -----------------------------------------------------------------------------------------

    def _append_token(self, request: Request, token_id: int) -> None:
        request.append_token(token_id)
        if request.times.first_token is None:
            request.times.first_token = self._clock()
        self._updates.append(RequestUpdate(request, (token_id,)))
        if token_id in request.stop_token_ids:
            self._end(request, FinishReason.STOP)
        elif (
            request.num_output_tokens >= request.sampling.max_tokens or request.num_tokens >= self._config.max_model_len
        ):
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        update = self.finish_request(request.request_id, reason, error)
        assert update is not None
        self._updates.append(update)

    def _absorb_connector_output(self, output: StepOutput, plan: StepPlan) -> None:
        # Garbage first: it must not be read, whatever else is wrong with the connector.
        if output.connector.invalid_block_ids:
            self._discard_blocks(output.connector.invalid_block_ids)
        if output.connector.finished.step_failed:
            self._start_over(request for request, _ in plan)
        if output.connector_error is not None:
            self.connector.break_off(output.connector_error)
        if not output.connector.is_empty():
            self.connector.update_connector_output(output.connector)
        self._apply_report(self.connector.report_to_scheduler())
        if self.connector.broken is None:
            self._end_transfers(output.connector.finished)

    def _apply_report(self, report: KVConnectorSchedulerOutput | None) -> None:
        """Lock, then unlock: what the connector reports holds for the blocks as they are at the end of the step."""
        if report is not None:
            pool = self.kv.pool
            pool.touch([pool.get_block(block_id) for block_id in report.lock_block_ids])
            pool.free_blocks([pool.get_block(block_id) for block_id in report.unlock_block_ids])

    def _end_transfers(self, finished: FinishedTransfers) -> None:
        strays = self._transfers.strays(finished)
        if strays:
            self.connector.break_off(f"reported the end of transfers that these requests do not have: {strays}")
            return
        for load in self._transfers.end_loads(finished):
            self._last_progress = self._clock()
            self._end_load(load)
        for request in self._transfers.end_sends(finished):
            self._free_unless_in_use(request)

    def _discard_blocks(self, block_ids: frozenset[int]) -> None:
        """Blocks turned out to hold garbage: nobody may find them, and whoever reads them starts over."""
        known = frozenset(block_id for block_id in block_ids if 0 < block_id < self.kv.layout.num_blocks)
        if known != block_ids:
            self.connector.break_off(f"reported blocks that do not exist as invalid: {sorted(block_ids - known)}")
        for block_id in known:
            self.kv.pool.uncache_block(self.kv.pool.get_block(block_id))
        users = self.kv.requests_using(known)
        self._transfers.note_invalid(known, users)
        self._start_over(
            request
            for request in (self._requests.get(request_id) for request_id in users)
            if request is not None and not self._transfers.holds(request)
        )

    def _start_over(self, requests: Iterable[Request]) -> None:
        """Let requests recompute after a failure, or end them if that is the policy."""
        for request in list(requests):
            if request.is_finished or not self.kv.holds_blocks(request):
                continue
            request.ask_connector = False
            if self._config.load_failure_policy is LoadFailurePolicy.FAIL:
                self._end(request, FinishReason.ERROR, "loading its KV cache failed")
                continue
            if request.status is RequestStatus.WAITING:
                self._waiting.remove(request)
            self._preempt(request)

    def _end_load(self, load: EndedLoad) -> None:
        request = load.request
        if request.is_finished:
            self._free_unless_in_use(request)
            return
        started = request.times.loading_since
        assert started is not None
        request.times.load_wait_s += self._clock() - started
        request.times.loading_since = None
        num_valid = self._num_valid_tokens(load)
        self.kv.cache_blocks(request, num_valid)
        if num_valid < request.num_reused_tokens:
            self._start_over([request])
            return
        request.num_computed_tokens = min(num_valid, request.num_tokens - 1)
        request.status = RequestStatus.WAITING
        self._waiting.add(request)

    def _num_valid_tokens(self, load: EndedLoad) -> int:
        """Leading tokens of the request whose KV can be trusted after the load."""
        if load.failed:
            return load.request.num_device_tokens
        num_valid = load.request.num_reused_tokens
        for table in self.kv.tables(load.request.request_id):
            for at, block_id in enumerate(table.ids):
                if block_id in load.invalid_block_ids:
                    num_valid = min(num_valid, at * table.group.block_tokens)
                    break
        return num_valid

    def _free_unless_in_use(self, request: Request) -> None:
        if not self._transfers.holds(request):
            self.kv.free(request)

    # --- a connector that is turned off -------------------------------------------------------------------------------

    @property
    def _must_drop_connector(self) -> bool:
        return self.connector.broken is not None and not self._connector_dropped

    def _check_progress(self) -> None:
        """A load that never ends, or work that is always pending, must not hold requests for ever."""
        now, limit = self._clock(), self._config.load_timeout_s
        oldest = self._transfers.oldest_load()
        if oldest is not None and now - oldest[1] > limit:
            self.connector.break_off(f"did not end the load of request {oldest[0].request_id} within {limit:g} s")
        elif self._waiting and not self._running and now - self._last_progress > limit:
            self.connector.break_off(f"kept {len(self._waiting)} request(s) waiting for {limit:g} s")

    def _release_broken_connector(self) -> None:
        """The workers have stopped their connectors: nothing is in flight any more, so nothing needs protection."""
        self._connector_dropped = True
        self._apply_report(self.connector.release())
        loading, sending = self._transfers.abandon()
        for request in loading:
            if request.is_finished:
                self._free_unless_in_use(request)
        self._start_over(loading)
        for request in sending:
            self._free_unless_in_use(request)
