"""vLLM's scheduler with a connector of its interface, and simulated workers, stepped as vLLM's engine core does."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, cast

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus as VllmStatus
from vllm.v1.structured_output import StructuredOutputManager

from cargohold.engine.core.request import FinishReason, Request, SchedulerStep, StepOutput
from cargohold.engine.core.request_queues import SchedulerConfig
from cargohold.engine.core.scheduler import Scheduler as OwnScheduler
from cargohold.integrations.vllm.layout import shares_load_ends, shares_loads
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.lab.simulation.fingerprints import PrefixChains, layout_of
from cargohold.lab.simulation.replica import NO_OUTPUT, STEP_S, VOCAB_SIZE, Replica
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.lab.simulation.world import Shape
from cargohold.lab.vllm.adapters import AdapterFiles
from cargohold.lab.vllm.configuration import (
    ADAPTED,
    ASYNC,
    DRAFTED,
    LOAD_TIMEOUT_S,
    MATCH_UNIT,
    RETAINED,
    SLEEPS,
    config_of_rank,
    kv_cache_config,
    vllm_config,
)
from cargohold.lab.vllm.late_blocks import LATE_BLOCKS, LateBlocks
from cargohold.lab.vllm.requests import NO_HASHES, RequestBook, SchedulerView, ends_in
from cargohold.lab.vllm.worker import SimulatedWorker, WriteFirstRunner
from cargohold.protocol import HINTS_KEY, Hint, KVConnectorOutput


class InOrder(set[str]):
    """A set of strings that is iterated in sorted order: the order of a plain one differs from process to process."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def in_order(report: Any) -> None:
    """Make vLLM go through the requests of a report in the same order every time. Mutates the report."""
    for name, request_ids in ends_in(report).items():
        setattr(report, name, InOrder(request_ids))


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
class _StepInFlight:
    """A scheduled step whose result the scheduler does not know yet.

    Attributes:
        output: vLLM's scheduler output.
        step: the step as the workers ran it; empty until they have.
        answer: vLLM's model runner output of all ranks; ``None`` until they have run.
    """

    output: Any
    step: SchedulerStep = field(default_factory=SchedulerStep)
    answer: Any = None


