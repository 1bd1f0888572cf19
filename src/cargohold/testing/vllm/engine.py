"""vLLM's scheduler, the adapter and simulated workers, stepped as vLLM's engine core steps them, in virtual time."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus as VllmStatus
from vllm.v1.structured_output import StructuredOutputManager

from cargohold.engine.core.config import SchedulerConfig
from cargohold.engine.core.request import FinishReason, Request
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.integrations.vllm.layout import shares_load_ends, shares_loads
from cargohold.protocol import HINTS_KEY, FinishedTransfers, Hint, KVConnectorOutput, TransferOutcome, add_stats
from cargohold.testing.simulation.clock import VirtualClock, layout_of
from cargohold.testing.simulation.engine import STEP_S, VOCAB_SIZE
from cargohold.testing.simulation.fingerprints import PrefixChains
from cargohold.testing.simulation.replica import NO_OUTPUT, Replica
from cargohold.testing.simulation.scenario import Shape
from cargohold.testing.simulation.transfers import CopiesInFlight
from cargohold.testing.vllm.configuration import (
    ASYNC,
    LOAD_TIMEOUT_S,
    MATCH_UNIT,
    RETAINED,
    config_of_rank,
    kv_cache_config,
    vllm_config,
)
from cargohold.testing.vllm.requests import NO_HASHES, RequestBook, SchedulerView
from cargohold.testing.vllm.worker import SimulatedWorker, WriteFirstRunner


class InOrder(set[str]):
    """A set of strings that is iterated in sorted order: the order of a plain one differs from process to process."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def in_order(report: Any) -> None:
    """Make vLLM go through the requests of a report in the same order every time. Mutates the report."""
    for name in ("finished_sending", "finished_recving", "failed_recving"):
        setattr(report, name, InOrder(getattr(report, name) or ()))


def united(answer: Any) -> StepOutput:
    """Convert vLLM's model runner output. Ranks are not counted: a job is in the result if one of them has reported it."""
    report = answer.kv_connector_output
    message = None if report is None else report.kv_connector_worker_meta
    reports = [] if message is None else [message.reports[rank] for rank in sorted(message.reports)]
    united = KVConnectorOutput()
    for rank in reports:
        united = _both(united, rank.output)
    return StepOutput(
        sampled={name: answer.sampled_token_ids[at][-1] for name, at in _with_tokens(answer)},
        connector=united,
        connector_error=next((rank.error for rank in reports if rank.error is not None), None),
    )


def _with_tokens(answer: Any) -> Iterator[tuple[str, int]]:
    return ((name, at) for name, at in answer.req_id_to_index.items() if answer.sampled_token_ids[at])


def _both(left: KVConnectorOutput, right: KVConnectorOutput) -> KVConnectorOutput:
    one, two = left.finished, right.finished
    ids = {*one.jobs, *two.jobs}
    done = TransferOutcome.DONE
    return KVConnectorOutput(
        finished=FinishedTransfers(
            finished_sending=one.finished_sending | two.finished_sending,
            finished_recving=one.finished_recving | two.finished_recving,
            failed_recving=one.failed_recving | two.failed_recving,
            jobs={ident: max(one.jobs.get(ident, done), two.jobs.get(ident, done)) for ident in sorted(ids)},
            step_failed=one.step_failed or two.step_failed,
        ),
        invalid_block_ids=left.invalid_block_ids | right.invalid_block_ids,
        stats=add_stats(left.stats, right.stats),
    )


# --- vLLM's schedulers ------------------------------------------------------------------------------------------------


