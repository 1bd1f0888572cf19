"""The real scheduler and worker around a fingerprint model, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cargohold.engine.core.config import SchedulerConfig
from cargohold.engine.core.request import FinishReason, Request, RequestTimes
from cargohold.engine.core.scheduler import RequestUpdate, Scheduler
from cargohold.engine.core.step import ScheduledTokens, SchedulerStep, StepOutput
from cargohold.engine.executor import InlineExecutor, Worker
from cargohold.engine.sampling_params import SamplingParams
from cargohold.protocol import (
    NULL_CONNECTOR,
    AttentionKind,
    KVCacheGroup,
    KVCacheLayout,
    KVConnectorFactory,
    SchedulerEnvironment,
    WorkerEnvironment,
)
from cargohold.simulation.clock import VirtualClock
from cargohold.simulation.fingerprints import FINGERPRINT_BYTES, WRONG_TOKEN, FingerprintRunner, PrefixChains

VOCAB_SIZE = 1000
STEP_S = 0.01


def simulated_layout(
    num_blocks: int, block_tokens: int = 4, windows: Sequence[int | None] = (None,), world_size: int = 1
) -> KVCacheLayout:
    """A paged KV cache for fingerprints.

    Args:
        windows: one KV-cache group each: ``None`` for full attention, else the window in tokens.
    """
    groups = tuple(
        KVCacheGroup(
            index,
            AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW,
            block_tokens,
            (f"layers.{index}",),
            window,
        )
        for index, window in enumerate(windows)
    )
    return KVCacheLayout(groups, num_blocks, block_tokens * FINGERPRINT_BYTES, block_tokens, world_size)


class SimulatedEngine:
    """An engine replica with one worker, whose every step is checked for wrong tokens.

    Args:
        layout: the paged KV cache; see ``simulated_layout``.
        factory: the connector.
        clock: virtual time; advances by ``STEP_S`` per step.
        with_context: whether the connector gets a scheduler context.
        config: fields of ``SchedulerConfig`` that differ from small defaults.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        factory: KVConnectorFactory = NULL_CONNECTOR,
        *,
        clock: VirtualClock | None = None,
        with_context: bool = True,
        applies_locks: bool = True,
        **config: Any,
    ) -> None:
        self.clock = clock or VirtualClock()
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 10**6, "load_timeout_s": 60.0}
        self.config = SchedulerConfig(**{**defaults, **config})
        environment = SchedulerEnvironment(
            layout,
            self.clock,
            max_step_tokens=self.config.max_num_batched_tokens,
            prefix_caching=self.config.prefix_caching,
            applies_locks=applies_locks,
            emits_events=self.config.emit_events,
        )
        self.connector = factory.make_scheduler_side(environment)
        self.scheduler = Scheduler(self.config, layout, self.connector, self.clock, with_context=with_context)
        self.chains = PrefixChains(lambda request_id: self.requests[request_id].all_token_ids)
        self.runner = FingerprintRunner(layout, self.chains, VOCAB_SIZE)
        self.worker_side = factory.make_worker_side(WorkerEnvironment(layout, 0, self.clock))
        self.executor = InlineExecutor(Worker(self.runner, self.worker_side))
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, RequestUpdate] = {}
        self.num_steps = 0
        self._layout = layout

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Request:
        """Queue a request."""
        request = Request(
            request_id=request_id,
            all_token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            seed=0,
            times=RequestTimes(arrived=self.clock()),
            hash_block_tokens=self._layout.hash_block_tokens,
            priority=priority,
            salt=salt,
            kv_transfer_params=kv_transfer_params,
        )
        self.requests[request_id] = request
        self.chains.forget(request_id)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request."""
        update = self.scheduler.finish_request(request_id, FinishReason.ABORT)
        if update is not None:
            self.outputs[request_id] = update

    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """One step; raises ``WrongTokenError`` if it reads KV that is not what it should be, and its result is used."""
        step = self.scheduler.schedule()
        output = self.executor.execute(step)
        wrong = dict(self.runner.wrong)
        for update in self.scheduler.update_from_output(output):
            if update.request.is_finished:
                self.outputs[update.request.request_id] = update
        for share in step.scheduled:
            if share.request_id in wrong and self._was_used(share):
                raise wrong[share.request_id]
        self.num_steps += 1
        self.clock.advance(STEP_S)
        return step, output

    def _was_used(self, share: ScheduledTokens) -> bool:
        """Whether the request moved on with what this step computed for it, instead of starting over."""
        request = self.requests[share.request_id]
        end = share.num_computed_tokens + share.num_scheduled_tokens
        return request.num_computed_tokens >= end or WRONG_TOKEN in request.output_token_ids

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
