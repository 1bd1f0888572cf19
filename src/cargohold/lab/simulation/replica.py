"""An engine replica as a run and its oracles see it, the base of oracles, and the replica with our own scheduler in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn

from cargohold.blocks import extend_hashes, root_hash
from cargohold.engine.core.request import (
    FinishReason,
    Request,
    RequestTimes,
    SamplingParams,
    ScheduledTokens,
    SchedulerStep,
    StepOutput,
)
from cargohold.engine.core.request_queues import SchedulerConfig
from cargohold.engine.core.scheduler import RequestUpdate, Scheduler
from cargohold.engine.executor import Worker, merge_outputs
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.lab.simulation.fingerprints import WRONG_TOKEN, FingerprintRunner, PrefixChains
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.protocol import (
    NULL_CONNECTOR,
    Clock,
    Hint,
    KVCacheLayout,
    KVConnectorFactory,
    OutputAggregator,
    Prefix,
    SchedulerEnvironment,
    WorkerEnvironment,
)

NO_OUTPUT: Final = StepOutput()
"""The output of a step that has not been made yet."""


class Replica(ABC):
    """An engine replica in virtual time, checked for wrong tokens in every step.

    Args:
        layout: the paged KV cache.
        config: its limits and policies.
        clock: time in seconds.
        copies: per rank, the copies in flight.
        hash_block_tokens: tokens per block hash of its requests.

    Attributes:
        requests: all requests so far by id, in the state that their clients know of.
        num_steps: steps made.
        last_step: the step made last, or being made, and its output.
        on_update: called with each update of a request.
        dedupes_blocks: whether the device pool keeps each prefix at most once.
        has_own_hashes: whether block hashes are those of ``cargohold.blocks``, so that events can be checked.
        takes_less: whether it may take less than a connector has found, or later, when others have got the same answer.
        scheduler: its scheduler, or what shows another one in the same way.
        chains: the fingerprints of its requests' prefixes.
    """

    dedupes_blocks: ClassVar[bool]
    has_own_hashes: ClassVar[bool]
    takes_less = False
    scheduler: Scheduler
    chains: PrefixChains

    def __init__(
        self,
        layout: KVCacheLayout,
        config: SchedulerConfig,
        clock: Clock,
        copies: Sequence[CopiesInFlight],
        hash_block_tokens: int,
    ) -> None:
        self.layout = layout
        self.config = config
        self.clock = clock
        self.copies = copies
        self.requests: dict[str, Request] = {}
        self.num_steps = 0
        self.last_step = (SchedulerStep(), NO_OUTPUT)
        self.on_update: Callable[[RequestUpdate], None] = lambda _: None
        self._hash_block_tokens = hash_block_tokens

    @property
    def shares_loads(self) -> bool:
        """Whether blocks loaded for one request are found by others on the device."""
        return self.config.prefix_caching and self._finds_loads()

    @property
    def shares_load_ends(self) -> bool:
        """Whether at least those are found with which others can continue where the load ends."""
        return self.config.prefix_caching and self._finds_load_ends()

    def _finds_loads(self) -> bool:
        return True

    def _finds_load_ends(self) -> bool:
        return True

    @property
    @abstractmethod
    def num_half_reported(self) -> int:
        """Transfers that some workers have reported and others have not."""

    def add(  # noqa: PLR0913  # options that callers name
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
        hints: Sequence[Hint] = (),
        tenant: str | None = None,
    ) -> Request:
        """Queue a request. Raises ``RequestError`` if it is refused."""
        request = Request(
            request_id=request_id,
            all_token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            seed=0,
            times=RequestTimes(arrived=self.clock()),
            hash_block_tokens=self._hash_block_tokens,
            priority=priority,
            salt=salt,
            kv_transfer_params=kv_transfer_params,
            stop_token_ids=frozenset(stop_token_ids),
            tenant=tenant,
        )
        self.requests[request_id] = request
        self.chains.forget(request_id)
        self._queue(request, hints)
        return request

    def hint(self, prompt: Sequence[int], salt: str | None, hints: Sequence[Hint], tenant: str | None = None) -> None:
        """Give hints about a prefix to the connector; without a ``tenant``, they are the salt's."""
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, self._hash_block_tokens, root_hash(salt=salt))
        self.scheduler.connector.on_hints(Prefix(hashes, prompt, len(prompt), salt, tenant or salt), hints)

    @abstractmethod
    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        """Hand a request and its hints to the scheduler. Raises ``RequestError`` if it is refused."""

    tells_weights_apart = False
    """Whether other weights need no other names in tiers after a restart, because the engine itself tells them apart."""

    def is_shown(self, request_id: str, num_computed_tokens: int) -> bool:
        """Whether the connector sees a request in the steps in which it is computed, up to so many tokens at last."""
        return True

    def load_weights(self, version: int) -> None:
        """Compute KV with another version of the weights from now on."""
        self.chains.use_weights(version)

    def announce_reset(self, *, sleeps: bool) -> bool:
        """Note that all caches are to be reset, as before sleep or not. Returns whether all requests are aborted for that."""
        return False

    @property
    def num_steps_before_weights(self) -> int:
        """How many steps are made after a reset, before other weights come: they compute nothing."""
        return 0

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request."""

    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """Make one step. Raises ``WrongTokenError`` if a request reads wrong KV in it and the step's result is used."""
        made = self._step()
        self.num_steps += 1
        return made

    @abstractmethod
    def _step(self) -> tuple[SchedulerStep, StepOutput]:
        """See ``step``; sets ``last_step`` as it goes on."""

    @abstractmethod
    def cached_prefixes(self) -> set[tuple[bytes, int]]:
        """Hash and group of every prefix that the device pool can find."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the replica."""


