"""What ``LLM`` and ``AsyncLLM`` share: a model, its engine and its connector, put together and run by the engine's thread."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict
from weakref import WeakSet, finalize

from cargohold.connector.config import LOAD_TIMEOUT
from cargohold.connector.factory import (
    Offload,
    check_chunks,
    check_memory,
    check_places,
    connector_factory,
    equal_parts,
    host_bytes_of,
    load_timeout_s,
    never_found,
    start_report,
)
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.recording import RecordingFactory
from cargohold.connector.tracing import TracingFactory
from cargohold.engine.config import EngineConfig, EnginePlan, plan_engine
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.core.scheduler import Scheduler
from cargohold.engine.engine_thread import Asked, EngineThread
from cargohold.engine.events import ZmqEventPublisher
from cargohold.engine.executor import RankPlace
from cargohold.engine.llm_engine import LLMEngine
from cargohold.engine.model.info import ModelInfo, describe_model
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.outputs import EngineStatus
from cargohold.engine.ranks.choice import ExecutorKind, make_executor
from cargohold.engine.ranks.rank import RankSpec
from cargohold.errors import ConfigError, RequestError
from cargohold.option_values import format_bytes, format_count
from cargohold.options import made, no_such_option
from cargohold.process import memory_limit_bytes
from cargohold.protocol import Hint, KVCacheLayout, KVConnectorFactory, SchedulerEnvironment, ToolTokens

if TYPE_CHECKING:
    from cargohold.engine.model.hf_runner import HFModelRunner

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Hints = Hint | Sequence[Hint] | Mapping[str, Any]
"""A hint, several, or an envelope as routers send it."""


class RequestOptions(TypedDict, total=False):
    """Options of a request other than its sampling parameters; see ``LLMEngine.add_request``."""

    request_id: str | None
    priority: int
    salt: str | None
    tenant: str | None
    kv_transfer_params: Mapping[str, Any] | None
    hints: Hints | None
    trace_headers: Mapping[str, str] | None


class BaseLLM:
    """A model that an engine serves in a thread of its own, and what can be asked of it without waiting.

    For the arguments and errors, see ``LLM``.

    Attributes:
        plan: the engine's options, and the sizes that follow from them for this model.
        offload: what was asked to be kept, as it was given.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        offload: Offload | Sequence[Offload] | None = None,
        record: str | os.PathLike[str] | None = None,
        traces: bool = False,
        **options: Any,
    ) -> None:
        config = _engine_config(model, options)
        _check_offload(offload)
        factory = connector_factory(offload)
        if record is not None:
            factory = RecordingFactory(factory, os.fspath(record))
        if traces:
            factory = TracingFactory(factory)
        self.plan = plan_engine(config, describe_model(config.model, config.dtype), load_timeout_s(offload))
        if (
            self.plan.executor.kind is not ExecutorKind.RAY
        ):  # Ray's workers may run on machines with other disks and memory
            check_memory(offload)
            _check_memory(self.plan, host_bytes_of(offload))
            check_places(offload, self.plan.layout)
        check_chunks(offload, self.plan.layout, self.plan.scheduler.max_model_len)
        for line in start_report(self.plan.layout, offload, equal_parts(self.plan.layout)):
            logger.info("%s", line)
        for line in never_found(offload, self.plan.layout, self.plan.scheduler.max_model_len):
            logger.warning("%s", line)
        self.offload = offload
        self._engine = EngineThread(
            partial(build_engine, self.plan, factory), shutdown_timeout_s=config.shutdown_timeout_s
        )
        # A model that is dropped without ``close`` is stopped in the background: its threads would keep the KV, host memory and
        # a disk's directory for as long as the process lives.
        finalize(self, self._engine.start_closing).atexit = False
        _close_at_exit(self._engine)

    def tokenize(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text, as ``generate`` makes them of a prompt. Any thread may do this; no step waits for it.

        Raises:
            RequestError: the model has no tokenizer, or the text is not valid Unicode.
            PromptTooLongError: it is so long that it has more than ``max_tokens``; it was not tokenized.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; give the prompt as token ids")
        return tokenizer.encode(text, max_tokens)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak.

        Args:
            messages: each with ``role`` and ``content``, and whatever else the model's chat template reads.
            tools: what the assistant may call, for the template.
            template_options: variables of the template, such as ``enable_thinking`` of Qwen 3.

        Raises:
            RequestError: the model has no chat template, or this does not fit it.
            PromptTooLongError: it is so long that it has more than ``max_tokens``; it was not tokenized.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer, so it has no chat template")
        return tokenizer.apply_chat_template(messages, tools, template_options, max_tokens)

    def abort(self, request_id: str) -> None:
        """End a request early, from any thread and without waiting; does nothing if no request of this id is being served.

        The call that waits for the request gets its last output, which has the ``finish_reason`` ``abort``. Each output says
        the id of its request; ``request_id`` chooses it.
        """
        if not isinstance(request_id, str):  # it would end the engine
            raise RequestError(f"request_id={request_id!r} is not possible: it must be text")
        self._engine.abort(request_id)

    @property
    def status(self) -> EngineStatus:
        """How busy the engine was after its last step: lengths of its queues, and blocks in use. Waits for nothing."""
        return self._engine.status

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an {type(self).__name__} cannot be pickled: it belongs to its process; make one in each process"
        )