class _Repeatable:
    """Mix-in for vLLM's schedulers, which go through some requests in the order of a set of strings.

    That order differs from process to process.
    """

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Finish requests in the order of their ids."""
        one_by_one = [request_ids] if isinstance(request_ids, str) else sorted(request_ids)
        finish = super().finish_requests  # type: ignore[misc]  # of vLLM's scheduler, which is mixed in
        return [request for request_id in one_by_one for request in finish(request_id, finished_status)]


class RepeatableScheduler(_Repeatable, Scheduler):  # type: ignore[misc]  # vLLM ships no types
    """Schedules a step when it has the output of the one before."""


class RepeatableAsyncScheduler(_Repeatable, AsyncScheduler):  # type: ignore[misc]  # vLLM ships no types
    """Schedules a step before it has the output of the one before."""


# --- vLLM's scheduler -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _InFlight:
    """A scheduled step whose result the scheduler has not been told yet.

    Attributes:
        output: vLLM's scheduler output.
        step: the step as the workers ran it; empty until they have.
        answer: vLLM's model runner output of all ranks; ``None`` until they have run.
    """

    output: Any
    step: SchedulerStep = field(default_factory=SchedulerStep)
    answer: Any = None


class VllmEngine(Replica):
    """vLLM's scheduler and the adapter around a fingerprint model.

    Args:
        shape: the engine, as ``recipe`` has fitted it for vLLM.
        clock: virtual time; advances by ``STEP_S`` per step.
        copies: per rank, where transfers note what they copy.
        random: decides what real time would decide: when workers run, and when aborts arrive.

    Attributes:
        vllm: vLLM's scheduler.
        side: the adapter's scheduler side.
        workers: by rank.
        aggregator: vLLM's, which merges the ranks' outputs.
    """

    dedupes_blocks = False
    has_own_hashes = False

    def __init__(self, shape: Shape, *, clock: VirtualClock, copies: Sequence[CopiesInFlight], random: Random) -> None:
        options = shape.scheduler
        layout = layout_of(shape.groups, shape.num_blocks, shape.world_size)
        config = SchedulerConfig(
            **{name: value for name, value in options.items() if name not in (ASYNC, MATCH_UNIT, RETAINED)}
            | {"load_timeout_s": LOAD_TIMEOUT_S, "emit_salted_events": True}  # vLLM publishes all of its own
        )
        super().__init__(layout, config, clock, copies, NO_HASHES)
        self._random = random
        self._pass_time = clock.advance
        self._late_aborts: list[str] = []
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if options[ASYNC] else 1
        self._start(shape)

    @property
    def scheduler(self) -> SchedulerView:
        """VLLM's scheduler, with the names of the port."""
        return self._scheduler

    @property
    def chains(self) -> PrefixChains:
        """See the port."""
        return self._chains

    @property
    def shares_loads(self) -> bool:
        """Whether blocks loaded for one request are found by others on the device."""
        return self.config.prefix_caching and shares_loads(self.vllm.kv_cache_config, self.layout.groups)

    @property
    def shares_load_ends(self) -> bool:
        """Whether at least those are found with which others can continue where the load ends."""
        return self.config.prefix_caching and shares_load_ends(self.vllm.vllm_config, self.layout.groups)

    @property
    def num_half_reported(self) -> int:
        """Transfers that the adapter has heard of from some workers and not from others."""
        return int(self.side._aggregator.num_incomplete)

    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        if hints:
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), HINTS_KEY: list(hints)}
        self.vllm.add_request(self._book.make(request))

    def abort(self, request_id: str) -> None:
        """End a request, either at once or, at random, just before the next step's result is accounted for."""
        if self._random.random() < 0.5:
            self._late_aborts.append(request_id)
        else:
            self._abort(request_id)

    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """One step of vLLM's engine core: schedule as far ahead as it does, then account for the oldest step in flight.

        Raises:
            WrongTokenError: the model has read KV that is not what the block table says.
        """
        self.last_step = (SchedulerStep(), NO_OUTPUT)
        # One step is made even if vLLM has nothing to do: the caller may wait for something that an idle vLLM would not do.
        while not self._in_flight or (len(self._in_flight) < self._depth and self.vllm.has_requests()):
            self._in_flight.append(_InFlight(self.vllm.schedule()))
            # Workers lag behind the scheduler, by an unknown number of steps.
            if self._random.random() < 0.5:
                self._run_workers(len(self._in_flight))
        self._run_workers(1)
        # Before the connector hears that the step has ended: it measures how long steps take.
        self._pass_time(STEP_S)
        self.last_step = self._account(self._in_flight.popleft())
        self.num_steps += 1
        return self.last_step

    def cached_prefixes(self) -> set[tuple[bytes, int | None]]:
        """Hash and group of every prefix that vLLM can find on the device.

        A block may be found under several prefixes: where groups have blocks of different sizes, also under those that end
        inside it.
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
        """Let the workers run the oldest ``num_steps`` steps in flight, those excepted that they have run."""
        for flight in list(self._in_flight)[:num_steps]:
            if flight.answer is None:
                message = pickle.dumps(flight.output)
                ran = [worker.execute(message) for worker in self.workers]
                flight.step = ran[0][0]
                flight.answer = self._aggregated([pickle.loads(answer) for _, answer in ran])  # noqa: S301  # our own
                self.last_step = (flight.step, NO_OUTPUT)
                self._check_tokens()

    def _account(self, flight: _InFlight) -> tuple[SchedulerStep, StepOutput]:
        """Tell the scheduler the result of a step."""
        late, self._late_aborts = self._late_aborts, []
        for request_id in late:
            self._abort(request_id)
        answer = flight.answer
        if answer.kv_connector_output is not None:
            self._book.failed_loads |= answer.kv_connector_output.failed_recving
        output = united(answer)
        self.last_step = (flight.step, output)
        for outputs in self.vllm.update_from_output(flight.output, answer).values():
            for news in outputs.outputs:
                self._book.take(news)
        self._book.follow_status()
        return self.last_step

    def _abort(self, request_id: str) -> None:
        if self.vllm.finish_requests(request_id, VllmStatus.FINISHED_ABORTED):
            self._book.end(request_id, FinishReason.ABORT)

    def _tell(self, update: RequestUpdate) -> None:
        self.on_update(update)

    def _aggregated(self, answers: list[Any]) -> Any:
        """One output of all ranks, as vLLM's executors make it."""
        answer = self.aggregator.aggregate(answers) if len(answers) > 1 else answers[0]
        if answer.kv_connector_output is not None:
            in_order(answer.kv_connector_output)
        return answer

    def _check_tokens(self) -> None:
        """Raise ``WrongTokenError`` if a worker read wrong KV. As all loads are asynchronous, not even a discarded step may."""
        for worker in self.workers:
            for error in worker.runner.wrong.values():
                raise error

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, shape: Shape) -> None:
        config, caches = vllm_config(shape), kv_cache_config(shape)
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        self._book = RequestBook(self.requests, hash_tokens, self._tell)
        self._chains = PrefixChains(self._book.tokens, self._book.root)
        scheduler_class = RepeatableAsyncScheduler if self._depth > 1 else RepeatableScheduler
        self.vllm: Any = scheduler_class(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        self.side = self.vllm.connector._scheduler
        self.workers = [
            SimulatedWorker(
                config_of_rank(config, rank),
                caches,
                WriteFirstRunner(self.layout, self._chains, VOCAB_SIZE, rank, copies=self.copies[rank]),
                self._book.tokens,
            )
            for rank in range(shape.world_size)
        ]
        self.aggregator = KVOutputAggregator.from_connector(self.vllm.connector, shape.world_size)
        self._scheduler = SchedulerView(self.vllm, self.side, lambda: bool(self._in_flight))