class VllmEngine(Replica):
    """vLLM's scheduler and a connector of its interface around a fingerprint model.

    Args:
        shape: the engine, as ``recipe`` has fitted it for vLLM.
        transfer: vLLM's configuration of the connector.
        clock: virtual time; advances by ``STEP_S`` per step.
        copies: per rank, where transfers note what they copy.
        random: decides what real time would decide: when workers run, and when aborts arrive.

    Attributes:
        vllm: vLLM's scheduler.
        view: vLLM's scheduler as runs and oracles see it.
        workers: by rank.
        aggregator: vLLM's, which merges the ranks' outputs.
        guards_appends: see ``FingerprintRunner``.
    """

    dedupes_blocks = False
    has_own_hashes = False
    guards_appends: ClassVar[bool] = False

    def __init__(
        self, shape: Shape, transfer: Any, *, clock: VirtualClock, copies: Sequence[CopiesInFlight], random: Random
    ) -> None:
        options = shape.scheduler
        layout = layout_of(shape.groups, shape.num_blocks, shape.world_size)
        of_vllm = (ADAPTED, ASYNC, DRAFTED, LATE_BLOCKS, MATCH_UNIT, RETAINED, SLEEPS)
        config = SchedulerConfig(
            **{name: value for name, value in options.items() if name not in of_vllm}
            | {"load_timeout_s": LOAD_TIMEOUT_S, "emit_salted_events": True}  # vLLM publishes all of its own
        )
        super().__init__(layout, config, clock, copies, NO_HASHES)
        self._random = random
        self._pass_time = clock.advance
        self._late_aborts: list[str] = []
        self._in_flight: deque[_StepInFlight] = deque()
        self._depth = 2 if options[ASYNC] else 1
        self._num_drafted = options.get(DRAFTED, 0)
        self._files = AdapterFiles()
        self.tells_weights_apart = ADAPTED in options
        self._start(shape, transfer)

    def _finds_loads(self) -> bool:
        return shares_loads(self.vllm.kv_cache_config, self.layout.groups)

    def _finds_load_ends(self) -> bool:
        return shares_load_ends(self.vllm.vllm_config, self.layout.groups)

    @property
    def num_half_reported(self) -> int:
        """None: vLLM's own connectors count for themselves what their ranks have reported."""
        return 0

    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        if hints:
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), HINTS_KEY: list(hints)}
        self.vllm.add_request(self._book.make(request))

    def abort(self, request_id: str) -> None:
        """End a request, either at once or, at random, just before the next step's result is accounted for."""
        if self.view.reset.mode != "abort" and self._random.random() < 0.5:
            self._late_aborts.append(request_id)
        else:
            self._abort(request_id)

    def _step(self) -> tuple[SchedulerStep, StepOutput]:
        """One step of vLLM's engine core: schedule as far ahead as it does, then account for the oldest step in flight."""
        self.last_step = (SchedulerStep(), NO_OUTPUT)
        # One step is made even if vLLM has nothing to do: the caller may wait for something that an idle vLLM would not do.
        while not self._in_flight or (len(self._in_flight) < self._depth and self.vllm.has_requests()):
            self._in_flight.append(_StepInFlight(self.vllm.schedule()))
            # Workers lag behind the scheduler, by an unknown number of steps.
            if self._random.random() < 0.5:
                self._run_workers(len(self._in_flight))
        self._run_workers(1)
        # Before the connector is notified of the end of the step: it measures how long steps take.
        self._pass_time(STEP_S)
        self.last_step = self._account(self._in_flight.popleft())
        return self.last_step

    def cached_prefixes(self) -> set[tuple[bytes, int]]:
        """Hash and group of every prefix that vLLM can find on the device.

        A block may be found under several prefixes: where groups have blocks of different sizes, also under those that end
        inside it.
        """
        pool = self.vllm.kv_cache_manager.block_pool
        keys = {block.block_hash for block in pool.blocks if block.block_hash is not None}
        keys.update(*pool.cached_block_hashes_by_block.values())
        return {(bytes(get_block_hash(key)), int(get_group_id(key))) for key in keys}

    def load_weights(self, version: int) -> None:
        """Compute with other weights from now on, or with other adapters if there are any."""
        if self.tells_weights_apart:
            self._files.replace(version)
            version = 0
        super().load_weights(version)

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

    def _account(self, flight: _StepInFlight) -> tuple[SchedulerStep, StepOutput]:
        """Tell the scheduler the result of a step."""
        late, self._late_aborts = self._late_aborts, []
        for request_id in late:
            self._abort(request_id)
        if self._late is not None:
            self._late.step()
        answer = flight.answer
        if answer.kv_connector_output is not None:
            self._book.failed_loads |= answer.kv_connector_output.failed_recving
        output = StepOutput(
            sampled={name: answer.sampled_token_ids[at][-1] for name, at in _with_tokens(answer)},
            connector=self._report(answer),
            connector_error=self._error(answer),
        )
        self.last_step = (flight.step, output)
        for outputs in self.vllm.update_from_output(flight.output, answer).values():
            for news in outputs.outputs:
                self._book.take(news)
        self._book.follow_status()
        if self._num_drafted:
            names = [name for name, _ in _with_tokens(answer)]
            # What is proposed does not matter: the workers know which of it is right.
            self.vllm.update_draft_token_ids(DraftTokenIds(names, [[0] * self._num_drafted for _ in names]))
        return self.last_step

    def _abort(self, request_id: str) -> None:
        if self._late is not None:
            self._late.forget(request_id)
        if self.vllm.finish_requests(request_id, VllmStatus.FINISHED_ABORTED):
            self._book.end(request_id, FinishReason.ABORT)

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

    def _start(self, shape: Shape, transfer: Any) -> None:
        config, caches = vllm_config(shape, transfer), kv_cache_config(shape)
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        self._book = RequestBook(self.requests, hash_tokens, lambda update: self.on_update(update))  # noqa: PLW0108  # replaced later
        self.chains = PrefixChains(self._book.tokens, self._book.root)
        if self.tells_weights_apart:
            self._book.adapter_of = self._files.request
            self.chains.adapter_of = lambda request_id: self._files.code_of(self.requests[request_id].salt)
        scheduler_class = RepeatableAsyncScheduler if self._depth > 1 else RepeatableScheduler
        self.vllm: Any = scheduler_class(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        rate = shape.scheduler.get(LATE_BLOCKS, 0.0)
        self.takes_less = rate > 0
        self._late = LateBlocks(self.vllm, rate, self._random) if rate and self.vllm.connector is not None else None
        self.workers = [self._new_worker(config, caches, rank) for rank in range(shape.world_size)]
        self.aggregator = KVOutputAggregator.from_connector(self.vllm.connector, shape.world_size)
        self.view = self._view()
        self.scheduler = cast("OwnScheduler", self.view)  # what oracles look at in ours, it shows of vLLM's

    def _new_worker(self, config: Any, caches: Any, rank: int) -> SimulatedWorker:
        copies = self.copies[rank]
        runner = WriteFirstRunner(self.layout, self.chains, VOCAB_SIZE, rank, copies=copies)
        runner.guards_appends = self.guards_appends
        return SimulatedWorker(config_of_rank(config, rank), caches, runner, self._book.tokens, copies)

    # --- what can be seen of any connector ----------------------------------------------------------------------------

    def _report(self, answer: Any) -> KVConnectorOutput:
        """What the workers' connectors have reported in a step, from vLLM's output of it."""
        report = answer.kv_connector_output
        if report is None:
            return KVConnectorOutput()
        return KVConnectorOutput(**ends_in(report), invalid_block_ids=frozenset(report.invalid_block_ids or ()))

    def _error(self, answer: Any) -> str | None:
        """For which reason workers have turned the connector off, if they have."""
        return None

    def _view(self) -> SchedulerView:
        return SchedulerView(self.vllm, self.layout.groups, lambda: bool(self._in_flight))


def _with_tokens(answer: Any) -> Iterator[tuple[str, int]]:
    return ((name, at) for name, at in answer.req_id_to_index.items() if answer.sampled_token_ids[at])
