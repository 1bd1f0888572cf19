"""vLLM's scheduler, the adapter and simulated workers, stepped as vLLM's engine core does; and the scenarios for it."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus as VllmStatus
from vllm.v1.structured_output import StructuredOutputManager

from cargohold.engine.core.request import FinishReason, Request, SchedulerStep, StepOutput
from cargohold.engine.core.request_queues import SchedulerConfig
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.errors import ConfigError
from cargohold.integrations.vllm.layout import shares_load_ends, shares_loads
from cargohold.lab.simulation.campaign import Recipe
from cargohold.lab.simulation.connectors import CONNECTORS
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.lab.simulation.fingerprints import GroupPlan, PrefixChains, layout_of
from cargohold.lab.simulation.fingerprints import num_blocks_needed as num_own_blocks_needed
from cargohold.lab.simulation.oracles import Oracle
from cargohold.lab.simulation.replica import NO_OUTPUT, STEP_S, VOCAB_SIZE, Replica
from cargohold.lab.simulation.run import NO_TIMELINE, Run, RunResult, Timeline, quiet_logging
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.lab.simulation.workloads import REUSING, Action, Ask, Tell, without_used_ids
from cargohold.lab.simulation.world import ANY, Scenario, Shape, World, draw_scenario
from cargohold.lab.vllm.configuration import (
    ASYNC,
    CAN_RETAIN_LESS,
    DRAFTED,
    LOAD_TIMEOUT_S,
    MATCH_UNIT,
    MAX_MODEL_LEN,
    RETAINED,
    config_of_rank,
    hold_weights,
    kv_cache_config,
    num_blocks_needed,
    standing_on,
    transfer_config,
    vllm_config,
)
from cargohold.lab.vllm.late_blocks import LATE_BLOCKS, LateBlocks
from cargohold.lab.vllm.requests import NO_HASHES, RequestBook, SchedulerView
from cargohold.lab.vllm.worker import SimulatedWorker, WriteFirstRunner
from cargohold.protocol import (
    HINTS_KEY,
    AttentionKind,
    Hint,
    KVConnectorOutput,
    TransferOutcome,
    add_stats,
)


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
    one, two = left, right
    ids = {*one.jobs, *two.jobs}
    done = TransferOutcome.DONE
    return KVConnectorOutput(
        finished_sending=one.finished_sending | two.finished_sending,
        finished_recving=one.finished_recving | two.finished_recving,
        failed_recving=one.failed_recving | two.failed_recving,
        jobs={ident: max(one.jobs.get(ident, done), two.jobs.get(ident, done)) for ident in sorted(ids)},
        step_failed=one.step_failed or two.step_failed,
        invalid_block_ids=left.invalid_block_ids | right.invalid_block_ids,
        kv_connector_stats=add_stats(left.kv_connector_stats, right.kv_connector_stats),
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
    sleeps = True
    _hears_of_layers = False
    scheduler: SchedulerView

    def __init__(self, shape: Shape, *, clock: VirtualClock, copies: Sequence[CopiesInFlight], random: Random) -> None:
        options = shape.scheduler
        layout = layout_of(shape.groups, shape.num_blocks, shape.world_size)
        of_vllm = (ASYNC, DRAFTED, LATE_BLOCKS, MATCH_UNIT, RETAINED)
        config = SchedulerConfig(
            **{name: value for name, value in options.items() if name not in of_vllm}
            | {"load_timeout_s": LOAD_TIMEOUT_S, "emit_salted_events": True}  # vLLM publishes all of its own
        )
        super().__init__(layout, config, clock, copies, NO_HASHES)
        self._random = random
        self._pass_time = clock.advance
        self._late_aborts: list[str] = []
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if options[ASYNC] else 1
        self._num_drafted = options.get(DRAFTED, 0)
        self._start(shape)

    def _finds_loads(self) -> bool:
        return shares_loads(self.vllm.kv_cache_config, self.layout.groups)

    def _finds_load_ends(self) -> bool:
        return shares_load_ends(self.vllm.vllm_config, self.layout.groups)

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

    def _step(self) -> tuple[SchedulerStep, StepOutput]:
        """One step of vLLM's engine core: schedule as far ahead as it does, then account for the oldest step in flight."""
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

    def load_weights(self, version: int) -> None:
        """Compute with other weights from now on. They come while the device sleeps or not, as chance has it."""
        num_naps = self._random.choice((0, 1, 2)) if self.sleeps else 0
        if num_naps:
            self._run_workers(len(self._in_flight))
        for worker in self.workers * num_naps:
            worker.sleep()
        super().load_weights(version)
        for worker in self.workers * num_naps:
            worker.wake_up()

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
        if self._late is not None:
            self._late.step()
        answer = flight.answer
        if answer.kv_connector_output is not None:
            self._book.failed_loads |= answer.kv_connector_output.failed_recving
        output = self._read(answer)
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
        config, caches = vllm_config(shape, self._transfer(shape)), kv_cache_config(shape)
        self._fit(config)
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        self._book = RequestBook(self.requests, hash_tokens, self._tell)
        self.chains = PrefixChains(self._book.tokens, self._book.root)
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
        self.scheduler = self._view()

    def _new_worker(self, config: Any, caches: Any, rank: int) -> SimulatedWorker:
        # Other weights differ from the first ones on one rank alone.
        hold_weights(lambda: str(self.chains.version if self.chains.version % self.layout.world_size == rank else 0))
        runner = WriteFirstRunner(self.layout, self.chains, VOCAB_SIZE, rank, copies=self.copies[rank])
        own = config_of_rank(config, rank)
        copies = self.copies[rank]
        return SimulatedWorker(own, caches, runner, self._book.tokens, copies=copies, as_layers=self._hears_of_layers)

    def _is_busy(self) -> bool:
        return bool(self._in_flight)

    # --- what differs with connectors of others -----------------------------------------------------------------------

    def _transfer(self, shape: Shape) -> Any:
        """VLLM's configuration of the connector."""
        return transfer_config(shape.scheduler["load_failure_policy"].value)

    def _fit(self, config: Any) -> None:
        """Change vLLM's configuration to what the connector needs."""

    def _read(self, answer: Any) -> StepOutput:
        """A step's output from vLLM's."""
        return united(answer)

    def _view(self) -> SchedulerView:
        self.side = self.vllm.connector._scheduler
        return SchedulerView(self.vllm, self.side.guard, self.layout.groups, self._is_busy)