class OracleError(AssertionError):
    """Something that must always hold does not.

    Attributes:
        oracle: name of the oracle that found it.
    """

    def __init__(self, oracle: str, message: str) -> None:
        super().__init__(f"{oracle}: {message}")
        self.oracle = oracle


class Oracle:
    """Watches one engine replica. The defaults watch nothing.

    Attributes:
        name: what it is called in reports.
    """

    name = "oracle"

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Cheap checks, after every step."""

    def on_update(self, update: RequestUpdate) -> None:
        """Learn what has become of a request."""

    def inspect(self) -> None:
        """Thorough checks, which walk everything; made now and then."""

    def at_end(self) -> None:
        """Checks when all work is done."""

    def require(self, holds: bool, message: str) -> None:
        """Raise ``OracleError`` unless ``holds``. In checks after every step, use ``fail``, which saves making the message."""
        if not holds:
            self.fail(message)

    def fail(self, message: str) -> NoReturn:
        raise OracleError(self.name, message)


class SimulatedExecutor:
    """Runs each step on one worker after the other. Satisfies ``Executor``.

    Args:
        workers: by rank.
        expected_finished_count: the connector's answer to ``KVConnectorScheduler.get_finished_count``.

    Attributes:
        workers: by rank.
        aggregator: merges the workers' reports.
    """

    def __init__(self, workers: Sequence[Worker], expected_finished_count: int | None = None) -> None:
        self.workers = workers
        self.aggregator = OutputAggregator(len(workers), expected_finished_count)

    def execute(self, step: SchedulerStep) -> StepOutput:
        return merge_outputs(self.aggregator, [worker.execute(step) for worker in self.workers])

    def shutdown(self) -> None:
        """Stop all workers."""
        for worker in self.workers:
            worker.shutdown()


# --- the real scheduler and workers around a fingerprint model --------------------------------------------------------

VOCAB_SIZE = 1000
STEP_S = 0.01

DEFAULTS: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 10**6,
    "load_timeout_s": 60.0,
}


def root_of_salt(salt: str | None) -> int:
    """The number that fingerprints of requests with this salt start from, so that reading another tenant's KV is noticed."""
    return 1 if salt is None else 1 + int.from_bytes(salt.encode()[:7], "little")


