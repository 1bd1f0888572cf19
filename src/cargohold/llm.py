"""The front door: a model, its engine and its connector, put together."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral
from threading import get_ident
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypedDict, Unpack
from weakref import WeakSet

from cargohold.connector.factory import Offload, check_chunks, check_places, connector_factory, host_bytes_of
from cargohold.connector.lazy import LazyOffloadConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.recording import RecordingFactory
from cargohold.connector.start_report import equal_parts, start_report
from cargohold.engine.config import EngineConfig, EnginePlan, plan_engine
from cargohold.engine.core.scheduler import Scheduler
from cargohold.engine.event_publisher import ZmqEventPublisher
from cargohold.engine.executor.factory import ExecutorKind, make_executor
from cargohold.engine.executor.rank import RankSpec
from cargohold.engine.inbox import Inbox
from cargohold.engine.llm_engine import EngineLimits, LLMEngine
from cargohold.engine.model.info import describe_model
from cargohold.engine.model.runners import HFRunners
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.outputs import RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.engine.turns import Turns
from cargohold.errors import ConfigError, RequestError
from cargohold.interrupts import deferred_interrupt
from cargohold.machine import memory_limit_bytes
from cargohold.protocol import KVConnectorFactory, KVEvent, SchedulerEnvironment
from cargohold.units import format_bytes, format_count

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Progress = Callable[[int, int], None]


class RequestOptions(TypedDict, total=False):
    """Options of a request other than its sampling parameters; see ``LLMEngine.add_request``."""

    request_id: str | None
    priority: int
    salt: str | None
    kv_transfer_params: Mapping[str, Any] | None


class LLM:
    """A language model, served in this process.

    ::

        llm = LLM("smollm2", num_device_blocks=256, offload=OffloadConfig(host_bytes="2GiB"))
        for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(out.text, out.metrics)

    Use it as a context manager, or call ``close``, to stop its transfers and give its memory back; a model that is dropped
    without that is stopped in the background, and one that is there when the program ends is closed then. Several threads may
    use it: their requests are batched, and one thread at a time computes a step for all of them. Other processes cannot use it,
    not even those that are forked from this one.

    Ctrl-C ends a call cleanly: the call's requests are aborted once the step in progress is done, ``KeyboardInterrupt`` is
    raised, and the model can be used again. A second Ctrl-C does not wait for the step, and ends the engine.

    Args:
        model: a directory, a GGUF file, a Hugging Face hub id, or ``smollm2``.
        offload: keep KV that the device pool has no room for: an ``OffloadConfig``, a ``LazyOffloadConfig``, the factory of
            any connector of the contract, or a list of these, most preferred first. ``None`` keeps nothing.
        record: write the block trace of all requests to this new file, for ``cargohold replay``: hashes only.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError: an option is unknown or impossible.
        ModelError: the model is not there, or cannot be served.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        offload: Offload | Sequence[Offload] | None = None,
        record: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        config = _engine_config(model, options)
        _check_offload(offload)
        factory = connector_factory(offload)
        if record is not None:
            factory = RecordingFactory(factory, os.fspath(record))
        self.plan = plan_engine(config, describe_model(config.model, config.dtype))
        if (
            self.plan.executor.kind is not ExecutorKind.RAY
        ):  # Ray's workers may run on machines with other disks and memory
            _check_memory(self.plan, host_bytes_of(offload))
            check_places(offload, self.plan.layout)
        check_chunks(offload, self.plan.layout, self.plan.scheduler.max_model_len)
        for line in start_report(self.plan.layout, offload, equal_parts(self.plan.layout)):
            logger.info("%s", line)
        self._inboxes: dict[str, Inbox] = {}
        # An id is taken until its last output is read, or the end of one request would be the end of another.
        self.engine = build_engine(self.plan, factory, other_ids=self._inboxes)
        self._turns = Turns()
        # Requests to abort in the next turn, unless they have finished: those whose calls have ended, for instance. Of each the
        # id, and where its outputs go if that is known.
        self._aborted: deque[tuple[str, Inbox | None]] = deque()
        self._is_to_close = False
        _close_at_exit(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Complete prompts, batched as far as the pool allows; outputs in the order of the prompts.

        Args:
            prompts: one prompt or several; each text or token ids.
            sampling: for all prompts, or one per prompt.
            progress: called with the number of prompts done and the number of all, whenever it changes.
            options: for all prompts; see ``LLMEngine.add_request``. Several prompts cannot have one ``request_id``.

        Raises:
            ConfigError: there is no such option.
            RequestError: a prompt cannot be served; then none of the prompts is completed.
            EngineDeadError: the engine has stopped, or belongs to another process.
        """
        _check_names("generate", ("prompts", "sampling", "progress"), options)
        prompt_list = _as_list(prompts)
        asked = list(zip(prompt_list, _per_prompt(sampling, len(prompt_list)), strict=True))
        done: dict[int, RequestOutput] = {}
        with closing(self._serve(asked, options)) as outputs:
            for at, output in outputs:
                if output.finished:
                    done[at] = output
                    if progress is not None:
                        progress(len(done), len(asked))
        return [done[at] for at in range(len(asked))]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[RequestOutput]:
        """Complete one prompt, yielding an output per new piece; the last one is ``finished``.

        Nothing happens before the first output is asked for: then the request starts, or is refused. It is aborted when the
        iterator is closed early; if that is in another thread than the one that read it last, only in the next call. Several
        streams may be read in turn.

        Raises:
            ConfigError: there is no such option; raised at once.
            RequestError: the prompt cannot be served; raised in place of the first output.
            EngineDeadError: the engine has stopped, or belongs to another process; raised in place of an output.
        """
        _check_names("stream", ("prompt", "sampling"), options)
        return self._stream(prompt, sampling, options)

    def _stream(
        self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions
    ) -> Generator[RequestOutput]:
        with closing(self._serve([(prompt, sampling)], options)) as outputs:
            for _, output in outputs:
                yield output

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Answer a conversation: messages with ``role`` (system, user, assistant) and ``content``. Raises as ``generate``."""
        _check_names("chat", ("messages", "sampling"), options)
        return self.generate([self.chat_prompt(messages)], sampling, **options)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak."""
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it has no chat template")
        return self.engine.tokenizer.apply_chat_template(messages)

    def abort(self, request_id: str) -> None:
        """End a request early, from any thread and without waiting; does nothing if no request of this id is being served.

        The call that waits for the request gets its last output, which has the ``finish_reason`` ``abort``. Each output says
        the id of its request; ``request_id`` chooses it.
        """
        if not isinstance(request_id, str):  # another call would stumble over it
            raise RequestError(f"request_id={request_id!r} is not possible: it must be text")
        plain_id = str.__str__(request_id)  # as the request has it
        self._aborted.append((plain_id, self._inboxes.get(plain_id)))

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and below; waits until transfers have ended.

        Returns:
            ``False`` if requests are being served, or if transfers do not end within ``load_timeout_s``. Then part of it may be
            forgotten already.
        """
        if self._reset():
            return True
        self._settle(self._turns.take)
        return self._reset()

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call, if ``kv_events`` is on."""
        with self._turn():
            return self.engine.take_events()

    def stats(self) -> dict[str, float]:
        """Counters of the connector since the start: lookups, hits, blocks moved, failures; see ``docs/usage.md``."""
        with self._turn():
            return self.engine.stats()

    def close(self) -> None:
        """End everything and give the memory back. May be called twice. Does nothing in a process that was forked.

        In the middle of another call of the same thread, as in a signal handler, it returns at once: the model is closed when
        the step in progress is done, and the other call raises ``EngineDeadError``.
        """
        if self._turns.are_here:
            with self._turns.take() as is_whole:
                if is_whole:
                    self.engine.shutdown()
                else:
                    self._is_to_close = True

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled: it belongs to its process; make one in each process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(
        self, asked: Sequence[tuple[Prompt, SamplingParams | None]], options: RequestOptions
    ) -> Generator[tuple[int, RequestOutput]]:
        """Add requests, and yield their outputs as they come, each with the position of its request in ``asked``.

        However the generator ends, requests that have not finished are aborted, at the latest in the engine's next turn.
        """
        inbox = Inbox()
        positions: dict[str, int] = {}
        unfinished: set[str] = set()
        served_in = get_ident()
        try:
            for at, (prompt, sampling) in enumerate(asked):
                with self._whole_turn(), _numbered(at, len(asked)):
                    request_id = self.engine.add_request(prompt, sampling, **options)
                    positions[request_id] = at
                    unfinished.add(request_id)
                    self._inboxes[request_id] = inbox
            while unfinished:
                with self._whole_turn():
                    # Another thread's step may have brought something while this one waited for its turn.
                    if not inbox:
                        self._deliver(self.engine.step())
                while (output := inbox.take()) is not None:
                    if output.finished:
                        unfinished.remove(output.request_id)
                        self._inboxes.pop(output.request_id)  # nobody else can have the id before
                    yield positions[output.request_id], output
                    served_in = get_ident()
        finally:
            with deferred_interrupt():
                for request_id in positions:
                    if self._inboxes.get(request_id) is inbox:
                        del self._inboxes[request_id]
                # Before another thread comes to abort them, their ids may be those of other calls' requests.
                self._aborted.extend([(request_id, inbox) for request_id in unfinished])
            # The garbage collector closes a generator that was not read to its end in any thread and at any moment: in the
            # middle of a turn, or of something that a turn waits for. So another thread takes no turn here.
            if get_ident() == served_in:
                self._settle(self._turns.take_if_free)

    @contextmanager
    def _turn(self, take: Callable[[], AbstractContextManager[bool]] | None = None) -> Iterator[bool]:
        """Use the engine with no other thread in it, and with Ctrl-C held back.

        An interrupt in the middle of a step would leave scheduler and workers in different states. Yields ``False`` in the
        middle of a turn of this thread: the engine may be within a step then. With ``take_if_free`` for ``take``, it also
        yields ``False`` when the turn is not free.
        """
        is_whole = False
        try:
            with deferred_interrupt(), (take or self._turns.take)() as is_whole:
                if is_whole:
                    self._end_aborted()
                yield is_whole
        finally:
            # Looked at when the turn is over, for only from then on can a signal handler close the model itself.
            if is_whole and self._is_to_close:
                self.close()

    @contextmanager
    def _whole_turn(self) -> Iterator[None]:
        """A turn for adding requests and making steps. Raises ``RequestError`` in the middle of a turn of this thread."""
        with self._turn() as is_whole:
            if not is_whole:
                raise RequestError("the model is in the middle of another call of this thread; ask it after that")
            yield

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            # A step serves the requests of all streams and threads: another one may wait for this output.
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.put(output)

    def _end_aborted(self) -> None:
        while self._aborted:
            request_id, inbox = self._aborted.popleft()
            # By now this may be the id of another call's request, which nobody wants aborted.
            if inbox is None or self._inboxes.get(request_id, inbox) is inbox:
                self.engine.abort(request_id)
        # Not with the next step, for another request may have the id by then.
        self._deliver(self.engine.take_outputs())

    def _reset(self) -> bool:
        with self._turn() as is_whole:
            return is_whole and self.engine.reset_cache()

    def _settle(self, take: Callable[[], AbstractContextManager[bool]]) -> None:
        """Step until all transfers have ended. Return at once if requests are being served: then their steps do that.

        A connector may report pending work for ever. So this gives up after ``load_timeout_s``, or when ``take`` takes no turn;
        the steps of the next call go on.
        """
        patience_ends = time.monotonic() + self.plan.config.load_timeout_s
        is_busy = True
        while is_busy and time.monotonic() < patience_ends:
            with self._turn(take) as is_whole:
                is_busy = is_whole and not self.engine.num_unfinished and self.engine.has_work()
                if is_busy:
                    self._deliver(self.engine.step())


_open: Final[WeakSet[LLM]] = WeakSet()


def _close_at_exit(llm: LLM) -> None:
    """Close the model when the program ends, if it is still there and open.

    Daemon threads end soon after, those of tiers and transfers among them. Whoever would then wait for one of them, such as a
    stream that is closed when its module is taken apart, would wait for ever.
    """
    _open.add(llm)
    # What was registered last is called first: before what multiprocessing and Ray have registered, which ends the workers.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    with ExitStack() as stack:
        for llm in list(_open):
            stack.callback(llm.close)


def build_engine(plan: EnginePlan, factory: KVConnectorFactory, *, other_ids: Container[str] = ()) -> LLMEngine:
    """Load the model and put engine and connector together; for ``other_ids``, see ``LLMEngine``.

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
        give_up_loads_after_s=plan.scheduler.give_up_loads_after_s,
    )
    with ExitStack() as on_failure:
        # The connector and the address for events come first, so that a bad option is refused before the weights are loaded.
        connector = factory.make_scheduler_side(environment)
        on_failure.callback(connector.shutdown)
        publisher = None
        if plan.config.kv_events_endpoint is not None:
            publisher = ZmqEventPublisher(plan.config.kv_events_endpoint, plan.layout.groups)
            on_failure.callback(publisher.close)
        scheduler = Scheduler(plan.scheduler, plan.layout, connector, clock)
        limits = EngineLimits(
            max_model_len=plan.scheduler.max_model_len,
            vocab_size=plan.info.vocab_size,
            eos_token_ids=plan.info.eos_token_ids,
            hash_block_tokens=plan.layout.hash_block_tokens,
        )
        tokenizer = Tokenizer.load(plan.info)
        runners = HFRunners(plan.info, plan.layout, plan.config.device)
        executor = make_executor(plan.executor, RankSpec(runners, factory, plan.layout), connector)
        on_failure.pop_all()
    return LLMEngine(scheduler, executor, tokenizer, limits, clock=clock, publisher=publisher, other_ids=other_ids)


