"""vLLM's scheduler, the adapter and simulated workers, stepped as vLLM's engine core steps them, in virtual time."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus as VllmStatus
from vllm.v1.structured_output import StructuredOutputManager

from cargohold.engine.core.config import SchedulerConfig
from cargohold.engine.core.request import FinishReason, Request, RequestStatus, RequestTimes
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.sampling_params import SamplingParams as OwnSamplingParams
from cargohold.integrations.vllm.scheduler import EXPLAIN
from cargohold.integrations.vllm.simulation.configuration import (
    ASYNC,
    LOAD_TIMEOUT_S,
    config_of_rank,
    kv_cache_config,
    vllm_config,
)
from cargohold.integrations.vllm.simulation.reports import in_order, united
from cargohold.integrations.vllm.simulation.runner import WriteFirstRunner
from cargohold.integrations.vllm.simulation.views import SchedulerView
from cargohold.integrations.vllm.simulation.worker import SimulatedWorker
from cargohold.protocol import CacheReport
from cargohold.simulation.clock import VirtualClock
from cargohold.simulation.copies import CopiesInFlight
from cargohold.simulation.engine import STEP_S, VOCAB_SIZE, root_of_salt
from cargohold.simulation.fingerprints import PrefixChains, tokens_alone
from cargohold.simulation.layouts import layout_of
from cargohold.simulation.scenario import Shape

_HASH: Final = "sha256"
_BEYOND: Final = 4
"""Tokens that the model can say beyond the end of an answer: vLLM may compute a step more before it knows of the end."""


@dataclass(slots=True)
class _InFlight:
    """A step that was scheduled and has not been accounted for.

    Attributes:
        output: vLLM's scheduler output.
        step: what the workers were asked, once they have run.
        answer: vLLM's model runner output of all ranks; ``None`` until they have run.
    """

    output: Any
    step: SchedulerStep = field(default_factory=SchedulerStep)
    answer: Any = None


class VllmEngine:
    """An engine replica for a ``cargohold.simulation.run.Run``: has what that and the oracles use of a ``SimulatedEngine``.

    Args:
        shape: the engine, as ``recipe`` has fitted it for vLLM.
        clock: virtual time; advances by ``STEP_S`` per step.
        copies: per rank, where transfers note what they copy.
        random: decides what real time would: when workers run, when aborts arrive.

    Attributes:
        requests: all requests so far, by id, as far as their client knows about them.
        vllm: vLLM's scheduler.
        side: the adapter's scheduler side.
        workers: by rank.
        aggregator: vLLM's, which merges the ranks' outputs.
    """

    dedupes_blocks = False

    def __init__(self, shape: Shape, *, clock: VirtualClock, copies: Sequence[CopiesInFlight], random: Random) -> None:
        options = shape.scheduler
        self.clock = clock
        self.copies = copies
        self.layout = layout_of(shape.groups, shape.num_blocks, shape.world_size)
        self.config = SchedulerConfig(
            **{name: value for name, value in options.items() if name != ASYNC}, load_timeout_s=LOAD_TIMEOUT_S
        )
        self.requests: dict[str, Request] = {}
        self.num_steps = 0
        self.last_step = (SchedulerStep(), StepOutput())
        self.on_update: Callable[[RequestUpdate], None] = lambda _: None
        self._random = random
        self._vllm_requests: dict[str, Any] = {}
        self._tokens: dict[str, list[int]] = {}
        self._failed_loads: set[str] = set()
        self._late_aborts: list[str] = []
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if options[ASYNC] else 1
        self._chains = PrefixChains(
            self._tokens.__getitem__, lambda request_id: root_of_salt(self.requests[request_id].salt)
        )
        self._start(shape)

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Queue a request."""
        self.requests[request_id] = _own_request(request_id, token_ids, max_tokens, salt, self.clock())
        self._tokens[request_id] = [
            *token_ids,
            *tokens_alone(token_ids, max_tokens + _BEYOND, VOCAB_SIZE, root_of_salt(salt)),
        ]
        self._chains.forget(request_id)
        request = VllmRequest(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=list(stop_token_ids),
                extra_args={"kv_transfer_params": {**(kv_transfer_params or {}), EXPLAIN: True}},
            ),
            pooling_params=None,
            arrival_time=self.clock(),
            cache_salt=salt,
            priority=priority,
            block_hasher=self._block_hasher,
        )
        self._vllm_requests[request_id] = request
        self.vllm.add_request(request)

    def abort(self, request_id: str) -> None:
        """End a request: now, or while a step is in flight."""
        if self._random.random() < 0.5:
            self._late_aborts.append(request_id)
        else:
            self._abort(request_id)

    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """One step of vLLM's engine core: schedule as far ahead as it does, then account for the oldest step in flight.

        Raises:
            WrongTokenError: the model has read what it should not.
        """
        self.last_step = (SchedulerStep(), StepOutput())
        # A step that nobody needs, if it comes to that: whoever calls may wait for what an idle vLLM would not do.
        while not self._in_flight or (len(self._in_flight) < self._depth and self.vllm.has_requests()):
            self._in_flight.append(_InFlight(self.vllm.schedule()))
            # Workers run behind the scheduler; how far, nobody knows.
            if self._random.random() < 0.5:
                self._run_workers(len(self._in_flight))
        self._run_workers(1)
        self.last_step = self._account(self._in_flight.popleft())
        self.num_steps += 1
        self.clock.advance(STEP_S)
        return self.last_step

    def cached_prefixes(self) -> set[tuple[bytes, int | None]]:
        """Hash and group of every prefix that vLLM can find on the device.

        A block may be found under several: where groups have blocks of different sizes, under prefixes that end inside it too.
        """
        pool = self.vllm.kv_cache_manager.block_pool
        keys = {block.block_hash for block in pool.blocks if block.block_hash is not None}
        keys.update(*pool.cached_block_hashes_by_block.values())
        return {(bytes(get_block_hash(key)), int(get_group_id(key))) for key in keys}

    def shutdown(self) -> None:
        """Stop the workers, then the scheduler."""
        for worker in self.workers:
            worker.shutdown()
        self.vllm.shutdown()

    # --- a step -------------------------------------------------------------------------------------------------------

    def _run_workers(self, num_steps: int) -> None:
        """Let the workers run the oldest steps in flight, unless they have."""
        for flight in list(self._in_flight)[:num_steps]:
            if flight.answer is None:
                message = pickle.dumps(flight.output)
                ran = [worker.execute(message) for worker in self.workers]
                flight.step = ran[0][0]
                flight.answer = self._aggregated([pickle.loads(answer) for _, answer in ran])  # noqa: S301  # our own
                self.last_step = (flight.step, StepOutput())
                self._check_tokens()

    def _account(self, flight: _InFlight) -> tuple[SchedulerStep, StepOutput]:
        """Tell the scheduler what came of a step."""
        late, self._late_aborts = self._late_aborts, []
        for request_id in late:
            self._abort(request_id)
        answer = flight.answer
        if answer.kv_connector_output is not None:
            self._failed_loads |= answer.kv_connector_output.failed_recving
        output = united(answer)
        self.last_step = (flight.step, output)
        for outputs in self.vllm.update_from_output(flight.output, answer).values():
            for news in outputs.outputs:
                self._take(news)
        self._follow_status()
        return self.last_step

    def _aggregated(self, answers: list[Any]) -> Any:
        """One output of all ranks, as vLLM's executors make it."""
        answer = self.aggregator.aggregate(answers) if len(answers) > 1 else answers[0]
        if answer.kv_connector_output is not None:
            in_order(answer.kv_connector_output)
        return answer

    def _check_tokens(self) -> None:
        """All loads are asynchronous: no step may read anything but what it should, whatever becomes of its result."""
        for worker in self.workers:
            for error in worker.runner.wrong.values():
                raise error

    # --- what clients hear --------------------------------------------------------------------------------------------

    def _take(self, news: Any) -> None:
        """New tokens of a request, and its end."""
        request = self.requests[news.request_id]
        if news.prefill_stats is not None:
            request.num_first_device_tokens = news.prefill_stats.num_local_cached_tokens
        if news.new_token_ids:
            request.all_token_ids += news.new_token_ids
            self.on_update(RequestUpdate(request, tuple(news.new_token_ids)))
        if news.finish_reason is not None:
            reason = FinishReason(str(news.finish_reason))
            explanation = (news.kv_transfer_params or {}).get(EXPLAIN, {})
            self._end(request, reason, CacheReport(explanation.get("restored_tokens", {})))

    def _abort(self, request_id: str) -> None:
        if self.vllm.finish_requests(request_id, VllmStatus.FINISHED_ABORTED):
            self._end(self.requests[request_id], FinishReason.ABORT, CacheReport())

    def _end(self, request: Request, reason: FinishReason, report: CacheReport) -> None:
        if reason is FinishReason.ERROR and request.request_id in self._failed_loads:
            request.error = "its load failed"
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        request.num_preemptions = self._vllm_requests.pop(request.request_id).num_preemptions
        self.on_update(RequestUpdate(request, cache_report=report))

    def _follow_status(self) -> None:
        for request_id, vllm_request in self._vllm_requests.items():
            is_loading = vllm_request.status is VllmStatus.WAITING_FOR_REMOTE_KVS
            self.requests[request_id].status = RequestStatus.LOADING if is_loading else RequestStatus.WAITING

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, shape: Shape) -> None:
        config, caches = vllm_config(shape), kv_cache_config(shape)
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        self._block_hasher = get_request_block_hasher(hash_tokens, _hash_function())
        scheduler_class = _RepeatableAsyncScheduler if self._depth > 1 else _RepeatableScheduler
        self.vllm: Any = scheduler_class(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        self.side = self.vllm.connector._scheduler
        self.connector = self.side.guard
        self.workers = [
            SimulatedWorker(
                config_of_rank(config, rank),
                caches,
                WriteFirstRunner(self.layout, self._chains, VOCAB_SIZE, rank, copies=self.copies[rank]),
                self._tokens.__getitem__,
            )
            for rank in range(shape.world_size)
        ]
        self.aggregator = KVOutputAggregator.from_connector(self.vllm.connector, shape.world_size)
        self.executor = SimpleNamespace(aggregator=self.side._aggregator)
        self.scheduler = SchedulerView(self.vllm, self.side, lambda: bool(self._in_flight))


class _Repeatable:
    """vLLM goes through some requests in the order of a set of strings, which is another one in every process."""

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """The same, in order of their names."""
        one_by_one = [request_ids] if isinstance(request_ids, str) else sorted(request_ids)
        finish = super().finish_requests  # type: ignore[misc]  # of vLLM's scheduler, which is mixed in
        return [request for request_id in one_by_one for request in finish(request_id, finished_status)]


class _RepeatableScheduler(_Repeatable, Scheduler):  # type: ignore[misc]  # vLLM ships no types
    pass


class _RepeatableAsyncScheduler(_Repeatable, AsyncScheduler):  # type: ignore[misc]  # vLLM ships no types
    pass


def _own_request(request_id: str, token_ids: Sequence[int], max_tokens: int, salt: str | None, now: float) -> Request:
    return Request(
        request_id=request_id,
        all_token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=OwnSamplingParams(max_tokens=max_tokens),
        seed=0,
        times=RequestTimes(arrived=now),
        hash_block_tokens=1 << 30,  # vLLM has hashes of its own
        salt=salt,
    )


@cache
def _hash_function() -> Any:
    function = get_hash_fn_by_name(_HASH)
    init_none_hash(function)
    return function