class BridgeOracle(Oracle):
    """At the end, neither vLLM nor either side of the adapter remembers requests and transfers that are over.

    Args:
        engine: the replica.
    """

    name = "bridge"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def at_end(self) -> None:
        """Check that nothing is remembered any more."""
        for what, left in self._remembered().items():
            self.require(not left, f"{what}: {left}")

    def _remembered(self) -> Mapping[str, Sized]:
        vllm, side, aggregator = self._engine.vllm, self._engine.side, self._engine.aggregator
        remembered: dict[str, Sized] = {
            "vLLM waits for loads that have ended": vllm.finished_recving_kv_req_ids,
            "vLLM remembers failed loads": vllm.failed_recving_kv_req_ids,
            "vLLM has not freed blocks": vllm.deferred_frees,
            "vLLM remembers prefills": vllm._inflight_prefills,
            "vLLM waits for more ranks to end loads": aggregator._recv_remaining_count,
            "vLLM waits for more ranks to end sending": aggregator._send_remaining_count,
            "vLLM waits for more ranks whose loads failed": aggregator._failed_recving_pending,
            "the adapter knows requests": side._requests,
            "the adapter waits for loads": side._loading,
            "the adapter waits for look-ups": side._deferrals,
            "the adapter remembers failed loads": side._failed,
            "the adapter remembers loads": side._parked,
            "the adapter remembers hits": side._num_computed,
            "the adapter remembers admissions": side._admitted,
        }
        for rank, worker in enumerate(self._engine.workers):
            own = worker.connector._worker
            remembered[f"the adapter on rank {rank} waits for loads"] = own._loading
            remembered[f"the adapter on rank {rank} waits for sending"] = own._sending
            remembered[f"the adapter on rank {rank} remembers failed loads"] = own._failed
        return remembered


# --- the environment variables that vLLM reads ------------------------------------------------------------------------

_INT_HASHES: Final = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


@contextmanager
def whole_hashes() -> Iterator[None]:
    """Within the ``with`` block, vLLM's events name blocks by whole hashes, which can be looked up, not by 64 bits of them."""
    before = os.environ.get(_INT_HASHES)
    os.environ[_INT_HASHES] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INT_HASHES]
        else:
            os.environ[_INT_HASHES] = before


# --- scenarios that can be played with vLLM's scheduler ---------------------------------------------------------------

APPLICABLE: Final = tuple(name for name, kind in CONNECTORS.items() if kind.with_context and kind.applies_locks)
"""Names of the connectors that can be played: inside vLLM there is always a view of the pool."""


class VllmWorld(World):
    """Makes engines around vLLM's scheduler, in the same world of links, tiers and faults."""

    def new_engine(self) -> Replica:
        """An engine as after a start of its process."""
        scenario = self._scenario
        self._links, self._faulty, self._queues = [], [], []
        self.copies = [CopiesInFlight(rank) for rank in range(scenario.shape.world_size)]
        random = Random(f"{scenario.seed}/vllm")  # noqa: S311  # repeatable, on purpose
        with standing_on(self._factory, self.clock):
            engine = VllmEngine(scenario.shape, clock=self.clock, copies=self.copies, random=random)
        engine.workers[0].runner.before_forward = self._advance_links
        return engine

    def oracles(self, engine: Replica) -> list[Oracle]:
        """The oracle for what must hold in vLLM and in the adapter."""
        assert isinstance(engine, VllmEngine)
        return [BridgeOracle(engine)]


class VllmRun(Run):
    """A run whose engines are vLLM's. Sets the environment variable that vLLM needs, and quiets its log."""

    def play(self) -> RunResult:
        """Play to the end, or to the first failure."""
        with quiet_logging("vllm"), whole_hashes():
            return super().play()