def _check_offload(offload: object) -> None:
    """Raise ``ConfigError`` unless a connector can be made of ``offload``."""
    if isinstance(offload, list | tuple):
        for child in offload:
            _check_offload(child)
        return
    is_factory = hasattr(offload, "make_scheduler_side") and not isinstance(offload, type)
    if offload is not None and not is_factory and not isinstance(offload, OffloadConfig | LazyOffloadConfig):
        expected = "an OffloadConfig, a LazyOffloadConfig, the factory of a connector, or a list of these"
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
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for key, value in options.items():
        if key not in known:
            raise _no_such_option(key, value, ["offload", "record", *known])
    return EngineConfig(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **options)


def _check_names(method: str, own: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if ``options`` has one that the method has not: neither as its own nor for the request."""
    of_requests = RequestOptions.__annotations__
    of_sampling = {field.name for field in fields(SamplingParams)}
    for key, value in options.items():
        if key in of_sampling:
            expected = f"it is a field of SamplingParams; give sampling=SamplingParams({key}=...) to {method}"
            raise ConfigError(key, value, expected)
        if key not in of_requests:
            raise _no_such_option(key, value, [*own, *of_requests], f" of {method}")


def _no_such_option(key: str, value: object, known: Sequence[str], of: str = "") -> ConfigError:
    close = get_close_matches(key, known, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    return ConfigError(key, value, f"there is no such option{of}; {hint}")


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


def _per_prompt(sampling: Any, num_prompts: int) -> list[SamplingParams | None]:
    if not isinstance(sampling, list | tuple):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise RequestError(
            f"SamplingParams are for {len(sampling)} of {format_count(num_prompts, 'prompt')}: give one for all, or one each"
        )
    return list(sampling)


@contextmanager
def _numbered(at: int, num_prompts: int) -> Iterator[None]:
    """Add to a ``RequestError`` which of several prompts it is about."""
    try:
        yield
    except RequestError as error:
        if num_prompts == 1:
            raise
        raise RequestError(f"prompt {at + 1} of {num_prompts}: {error.reason}", error.request_id) from error
