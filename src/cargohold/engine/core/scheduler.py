"""The scheduler: decides what each step computes, and updates requests and blocks from the step's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from cargohold.engine.core.connector_reports import ConnectorReports
from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request import FinishReason, Request, RequestStatus, SchedulerStep, StepOutput, StepPlan
from cargohold.engine.core.request_queues import QueueAdmission, RequestQueues, SchedulerConfig, SortedRequests, Verdict
from cargohold.errors import RequestError
from cargohold.protocol import (
    CacheReport,
    Clock,
    ConnectorGuard,
    Hint,
    HintOutcome,
    HintStatus,
    KVCacheLayout,
    KVConnectorScheduler,
    KVEvent,
    Prefix,
    TurnEnd,
    answers_to,
)


class EngineContext:
    """The device pool and the requests that use it; see ``cargohold.protocol.SchedulerContext``."""

    def __init__(self, kv: KVCacheManager, waiting: SortedRequests) -> None:
        self._waiting = waiting
        self.get_request_blocks, pool = kv.block_ids, kv.pool
        self.touch_ids, self.free_ids, self.next_victims = pool.touch_ids, pool.free_ids, pool.next_victims
        self.contents, self.prefixes_of = pool.contents, pool.prefixes_of

    def waiting_requests(self) -> Iterable[Request]:
        """Requests not running yet, in the order in which they will be tried."""
        return tuple(self._waiting)


# --- the scheduler ----------------------------------------------------------------------------------------------------

_NO_REPORT = CacheReport()


class RequestUpdate(Struct, frozen=True):
    """What a step changed for one request.

    Attributes:
        request: the request.
        new_token_ids: tokens generated in this step.
        kv_transfer_params: what the connector returns with the response, once the request has ended.
        cache_report: why the request hit or missed the cache, once it has ended.
    """

    request: Request
    new_token_ids: tuple[int, ...] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_report: CacheReport = _NO_REPORT


class Scheduler:
    """One engine replica's scheduler. Not thread-safe: one thread owns it.

    A step is a call of ``schedule``, execution by an executor, and a call of ``update_from_output``. The caller makes steps as
    long as ``has_work`` is true.

    Args:
        config: limits and policies.
        layout: the paged KV cache.
        connector: scheduler side of the KV connector.
        clock: monotonic time in seconds.
        with_context: whether the connector is given a view of the block pool; without, it reports locks instead.
        end_of_answer: tells how an answer ended that the model itself ended, by its tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: KVCacheLayout,
        connector: KVConnectorScheduler,
        clock: Clock,
        *,
        with_context: bool = True,
        end_of_answer: Callable[[Sequence[int]], TurnEnd] = lambda _: TurnEnd.UNKNOWN,
    ) -> None:
        self._config = config
        self._clock = clock
        self._end_of_answer = end_of_answer
        self.kv = KVCacheManager(
            layout,
            prefix_caching=config.prefix_caching,
            emit_events=config.emit_events,
            emit_salted_events=config.emit_salted_events,
        )
        self._queues = RequestQueues(config.policy, self.kv)
        self.connector = ConnectorGuard(connector, layout.num_blocks, len(layout.groups), clock=clock)
        if with_context:
            self.connector.bind_scheduler_context(EngineContext(self.kv, self._queues.waiting))
        self._admission = QueueAdmission(self.kv, self._queues, self.connector, clock)
        self._reports = ConnectorReports(config, self.kv, self._queues, self.connector, clock, self._end)
        self._updates: list[RequestUpdate] = []
        self._plan: StepPlan | None = None

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, hints: Sequence[Hint] = ()) -> None:
        """Queue a request, and give its hints to the connector.

        Raises ``RequestError`` if a connector refuses it, or if its id is not free yet.
        """
        if self._queues.transfers.holds(request):
            # Workers report the end of transfers by id. They would end those of this request with those of the earlier one.
            raise RequestError(
                "the blocks of an earlier request with this id are still being copied; use another id",
                request.request_id,
            )
        self.connector.on_new_request(request)
        if not self._queues:
            self._reports.note_progress()
        self._queues.add(request)
        if hints:
            request.hint_outcomes += tuple(self.connector.on_hints(request, hints))

    def hint(self, request: str | Prefix, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Give hints about a request, by its id, or about a prefix to the connector; return an outcome for each."""
        subject = self._queues.get(request) if isinstance(request, str) else request
        if subject is None:
            return answers_to(hints, HintStatus.MISSING, "no such request is being served")
        return self.connector.on_hints(subject, hints)

    def finish_request(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestUpdate | None:
        """End a request in whatever state it is; ``None`` if it has ended already.

        Its blocks are freed at once, or when the transfers that use them have ended.
        """
        request = self._queues.get(request_id)
        if request is None:
            return None
        self._queues.end(request)
        request.finish_reason, request.error = reason, error
        request.turn_end = self._turn_end(request, reason)
        request.times.finished = self._clock()
        request.times.end_loading(request.times.finished)
        keeps_blocks, params = self.connector.request_finished(request, self.kv.block_ids(request.request_id))
        report = self.connector.explain(request_id)
        if keeps_blocks:
            self._queues.transfers.start_send(request)
        self._queues.free_unless_in_use(request)
        return RequestUpdate(request, kv_transfer_params=params, cache_report=report)

    def _turn_end(self, request: Request, reason: FinishReason) -> TurnEnd:
        if reason is FinishReason.STOP:
            return self._end_of_answer(request.output_token_ids)
        return TurnEnd.named(reason.value)

    @property
    def num_deferred_lookups(self) -> int:
        """Requests so far that the connector has deferred: they waited for a tier, or for another request's load."""
        return self._admission.num_deferred_lookups

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._queues)

    @property
    def num_running(self) -> int:
        """Requests that compute."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_loading(self) -> int:
        """Requests whose KV is being loaded, ended ones among them."""
        return self._queues.transfers.num_loads

    def is_copying(self, request_id: str) -> bool:
        """Whether blocks of a request with this id are still being copied, although it may have ended."""
        return self._queues.transfers.has(request_id)

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return self._queues.ids()

    def waiting_requests(self) -> tuple[Request, ...]:
        """Requests not running yet, in the order in which they will be tried."""
        return tuple(self._queues.waiting)

    def has_work(self) -> bool:
        """Whether another step is needed: requests unfinished, transfers in flight, references held by the connector."""
        return bool(self._queues or self._queues.transfers or self.connector.has_pending_work())

    # --- stepping -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerStep:
        """Decide the next step. An empty one still carries the connector's messages."""
        assert self._plan is None, "the last step's output was not handed in"
        self._reports.check_progress()
        num_active = len(self._queues.running) + self._queues.transfers.num_loads
        self._admission.begin_step(self._config.max_num_seqs - num_active)
        plan = self._plan = StepPlan(self._config.max_num_batched_tokens)
        if self._schedule_running(plan):
            self._admit_waiting(plan)
            if plan.is_empty:
                self._resolve_deadlock()
        return self._add_connector_metadata(plan)

    def update_from_output(self, output: StepOutput) -> list[RequestUpdate]:
        """Update requests and blocks from the output of the step last scheduled; returns what changed for each request."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step was scheduled"
        self._reports.absorb(output, plan)
        for request, share in plan:
            # Of requests that have ended or lost their blocks meanwhile, the step's tokens are dropped. If a connector spoils
            # one step after the other, all of them are dropped, and that is no progress.
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += share.num_scheduled_tokens
                self._reports.note_reached(request, request.num_computed_tokens)
                self.kv.cache_blocks(request, request.num_computed_tokens)
                if share.sample is not None:
                    token_id = output.sampled[request.request_id]
                    assert token_id is not None, "a request whose numbers are not finite has ended"
                    self._append_token(request, token_id)
        if self.connector.is_stopping:  # the step's message has stopped the workers
            self._reports.drop_connector()
        updates, self._updates = self._updates, []
        return updates

    @property
    def emits_events(self) -> bool:
        """Whether KV events are collected."""
        return self._config.emit_events

    def take_events(self) -> list[KVEvent]:
        """KV events of the device pool and of the connector's tiers since the last call, in order per medium."""
        return [*self.kv.take_events(), *self.connector.take_events()]

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and in the connector. ``False`` if something in flight forbids it.

        The connector is asked only when the device pool could be reset, so ``False`` from the pool means that nothing was
        forgotten anywhere.
        """
        if self._queues or self._queues.transfers or self.connector.num_held_references:
            return False
        return self.kv.pool.reset_cache() and self.connector.reset_cache()

    def check_settled(self) -> None:
        """Verify that nothing is left behind once all work is done. Raises ``AssertionError`` naming what is."""
        assert not self.has_work(), "work is pending"
        assert not self._queues.running and not self._queues.waiting
        self.kv.check()
        pool = self.kv.pool
        num_used, num_stuck = pool.num_usable_blocks - pool.num_free_blocks, len(self.connector.held_references())
        assert num_used == num_stuck, f"{num_used} device blocks are referenced, {num_stuck} of them for stuck copies"

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Plan the running requests' next tokens; whether there was room for all of them."""
        there_was_room = True
        for request in list(self._queues.running):
            if plan.num_tokens_left == 0 or request.status is not RequestStatus.RUNNING:
                break
            num_new = min(request.num_tokens - request.num_computed_tokens, plan.num_tokens_left)
            num_tokens = request.num_computed_tokens + num_new
            if not self.kv.allocate_more(request, num_tokens):
                there_was_room = False
                if not self._make_room(request, num_tokens):
                    break
            plan.add(request, num_new, self.kv.block_ids(request.request_id))
        return there_was_room

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Preempt requests, the least urgent first, until ``request`` has its blocks; whether it has.

        It has not if it is the least urgent one itself and is preempted, or keeps its blocks and waits for transfers.
        """
        while not self.kv.allocate_more(request, num_tokens):
            victim = self._queues.least_urgent_holder()
            if victim is request and len(self._queues.running) == 1 and self._expects_blocks():
                return False  # the request keeps its blocks, and waits for those of transfers
            if victim is request:
                if len(self._queues.running) == 1:
                    request.note_starved()
                self._queues.preempt(request)
                return False
            if victim.status is not RequestStatus.RUNNING:
                victim.note_starved()  # its loads were wasted
            self._queues.preempt(victim)
        return True

    def _expects_blocks(self) -> bool:
        """Whether transfers use blocks that will be free, or can be taken back, once they end."""
        return bool(self._queues.transfers) or self.connector.expects_blocks

    def _admit_waiting(self, plan: StepPlan) -> None:
        queues = self._queues
        for request in list(queues.waiting):
            num_active = len(queues.running) + queues.transfers.num_loads
            if plan.num_tokens_left == 0 or num_active >= self._config.max_num_seqs:
                break
            if queues.has_just_ended(request.request_id):
                continue  # this step tells connectors that an earlier request with this id has ended
            if self._admission.try_admit(request, plan) is Verdict.NO_ROOM:
                break

    def _resolve_deadlock(self) -> None:
        """If nothing runs and no transfer will free blocks although requests wait, preempt one that holds loaded blocks.

        The first request in the queue needs them. The connector may have other work, such as writing chunks to a slow disk:
        that frees no blocks, so no request waits for it.
        """
        queues = self._queues
        if queues.running or self._expects_blocks():
            return
        holders = [request for request in queues.waiting if self.kv.holds_blocks(request)]
        if holders:
            holders[-1].note_starved()
            queues.preempt(holders[-1])

    def _add_connector_metadata(self, plan: StepPlan) -> SchedulerStep:
        """Complete the step with the connector's message to its workers."""
        step = SchedulerStep(plan.shares(), *self._queues.take_news())
        scheduled = step.scheduled
        metadata = self.connector.build_connector_meta(step)
        if self.connector.broken is not None:
            # Loads promised for this very step will not happen, whether the connector broke just now or during an admission.
            for request in plan.take_out_loading():
                self._queues.preempt(request)
            scheduled = plan.shares()
        return SchedulerStep(
            scheduled=scheduled,
            preempted_req_ids=step.preempted_req_ids,
            finished_req_ids=step.finished_req_ids,
            connector_metadata=metadata,
            drop_connector=self.connector.stop_workers(),
        )

    # --- tokens -------------------------------------------------------------------------------------------------------

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
