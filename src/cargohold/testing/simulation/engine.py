"""The real scheduler and workers around a fingerprint model, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cargohold.engine.core.config import SchedulerConfig
from cargohold.engine.core.request import FinishReason, Request
from cargohold.engine.core.scheduler import RequestUpdate, Scheduler
from cargohold.engine.core.step import ScheduledTokens, SchedulerStep, StepOutput
from cargohold.engine.executor import Worker
from cargohold.engine.executor.base import merge_outputs
from cargohold.protocol import (
    NULL_CONNECTOR,
    Clock,
    Hint,
    KVCacheLayout,
    KVConnectorFactory,
    OutputAggregator,
    SchedulerEnvironment,
    WorkerEnvironment,
)
from cargohold.testing.simulation.clock import VirtualClock
from cargohold.testing.simulation.fingerprints import WRONG_TOKEN, FingerprintRunner, PrefixChains
from cargohold.testing.simulation.replica import NO_OUTPUT, Replica
from cargohold.testing.simulation.transfers import CopiesInFlight


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
        """Run one step."""
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
        applies_locks: whether the connector is told that its locks are applied.
        copies: per rank, the copies in flight, which the connector's transfers note; by default, none are noted.
        as_tensors: whether connectors get the paged KV as PyTorch tensors.
        config: fields of ``SchedulerConfig`` that differ from small defaults.

    Attributes:
        outputs: the last update of each request that has ended.
        runners, worker_sides: the workers' models and connectors, by rank.
    """

    dedupes_blocks = True
    has_own_hashes = True

    def __init__(
        self,
        layout: KVCacheLayout,
        factory: KVConnectorFactory = NULL_CONNECTOR,
        *,
        clock: Clock | None = None,
        with_context: bool = True,
        applies_locks: bool = True,
        copies: Sequence[CopiesInFlight] | None = None,
        as_tensors: bool = False,
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
        )
        self.connector = factory.make_scheduler_side(environment)
        self._scheduler = Scheduler(self.config, layout, self.connector, clock, with_context=with_context)
        self.outputs: dict[str, RequestUpdate] = {}
        self._chains = PrefixChains(
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
    def scheduler(self) -> Scheduler:
        """The scheduler that production runs."""
        return self._scheduler

    @property
    def chains(self) -> PrefixChains:
        """See the port."""
        return self._chains

    @property
    def runner(self) -> FingerprintRunner:
        """The first worker's model."""
        return self.runners[0]

    @property
    def shares_loads(self) -> bool:
        """Whether blocks loaded for one request are found by others on the device."""
        return self.config.prefix_caching

    @property
    def shares_load_ends(self) -> bool:
        """Whether at least those are found with which others can continue where the load ends."""
        return self.config.prefix_caching

    @property
    def num_half_reported(self) -> int:
        """Transfers that some workers have reported and others have not."""
        return self.executor.aggregator.num_incomplete

    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        self.scheduler.add_request(request, hints)

    def abort(self, request_id: str) -> None:
        """End a request."""
        update = self.scheduler.finish_request(request_id, FinishReason.ABORT)
        if update is not None:
            self.outputs[request_id] = update
            self.on_update(update)

    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """Make one step. Raises ``WrongTokenError`` if a request reads wrong KV in it and the step's result is used."""
        step = self.scheduler.schedule()
        self.last_step = (step, NO_OUTPUT)
        output = self.executor.execute(step)
        self._pass_time(STEP_S)  # before the connector hears that the step has ended: it measures how long steps take
        self.last_step = (step, output)
        updates = self.scheduler.update_from_output(output)
        self._check_tokens(step)
        for update in updates:
            if update.request.is_finished:
                self.outputs[update.request.request_id] = update
            self.on_update(update)
        self.num_steps += 1
        return step, output

    def cached_prefixes(self) -> set[tuple[bytes, int | None]]:
        """Hash and group of every prefix that the device pool can find."""
        pool = self.scheduler.kv.pool
        blocks = [pool.get_block(block_id) for block_id in range(1, pool.num_blocks)]
        return {(block.block_hash, block.group_id) for block in blocks if block.block_hash is not None}

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is pending. Raises ``AssertionError`` if that takes more than ``max_steps``."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        """Tokens generated for a request."""
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
