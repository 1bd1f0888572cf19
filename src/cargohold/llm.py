"""The front door: a model, its engine and its connector, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from cargohold.connector.factory import Offload, connector_factory
from cargohold.engine.config import EngineConfig, EnginePlan, plan_engine
from cargohold.engine.core.scheduler import Scheduler
from cargohold.engine.executor import Executor, InlineExecutor, Worker
from cargohold.engine.llm_engine import EngineLimits, LLMEngine
from cargohold.engine.model.info import describe_model
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.outputs import RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.errors import ConfigError, RequestError
from cargohold.interrupts import deferred_interrupt
from cargohold.protocol import (
    KVConnectorFactory,
    KVEvent,
    SchedulerEnvironment,
    WorkerEnvironment,
)

Prompt = str | Sequence[int]
Progress = Callable[[int, int], None]


class LLM:
    """A language model, served in this process.

    ::

        llm = LLM("smollm2", num_device_blocks=256, offload=OffloadConfig(host_bytes="2GiB"))
        for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(out.text, out.metrics)

    Use it as a context manager, or call ``close``, to stop its transfers and give its memory back. Not thread-safe.

    Args:
        model: a directory, a GGUF file, a Hugging Face hub id, or ``smollm2``.
        offload: keep KV that the device pool has no room for: an ``OffloadConfig``, a ``LazyOffloadConfig``, the factory of
            any connector of the contract, or a list of these, most preferred first. ``None`` keeps nothing.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError: an option is unknown or impossible.
        ModelError: the model is not there, or cannot be served.
    """

    def __init__(self, model: str, *, offload: Offload | Sequence[Offload] | None = None, **options: Any) -> None:
        unknown = sorted(options.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            known = ", ".join(sorted(EngineConfig.__dataclass_fields__.keys() - {"model"}))
            raise ConfigError(unknown[0], options[unknown[0]], f"there is no such option; there are offload, {known}")
        self.plan = plan_engine(config := EngineConfig(model=model, **options), describe_model(model, config.dtype))
        self.engine = build_engine(self.plan, connector_factory(offload))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **request_options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts, batched as far as the pool allows; outputs in the order of the prompts.

        Args:
            prompts: one prompt or several; each text or token ids.
            sampling: for all prompts, or one per prompt.
            progress: called with the number of prompts done and the number of all, whenever it changes.
            request_options: ``priority``, ``salt`` and ``kv_transfer_params``, for all prompts; see
                ``LLMEngine.add_request``.

        Raises:
            RequestError: a prompt cannot be served; none was started.
        """
        prompt_list = _as_list(prompts)
        samplings = _per_prompt(sampling, len(prompt_list))
        ids = self._add_all(prompt_list, samplings, request_options)
        done: dict[str, RequestOutput] = {}
        try:
            while len(done) < len(ids):
                finished = {out.request_id: out for out in self._step() if out.finished}
                done |= finished
                if progress is not None and finished:
                    progress(len(done), len(ids))
        finally:
            for request_id in ids:
                self.engine.abort(request_id)  # those that an interrupt left behind
        self.engine.settle()
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **request_options: Any
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding an output per new piece; the last one is ``finished``.

        Closing the iterator early aborts the request.
        """
        request_id = self.engine.add_request(prompt, sampling, **request_options)
        try:
            while True:
                for output in self._step():
                    if output.request_id == request_id:
                        yield output
                        if output.finished:
                            return
        finally:
            self.engine.abort(request_id)
            self.engine.settle()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        **request_options: Any,
    ) -> RequestOutput:
        """Answer a conversation: messages with ``role`` (system, user, assistant) and ``content``."""
        return self.generate([self.chat_prompt(messages)], sampling, **request_options)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak."""
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it has no chat template")
        return self.engine.tokenizer.apply_chat_template(messages)

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and below; ``False`` if requests or transfers are in flight."""
        return self.engine.reset_cache()

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call, if ``kv_events`` is on."""
        return self.engine.take_events()

    def close(self) -> None:
        """End everything and give the memory back. May be called twice."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_all(
        self, prompts: Sequence[Prompt], samplings: Sequence[SamplingParams | None], options: Mapping[str, Any]
    ) -> list[str]:
        ids: list[str] = []
        try:
            for prompt, sampling in zip(prompts, samplings, strict=True):
                ids.append(self.engine.add_request(prompt, sampling, **options))  # undone below
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return ids

    def _step(self) -> list[RequestOutput]:
        # An interrupt in the middle of a step would leave scheduler and workers with different ideas of it.
        with deferred_interrupt():
            return self.engine.step()


def build_engine(plan: EnginePlan, factory: KVConnectorFactory) -> LLMEngine:
    """Load the model and put engine and connector together.

    Raises:
        CargoholdError: something does not fit; nothing is left running.
    """
    clock = time.monotonic
    environment = SchedulerEnvironment(
        plan.layout,
        clock,
        max_step_tokens=plan.scheduler.max_num_batched_tokens,
        prefix_caching=plan.scheduler.prefix_caching,
        applies_locks=True,
        emits_events=plan.scheduler.emit_events,
    )
    # The connector first: what it refuses is refused before the weights are loaded.
    connector = factory.make_scheduler_side(environment)
    scheduler = Scheduler(plan.scheduler, plan.layout, connector, clock)
    executor = _make_executor(plan, factory, connector.get_finished_count())
    limits = EngineLimits(
        max_model_len=plan.scheduler.max_model_len,
        vocab_size=plan.info.vocab_size,
        eos_token_ids=plan.info.eos_token_ids,
        hash_block_tokens=plan.layout.hash_block_tokens,
    )
    return LLMEngine(scheduler, executor, Tokenizer.load(plan.info), limits, clock=clock)


def _make_executor(plan: EnginePlan, factory: KVConnectorFactory, finished_count: int | None) -> Executor:
    from cargohold.engine.model.hf_runner import HFModelRunner  # noqa: PLC0415  # imports torch

    runner = HFModelRunner(plan.info, plan.layout, plan.config.device)
    worker_side = factory.make_worker_side(WorkerEnvironment(plan.layout, rank=0, clock=time.monotonic))
    return InlineExecutor(Worker(runner, worker_side), finished_count)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one prompt: text, or token ids
    return list(prompts)  # type: ignore[arg-type]  # several


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise RequestError(
            f"{len(sampling)} sampling parameters for {num_prompts} prompts: give one for all, or one each"
        )
    return sampling