class SimulatedEngine(Replica):
    """The real scheduler and connector around a fingerprint model.

    Args:
        layout: the paged KV cache; see ``layout_of``. It has ``world_size`` workers.
        factory: the connector.
        clock: time in seconds; a virtual clock advances by ``STEP_S`` per step.
        with_context: whether the connector gets a scheduler context.
        applies_locks: whether the connector is notified that its locks are applied.
        copies: per rank, the copies in flight, which the connector's transfers note; by default, none are noted.
        as_tensors: whether connectors get the paged KV as PyTorch tensors.
        loads_in_step: whether connectors may load within the step that computes with it; see ``SchedulerEnvironment``.
        config: fields of ``SchedulerConfig`` that differ from small defaults.

    Attributes:
        outputs: the last update of each request that has ended.
        runners, worker_sides: the workers' models and connectors, by rank.
    """

    dedupes_blocks = True
    has_own_hashes = True

    def __init__(  # noqa: PLR0913  # options that tests name
        self,
        layout: KVCacheLayout,
        factory: KVConnectorFactory = NULL_CONNECTOR,
        *,
        clock: Clock | None = None,
        with_context: bool = True,
        applies_locks: bool = True,
        copies: Sequence[CopiesInFlight] | None = None,
        as_tensors: bool = False,
        loads_in_step: bool = False,
        **config: Any,
    ) -> None:
        clock = clock or VirtualClock()
        ranks = range(layout.world_size)
        copies = [CopiesInFlight(rank) for rank in ranks] if copies is None else copies
        super().__init__(layout, SchedulerConfig(**{**DEFAULTS, **config}), clock, copies, layout.hash_block_tokens)
        self._pass_time = clock.advance if isinstance(clock, VirtualClock) else _let_it_pass
        environment = SchedulerEnvironment(
            layout,
            clock,
            max_step_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            prefix_caching=self.config.prefix_caching,
            applies_locks=applies_locks,
            emits_events=self.config.emit_events,
            emits_salted_events=self.config.emit_salted_events,
            give_up_loads_after_s=self.config.give_up_loads_after_s,
            loads_in_step=loads_in_step,
        )
        self.connector = factory.make_scheduler_side(environment)
        self.scheduler = Scheduler(self.config, layout, self.connector, clock, with_context=with_context)
        self.outputs: dict[str, RequestUpdate] = {}
        self.chains = PrefixChains(
            lambda request_id: self.requests[request_id].all_token_ids,
            lambda request_id: root_of_salt(self.requests[request_id].salt),
        )
        self.runners = [
            FingerprintRunner(layout, self.chains, VOCAB_SIZE, rank, copies=copies[rank], as_tensors=as_tensors)
            for rank in ranks
        ]
        self.worker_sides = [factory.make_worker_side(WorkerEnvironment(layout, rank, clock)) for rank in ranks]
        self.executor = SimulatedExecutor(
            [Worker(runner, side) for runner, side in zip(self.runners, self.worker_sides, strict=True)],
            self.scheduler.connector.get_finished_count(),
        )

    @property
    def runner(self) -> FingerprintRunner:
        """The first worker's model."""
        return self.runners[0]

    @property
    def num_half_reported(self) -> int:
        return self.executor.aggregator.num_incomplete

    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        self.scheduler.add_request(request, hints)

    def abort(self, request_id: str) -> None:
        update = self.scheduler.finish_request(request_id, FinishReason.ABORT)
        if update is not None:
            self.outputs[request_id] = update
            self.on_update(update)

    def _step(self) -> tuple[SchedulerStep, StepOutput]:
        step = self.scheduler.schedule()
        self.last_step = (step, NO_OUTPUT)
        output = self.executor.execute(step)
        self._pass_time(
            STEP_S
        )  # before the connector is notified of the end of the step: it measures how long steps take
        self.last_step = (step, output)
        updates = self.scheduler.update_from_output(output)
        self._check_tokens(step)
        for update in updates:
            if update.request.is_finished:
                self.outputs[update.request.request_id] = update
            self.on_update(update)
        return step, output

    def cached_prefixes(self) -> set[tuple[bytes, int]]:
        pool = self.scheduler.kv.pool
        return {prefix for prefix in pool.contents(range(1, pool.num_blocks)) if prefix is not None}

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is pending. Raises ``AssertionError`` if that takes more than ``max_steps``."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].output_token_ids)

    def shutdown(self) -> None:
        """Stop the workers, then the connector."""
        self.executor.shutdown()
        self.scheduler.connector.shutdown()

    def _check_tokens(self, step: SchedulerStep) -> None:
        for runner in self.runners:
            if runner.wrong:
                for share in step.scheduled:
                    if share.request_id in runner.wrong and self._was_used(share):
                        raise runner.wrong[share.request_id]

    def _was_used(self, share: ScheduledTokens) -> bool:
        """Whether the request went on with what this step computed for it, instead of starting over."""
        request = self.requests[share.request_id]
        end = share.num_computed_tokens + share.num_scheduled_tokens
        return request.num_computed_tokens >= end or WRONG_TOKEN in request.output_token_ids


def _let_it_pass(_: float) -> None:
    """Do nothing: a clock that is not virtual goes by itself."""