_engines: Final[WeakSet[EngineThread]] = WeakSet()


def _close_at_exit(engine: EngineThread) -> None:
    """Close the engine when the program ends, if it still runs.

    Daemon threads end soon after, the engine's and those of transfers and tiers among them, in the middle of what they do.
    """
    _engines.add(engine)
    # What was registered last is called first: before what multiprocessing and Ray have registered, which ends the workers.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    with ExitStack() as stack:
        for engine in list(_engines):
            stack.callback(engine.close)


def build_engine(plan: EnginePlan, factory: KVConnectorFactory) -> LLMEngine:
    """Load the model and put engine and connector together.

    Raises:
        CargoholdError: the connector, the event publisher, the model or its workers cannot start; nothing is left running.
    """
    clock = time.monotonic
    environment = SchedulerEnvironment(
        plan.layout,
        clock,
        max_step_tokens=plan.scheduler.max_num_batched_tokens,
        max_num_seqs=plan.scheduler.max_num_seqs,
        prefix_caching=plan.scheduler.prefix_caching,
        applies_locks=True,
        emits_events=plan.scheduler.emit_events,
        emits_salted_events=plan.scheduler.emit_salted_events,
        give_up_loads_after_s=plan.scheduler.give_up_loads_after_s,
        loads_in_step=True,
    )
    with ExitStack() as on_failure:
        # The connector and the address for events come first, so that a bad option is refused before the weights are loaded.
        connector = factory.make_scheduler_side(environment)
        on_failure.callback(connector.shutdown)
        publisher = None
        if plan.config.kv_events_endpoint is not None:
            publisher = ZmqEventPublisher(
                plan.config.kv_events_endpoint,
                plan.layout.groups,
                topic=plan.config.kv_events_topic,
                wire=plan.config.kv_events_wire,
                replay_endpoint=plan.config.kv_events_replay_endpoint,
            )
            on_failure.callback(publisher.close)
        tokenizer = Tokenizer.load(plan.info)
        end_of_answer = ToolTokens({}).end_of if tokenizer is None else tokenizer.end_of_answer
        scheduler = Scheduler(plan.scheduler, plan.layout, connector, clock, end_of_answer=end_of_answer)
        runners = HFRunners(plan.info, plan.layout, plan.config.device)
        executor = make_executor(plan.executor, RankSpec(runners, factory, plan.layout), connector)
        on_failure.pop_all()
    return LLMEngine(scheduler, executor, tokenizer, plan.limits, clock=clock, publisher=publisher)


def _check_offload(offload: object) -> None:
    """Raise ``ConfigError`` unless a connector can be made of ``offload``."""
    if isinstance(offload, list | tuple):
        for child in offload:
            _check_offload(child)
        return
    is_factory = hasattr(offload, "make_scheduler_side") and not isinstance(offload, type)
    if offload is not None and not is_factory and not isinstance(offload, OffloadConfig):
        expected = "an OffloadConfig, the factory of a connector, or a list of these"
        raise ConfigError("offload", offload, f"it must be {expected}")


