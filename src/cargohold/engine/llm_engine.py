"""The engine: requests in, steps, outputs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.engine.core.request import FinishReason, Request, RequestTimes
from cargohold.engine.core.scheduler import RequestUpdate, Scheduler
from cargohold.engine.executor.base import Executor
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.engine.text_stream import TextStream
from cargohold.errors import EngineDeadError, RequestError
from cargohold.protocol import Clock, KVEvent

IDLE_SLEEP_S = 0.0005
"""Pause after a step in which nothing was computed and nothing ended: transfers run meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must fit into.

    Attributes:
        max_model_len: prompt and generated tokens together.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a sequence.
        hash_block_tokens: tokens per block hash.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    hash_block_tokens: int


@dataclass(slots=True)
class _Live:
    """A request on its way, and its text so far."""

    request: Request
    prompt: str | None
    stream: TextStream


class LLMEngine:
    """Serves requests, step by step. One thread owns it.

    Args:
        scheduler: decides.
        executor: computes.
        tokenizer: text to tokens and back; ``None`` if the model has none.
        limits: what a request must fit into.
        clock: monotonic time in seconds.
        sleep: how to wait.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.limits = limits
        self._executor = executor
        self._clock = clock
        self._sleep = sleep
        self._live: dict[str, _Live] = {}
        self._num_requests = 0
        self._dead: BaseException | None = None

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue a request; returns its id.

        Args:
            prompt: text, or token ids.
            sampling: how to choose tokens; greedy by default.
            request_id: unique among the requests alive; made up if ``None``.
            priority: lower is served first, under the ``priority`` policy.
            salt: requests share cached KV only with requests of the same salt.
            kv_transfer_params: what to ask of the connectors; see the documentation of the connector.

        Raises:
            RequestError: the request cannot be served; nothing was queued.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        sampling = sampling or SamplingParams()
        self._num_requests += 1
        request_id = request_id if request_id is not None else f"request-{self._num_requests}"
        if request_id in self._live:
            raise RequestError("a request with this id is being served already", request_id)
        token_ids = self._token_ids(prompt, request_id)
        request = Request(
            request_id=request_id,
            all_token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else self._num_requests,
            times=RequestTimes(arrived=self._clock()),
            hash_block_tokens=self.limits.hash_block_tokens,
            priority=priority,
            salt=salt,
            kv_transfer_params=kv_transfer_params,
            stop_token_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self.limits.eos_token_ids),
        )
        self.scheduler.add_request(request)
        decoder = None if self.tokenizer is None else self.tokenizer.piece_decoder()
        stream = TextStream(decoder, tuple(sampling.stop))
        self._live[request_id] = _Live(request, prompt if isinstance(prompt, str) else None, stream)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; its last output, or ``None`` if it is not alive. Its blocks are freed when no copy uses them."""
        update = self.scheduler.finish_request(request_id, FinishReason.ABORT)
        return None if update is None else self._output(update)

    # --- stepping -----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether another ``step`` is needed: requests, transfers or references are pending."""
        return self._dead is None and self.scheduler.has_work()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.num_unfinished

    def step(self) -> list[RequestOutput]:
        """Compute one step; outputs of the requests that moved on.

        Raises:
            EngineDeadError: computing failed; every request has ended with an error, and the engine cannot go on.
        """
        self._check_alive()
        step = self.scheduler.schedule()
        try:
            output = self._executor.execute(step)
        except BaseException as error:
            self._dead = error
            self._executor.shutdown()
            raise EngineDeadError(f"a step failed, the engine has stopped: {error}") from error
        updates = self.scheduler.update_from_output(output)
        if not step.scheduled and not updates and output.connector.is_empty() and self.scheduler.has_work():
            self._sleep(IDLE_SLEEP_S)
        return [result for update in updates if (result := self._output(update)) is not None]

    def settle(self, timeout_s: float | None = None) -> bool:
        """Step until nothing is pending, dropping outputs; ``False`` if that took longer than ``timeout_s``."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while self.has_work():
            if deadline is not None and self._clock() > deadline:
                return False
            self.step()
        return True

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and below; ``False`` if requests or transfers are in flight."""
        self._check_alive()
        return self.scheduler.reset_cache()

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call."""
        return self.scheduler.take_events()

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """End all requests, let transfers finish, stop the workers. May be called twice."""
        for request_id in self.scheduler.unfinished_ids:
            self.abort(request_id)
        if self._dead is None:
            self.settle(timeout_s)
            self._dead = EngineDeadError("the engine was shut down")
            self._executor.shutdown()
            self.scheduler.connector.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}") from self._dead

    def _token_ids(self, prompt: str | Sequence[int], request_id: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give the prompt as token ids", request_id)
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty", request_id)
        bad = next((token_id for token_id in token_ids if not self._is_token_id(token_id)), None)
        if bad is not None:
            raise RequestError(f"token id {bad!r} is not an integer in [0, {self.limits.vocab_size})", request_id)
        if len(token_ids) >= self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with one token to generate, at most "
                f"{self.limits.max_model_len - 1} fit (see max_model_len and num_device_blocks)",
                request_id,
            )
        return token_ids

    def _is_token_id(self, value: object) -> bool:
        return isinstance(value, int) and 0 <= value < self.limits.vocab_size

    def _output(self, update: RequestUpdate) -> RequestOutput | None:
        """The output for an update; ``None`` for one that another update of the same step makes superfluous."""
        request = update.request
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            return None
        for token_id in update.new_token_ids:
            # What ends a request is not part of its text.
            if token_id not in request.stop_token_ids and live.stream.push(token_id) and not request.is_finished:
                ended = self.scheduler.finish_request(request.request_id, FinishReason.STOP)
                return None if ended is None else self._output(ended)
        if request.is_finished:
            if update.new_token_ids:
                return None  # the update that ended it follows
            del self._live[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            prompt=live.prompt,
            prompt_token_ids=tuple(request.all_token_ids[: request.num_prompt_tokens]),
            text=live.stream.text,
            new_text=live.stream.release(finished=request.is_finished),
            token_ids=tuple(request.output_token_ids),
            finished=request.is_finished,
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            error=request.error,
            metrics=_metrics(update),
            cache_notes=update.cache_report.notes,
            kv_transfer_params=update.kv_transfer_params,
        )


def _metrics(update: RequestUpdate) -> RequestMetrics:
    request, times = update.request, update.request.times
    return RequestMetrics(
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        device_tokens=request.num_first_device_tokens,
        restored_tokens=dict(update.cache_report.restored_tokens),
        ttft_s=None if times.first_token is None else times.first_token - times.arrived,
        load_wait_s=times.load_wait_s,
        total_s=None if times.finished is None else times.finished - times.arrived,
        preemptions=request.num_preemptions,
    )