class VllmRecipe(Recipe):
    """The same scenarios, with vLLM's scheduler in the place of ours. Raises ``ConfigError`` for an inapplicable connector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.connector in CONNECTORS and self.connector not in APPLICABLE:
            expected = f"with vLLM, where connectors always see the pool, {ANY} or one of {', '.join(APPLICABLE)}"
            raise ConfigError("connector", self.connector, expected)

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed, fitted for vLLM."""
        random = Random(f"{seed}/vllm scenario")  # noqa: S311  # repeatable, on purpose
        connector = random.choice(APPLICABLE) if self.connector == ANY else self.connector
        with quiet_logging("vllm"):
            scenario = fitted(draw_scenario(seed, self.workload, connector, self.faults), random)
        late = Random(f"{seed}/late blocks")  # noqa: S311  # so, too
        if scenario.workload in REUSING or late.random() < 0.8:
            return scenario
        return with_late_blocks(scenario, late.uniform(0.1, 0.6))

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> Run:
        """A run of ``scenario``."""
        return VllmRun(scenario, timeline=timeline, world=VllmWorld(scenario))


def with_late_blocks(scenario: Scenario, rate: float) -> Scenario:
    """The scenario with a vLLM that tells the connector late of blocks, and takes nothing of some hits."""
    scheduler = {**scenario.shape.scheduler, LATE_BLOCKS: rate}
    return replace(scenario, shape=replace(scenario.shape, scheduler=scheduler))


def fitted(scenario: Scenario, random: Random) -> Scenario:
    """Change the scenario's engine into one that vLLM supports. Options that our own engine does not have are drawn.

    * Recurrent state needs a prefix cache, and blocks no larger than those of other groups.
    * With chunked local attention, vLLM needs blocks of one size, and chunks of whole blocks.
    * vLLM gives every request an id of its own, and knows its tenant by its salt.
    * The pool keeps its number of spare blocks, beyond those without which vLLM does not start. Where a prefix may end
      inside a block, it gets one more per group: vLLM copies such blocks, and does not make sure that it ever has room to.
    """
    asks = [action for action in scenario.actions if isinstance(action, Ask)]
    longest = max((len(ask.prompt) + ask.max_tokens for ask in asks), default=1)
    shape, options = scenario.shape, dict(scenario.shape.scheduler)
    num_needed = num_own_blocks_needed(shape.groups, longest, options["max_num_batched_tokens"])
    num_spare = max(shape.num_blocks - num_needed, 0)  # with fewer groups than were drawn, the pool may be too small
    if any(plan.kind is AttentionKind.RECURRENT for plan in shape.groups):
        options["prefix_caching"] = True  # without it vLLM keeps one state per request, which is no prefix of anything
    options |= {
        # vLLM refuses to start without room for one token of each request in a step.
        "max_num_batched_tokens": max(options["max_num_batched_tokens"], options["max_num_seqs"]),
        MAX_MODEL_LEN: longest + 1,
        ASYNC: random.random() < 0.4,
    }
    groups = _fitted_groups(shape.groups)
    if CAN_RETAIN_LESS and random.random() < 0.3:
        options[RETAINED] = 0  # vLLM's default
    match_unit = _match_unit(groups, random)
    if match_unit is not None:
        options[MATCH_UNIT] = match_unit
        num_spare += len(groups)
    shape = replace(shape, groups=groups, scheduler=options)
    shape = replace(shape, num_blocks=num_blocks_needed(shape) + num_spare)
    plan = replace(scenario.connector, with_context=True, applies_locks=True)
    actions = tuple(map(_with_salt, without_used_ids(scenario.actions)))
    return replace(scenario, shape=shape, connector=plan, actions=actions)


def _with_salt(action: Action) -> Action:
    return replace(action, salt=action.tenant or action.salt, tenant=None) if isinstance(action, Ask | Tell) else action


def _match_unit(groups: tuple[GroupPlan, ...], random: Random) -> int | None:
    """Draw tokens per block hash where users may set it: with recurrent state beside attention. States are left there, too."""
    if len(groups) == 1 or not any(plan.kind is AttentionKind.RECURRENT for plan in groups):
        return None
    return random.choice((None, random.choice((1, 2, min(plan.block_tokens for plan in groups)))))


def _fitted_groups(groups: tuple[GroupPlan, ...]) -> tuple[GroupPlan, ...]:
    smallest = min(plan.block_tokens for plan in groups)
    fitted = [replace(plan, block_tokens=smallest) if plan.kind is AttentionKind.RECURRENT else plan for plan in groups]
    if any(plan.kind is AttentionKind.CHUNKED_LOCAL for plan in groups):
        block_tokens = groups[0].block_tokens
        fitted = [replace(plan, block_tokens=block_tokens) for plan in fitted]
        fitted = [
            replace(plan, window_tokens=-(-plan.window_tokens // block_tokens) * block_tokens)
            if plan.kind is AttentionKind.CHUNKED_LOCAL and plan.window_tokens is not None
            else plan
            for plan in fitted
        ]
    return tuple(fitted)