def _check_memory(plan: EnginePlan, host_bytes: int) -> None:
    """Raise ``ConfigError`` if device pool and host memory together are larger than this machine's memory."""
    layout, limit = plan.layout, memory_limit_bytes()
    pool_bytes = layout.num_blocks * layout.block_bytes * layout.world_size if plan.config.device == "cpu" else 0
    if host_bytes and pool_bytes + host_bytes > limit:
        # Memory is taken only when it is first written to, so nothing would fail before the machine is full.
        raise ConfigError(
            "host_bytes",
            format_bytes(host_bytes),
            f"with the device pool of {format_bytes(pool_bytes)} that is more than the {format_bytes(limit)} that this machine "
            "allows in all, and the model needs some of it, too",
        )


def _engine_config(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    if "load_timeout_s" in options:
        raise ConfigError("load_timeout_s", options["load_timeout_s"], f"here that is {LOAD_TIMEOUT}")
    given = {"model": os.fspath(model) if isinstance(model, os.PathLike) else model, **options}
    return made(EngineConfig, given, beside=["offload", "record"])


def check_names(method: str, own: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if ``options`` has one that the method has not: neither as its own nor for the request."""
    of_requests = RequestOptions.__annotations__
    of_sampling = {field.name for field in fields(SamplingParams)}
    for key, value in options.items():
        if key in of_sampling:
            expected = f"it is a field of SamplingParams; give sampling=SamplingParams({key}=...) to {method}"
            raise ConfigError(key, value, expected)
        if key not in of_requests:
            raise no_such_option(key, value, [*own, *of_requests], f" of {method}")


class HintOptions(TypedDict, total=False):
    """What hints are about; see ``LLMEngine.hint``."""

    prompt: Prompt | None
    request_id: str | None
    salt: str | None
    tenant: str | None


def _as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts, of one prompt or several. A value that is no prompt is kept as an item: the engine refuses it."""
    # A tokenizer of transformers returns a mapping; as an iterable, it would be taken for a list of its keys.
    is_no_list = isinstance(prompts, str | bytes | Mapping)
    try:
        iterator = iter([prompts] if is_no_list else prompts)
    except TypeError:  # also of an array or a tensor without dimensions, which has __iter__
        return [prompts]
    items = list(iterator)
    is_one = bool(items) and isinstance(items[0], Integral)
    return [items] if is_one else items


def all_asked(prompts: Any, sampling: Any, options: RequestOptions) -> list[Asked]:
    """The requests for one prompt or several.

    Raises:
        RequestError: ``sampling`` is neither for all of them nor one for each.
    """
    items = _as_list(prompts)
    if not isinstance(sampling, list | tuple):
        sampling = [sampling] * len(items)
    if len(sampling) != len(items):
        raise RequestError(
            f"SamplingParams are for {len(sampling)} of {format_count(len(items), 'prompt')}: give one for all, or one each"
        )
    return [Asked(prompt, one, options) for prompt, one in zip(items, sampling, strict=True)]


# --- the ranks' models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HFRunners:
    """Makes runners of Hugging Face models. Satisfies ``cargohold.engine.executor.RunnerFactory``.

    Attributes:
        info: the model.
        layout: the paged KV cache; it says over how many ranks the model is split.
        device: ``cpu`` or a CUDA device. Of several ranks each takes a CUDA device of its own.
    """

    info: ModelInfo
    layout: KVCacheLayout
    device: str

    def make_runner(self, place: RankPlace) -> HFModelRunner:
        """Load the rank's part of the model.

        Raises:
            ModelError: the weights cannot be read or split, or the model does something that paged attention does not do.
            ConfigError: there is no device for the rank.
        """
        from cargohold.engine.model.hf_runner import HFModelRunner  # noqa: PLC0415  # imports torch
        from cargohold.engine.model.weights import join_ranks  # noqa: PLC0415  # imports torch

        device = join_ranks(place, self.device)
        if place.world_size > 1 or sys.stderr is None or not sys.stderr.isatty():
            _quiet_transformers()  # the loading bars of several processes would write over each other, and fill a log
        return HFModelRunner(self.info, self.layout, device, place.rank)


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415  # slow to import

    transformers_logging.disable_progress_bar()
