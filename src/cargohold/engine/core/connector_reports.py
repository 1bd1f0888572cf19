"""Applies what the connector's workers reported, and failures of the step itself, to requests and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from cargohold.deadlines import Patience
from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request import FinishReason, Request, RequestStatus, StepOutput, StepPlan
from cargohold.engine.core.request_queues import AsyncLoad, LoadFailurePolicy, RequestQueues, SchedulerConfig
from cargohold.protocol import Clock, ConnectorGuard, KVConnectorSchedulerOutput, KVConnectorTransferResults

EndRequest = Callable[[Request, FinishReason, str], None]

NOT_FINITE = (
    "the model computed non-finite numbers for it (an overflow, or its consequences), so its tokens would mean "
    "nothing; if this happens with ordinary prompts, choose a dtype with a wider range, such as bfloat16 or float32"
)
"""Error of a request for which the model's numbers are not finite."""


class ConnectorReports:
    """Applies ended loads, failures and locks, and turns off a connector that keeps requests waiting too long.

    Args:
        config: limits and policies.
        kv: the device pool and the requests' blocks; mutated.
        queues: the requests; mutated.
        connector: the connector.
        clock: monotonic time in seconds.
        end_request: ends a request whose numbers are not finite, or whose load failed, where that is the policy.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        queues: RequestQueues,
        connector: ConnectorGuard,
        clock: Clock,
        end_request: EndRequest,
    ) -> None:
        self._config = config
        self._kv = kv
        self._queues = queues
        self._connector = connector
        self._clock = clock
        self._end_request = end_request
        self._last_progress = clock()
        self._patience = Patience(clock)

    def note_progress(self) -> None:
        """Restart the clock of ``check_progress``: a request was served, or there were no requests before."""
        self._last_progress = self._clock()

    def note_reached(self, request: Request, num_tokens: int) -> None:
        """Restart it for a request of which so many tokens are computed or loaded, unless it starved with as many before.

        If copies that never end hold so many blocks that no request fits into the rest, requests would start over for ever.
        """
        if not request.num_starved_tokens or num_tokens > request.num_starved_tokens:
            self.note_progress()

    def check_progress(self) -> None:
        """Turn the connector off if a load does not end in time, or if requests wait for as long without any progress."""
        now, limit = self._clock(), self._config.load_timeout_s
        oldest = self._queues.transfers.oldest_load()
        late = oldest[0].request_id if oldest is not None and now - oldest[1] > limit else None
        is_quiet = now - self._last_progress > limit
        num_kept = len(self._queues.waiting) + len(self._queues.running) if is_quiet else 0
        if is_quiet and late is None and not num_kept and self._queues.transfers.num_loads:
            return  # all are loading, and loads have a limit of their own: no progress, but no request waits now
        # A lack of progress is identified by the time of the last progress, so that any progress makes patience start over.
        overdue = late if late is not None or not num_kept else self._last_progress
        if not self._patience.has_run_out(overdue, limit):
            return
        if late is not None:
            self._connector.break_off(f"did not end the load of request {late} within {limit:g} s")
        else:
            num_sends = self._queues.transfers.num_sends
            ended = f", and has not given back the blocks of {num_sends} that have ended" if num_sends else ""
            self._connector.break_off(f"kept {num_kept} request(s) waiting for {limit:g} s{ended}")

    def absorb(self, output: StepOutput, plan: StepPlan) -> None:
        """Apply the connector's part of a step's output, before the step's tokens are looked at."""
        report = output.connector
        # Blocks that hold garbage come first: they must not be read, whatever else is wrong with the connector.
        if report.invalid_block_ids:
            self._discard_blocks(report.invalid_block_ids)
        if report.step_failed:
            self._start_over(request for request, _ in plan)
        if None in output.sampled.values():
            # Connectors may have stored what this step wrote. The other requests of the step are unharmed, and go on.
            not_finite = self._end_not_finite(output, plan)
            is_for_all = report.step_failed or report.invalid_block_ids
            spoiled = frozenset[str]() if is_for_all else not_finite
            report = replace(report, step_failed=True, spoiled_requests=spoiled)
        if output.connector_error is not None:
            self._connector.break_off(output.connector_error)
        if not report.is_empty():
            self._connector.update_connector_output(report)
        self._apply(self._connector.report_to_scheduler())
        if self._connector.broken is None and (report.finished_recving or report.finished_sending):
            self._end_transfers(report)

    def drop_connector(self) -> None:
        """Give back all blocks that are held for the connector: its workers have stopped, so nothing is in flight any more."""
        self._apply(self._connector.release())
        loading, sending = self._queues.transfers.abandon()
        for request in loading:
            request.times.end_loading(self._clock())
        for request in (*loading, *sending):
            if request.is_finished:
                self._queues.free_unless_in_use(request)
        self._start_over(loading)

    def _apply(self, report: KVConnectorSchedulerOutput | None) -> None:
        """Take the references of the connector's locks, then give back those of its unlocks, which hold from the step's end."""
        if report is not None:
            self._kv.pool.touch_ids(report.block_ids_to_lock)
            self._kv.pool.free_ids(report.block_ids_to_unlock)

    def _end_transfers(self, finished: KVConnectorTransferResults) -> None:
        transfers = self._queues.transfers
        strays = transfers.strays(finished)
        if strays:
            self._connector.break_off(f"reported the end of transfers that these requests do not have: {strays}")
            return
        for load in transfers.end_loads(finished):
            self._end_load(load)
        for request in transfers.end_sends(finished):
            self._queues.free_unless_in_use(request)

    def _discard_blocks(self, block_ids: frozenset[int]) -> None:
        """Take blocks that hold garbage out of the prefix cache, and let the requests that read them start over."""
        pool = self._kv.pool
        known = frozenset(block_id for block_id in block_ids if 0 < block_id < pool.num_blocks)
        if known != block_ids:
            self._connector.break_off(f"reported blocks that do not exist as invalid: {sorted(block_ids - known)}")
        for block_id in known:
            pool.uncache_block(pool.get_block(block_id))
        users = self._kv.requests_using(known)
        # Those still loading start over when their load ends: until then copies write to their blocks.
        self._queues.transfers.note_invalid(known, users)
        readers = [request for user in users if (request := self._queues.get(user)) is not None]
        self._start_over(request for request in readers if not self._queues.transfers.holds(request))

    def _end_not_finite(self, output: StepOutput, plan: StepPlan) -> frozenset[str]:
        """End the requests for which the model computed numbers that are not finite. This step's blocks are never cached.

        Not those that start over anyway, because their numbers may come from garbage that was read instead of their KV.

        Returns:
            The ids of all for which it did.
        """
        not_finite = frozenset(request_id for request_id, token_id in output.sampled.items() if token_id is None)
        for request, _ in plan:
            if request.status is RequestStatus.RUNNING and request.request_id in not_finite:
                self.note_progress()
                self._end_request(request, FinishReason.ERROR, NOT_FINITE)
        return not_finite

    def _start_over(self, requests: Iterable[Request]) -> None:
        """Let requests recompute after a failure, or end them if that is the policy."""
        for request in list(requests):
            if request.is_finished or not self._kv.holds_blocks(request):
                continue
            # Asked again, the connector might fail again, for ever.
            request.ask_connector = False
            if self._config.load_failure_policy is LoadFailurePolicy.FAIL:
                self._end_request(request, FinishReason.ERROR, "its KV could not be loaded (load_failure_policy=fail)")
            else:
                self._queues.preempt(request)

    def _end_load(self, load: AsyncLoad) -> None:
        request = load.request
        num_valid = self._num_valid_tokens(load)
        self.note_reached(request, min(num_valid, request.num_tokens - 1))
        # Blocks that arrived are of use to other requests, even if this one is gone or needs more.
        self._kv.cache_blocks(request, num_valid)
        if request.is_finished:
            self._queues.free_unless_in_use(request)
            return
        request.times.end_loading(self._clock())
        if num_valid < request.num_reused_tokens:
            self._start_over([request])
            return
        request.num_computed_tokens = min(num_valid, request.num_tokens - 1)
        self._queues.wait(request)

    def _num_valid_tokens(self, load: AsyncLoad) -> int:
        """Leading tokens of the request whose KV can be trusted after the load."""
        if load.failed:
            return load.request.num_device_tokens
        num_valid = load.request.num_reused_tokens
        for table in self._kv.tables(load.request.request_id):
            for at, block_id in enumerate(table.ids):
                if block_id in load.invalid_block_ids:
                    num_valid = min(num_valid, at * table.group.block_tokens)
                    break
        return num_valid
