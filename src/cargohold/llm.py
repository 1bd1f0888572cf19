"""The front door: a model that is asked from ordinary code, in any thread (``LLM``), or from an event loop (``AsyncLLM``)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar, Unpack
from weakref import WeakKeyDictionary

from cargohold.base_llm import BaseLLM, HintOptions, Hints, Prompt, RequestOptions, all_asked, check_names
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.engine_thread import Asked, Mailbox
from cargohold.engine.llm_engine import LLMEngine
from cargohold.engine.outputs import RequestOutput
from cargohold.protocol import HintEvent, HintOutcome, KVEvent, Tally, TierContents

T = TypeVar("T")

Progress = Callable[[int, int], None]


class LLM(BaseLLM):
    """A language model, served in this process.

    ::

        llm = LLM("smollm2", num_device_blocks=256, offload=OffloadConfig(host_bytes="2GiB"))
        for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(out.text, out.metrics)

    The engine has a thread of its own, which computes steps while there is work: the requests of all callers are batched. Any
    number of threads, and signal handlers, may use the model. ``AsyncLLM`` has the same methods as coroutines. Other processes
    cannot use it, not even those that are forked from this one.

    Use it as a context manager, or call ``close``, to stop its transfers and give its memory back; a model that is dropped
    without that is stopped in the background, and one that is there when the program ends is closed then. Ctrl-C ends a call
    and aborts its requests; the model can be used again.

    Args:
        model: a directory, a GGUF file, a Hugging Face hub id, or ``smollm2``.
        offload: keep KV that the device pool has no room for: an ``OffloadConfig``, the factory of any connector of
            the contract, or a list of these, most preferred first. ``None`` keeps nothing.
        record: write the block trace of all requests to this new file, for ``cargohold replay``: hashes only.
        traces: make OpenTelemetry spans of what the connector does for each request; needs the extra ``otel``.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError: an option is unknown or impossible.
        ModelError: the model is not there, or cannot be served.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Complete prompts, batched as far as the pool allows; outputs in the order of the prompts.

        Returns when the requests have ended: copies of their KV to host memory and lower tiers may go on.

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
        check_names("generate", ("prompts", "sampling", "progress"), options)
        asked = all_asked(prompts, sampling, options)
        done: dict[int, RequestOutput] = {}
        with closing(self._serve(asked, wants_pieces=False)) as outputs:
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
        iterator is closed early, or is dropped. It does not wait for its reader: a slow reader gets several pieces at once.

        Raises:
            ConfigError: there is no such option; raised at once.
            RequestError: the prompt cannot be served; raised in place of the first output.
            EngineDeadError: the engine has stopped, or belongs to another process; raised in place of an output.
        """
        check_names("stream", ("prompt", "sampling"), options)
        return self._stream(Asked(prompt, sampling, options))

    def _stream(self, asked: Asked) -> Generator[RequestOutput]:
        with closing(self._serve([asked])) as outputs:
            for _, output in outputs:
                yield output

    def stream_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[tuple[int, RequestOutput]]:
        """Complete prompts, yielding an output per new piece of any of them, with the position of its prompt.

        Otherwise as ``stream``: all prompts are served or none is, and closing the iterator aborts what has not ended.
        """
        check_names("stream_each", ("prompts", "sampling"), options)
        return self._serve(all_asked(prompts, sampling, options))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Answer a conversation: messages with ``role`` (system, user, assistant) and ``content``. Raises as ``generate``."""
        check_names("chat", ("messages", "sampling"), options)
        return self.generate([self.chat_prompt(messages)], sampling, **options)[0]

    def hint(self, hints: Hints, **about: Unpack[HintOptions]) -> list[HintOutcome]:
        """Tell the cache what is known of the future of a prompt, without a request.

        ::

            llm.hint(Hint.prefetch(), prompt=next_prompt)       # it comes soon
            llm.hint(Hint.release("my agent"))                  # that lease is not needed any more

        Args:
            hints: a ``Hint``, several, or an envelope as routers send it.
            about: what they are about: ``prompt`` or ``request_id``, and ``salt`` and ``tenant``; see ``LLMEngine.hint``.

        Returns:
            One outcome per hint.

        Raises:
            RequestError: the prompt is not possible.
            EngineDeadError: the engine has stopped, or belongs to another process.
        """
        return self._ask(lambda engine: engine.hint(hints, **about))

    def take_hint_events(self) -> list[HintEvent]:
        """How hints have ended since the last call: the oldest are forgotten if no one takes them."""
        return self._ask(LLMEngine.take_hint_events)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until no copy and no write to a lower tier is in flight, ``timeout_s`` at most, or as long as a load may take.

        Returns:
            Whether that is so; ``False`` at once if requests are being served.
        """
        timeout_s = self.plan.scheduler.load_timeout_s if timeout_s is None else timeout_s
        return self._ask(lambda engine: not engine.has_work(), timeout_s)

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and below; waits until transfers have ended.

        Returns:
            ``False`` if requests are being served, or if transfers do not end in time. Then part of it may be
            forgotten already.
        """
        return self._ask(LLMEngine.reset_cache) or self._ask(LLMEngine.reset_cache, self.plan.scheduler.load_timeout_s)

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call, if ``kv_events`` is on."""
        return self._ask(LLMEngine.take_events)

    def stats(self) -> Tally:
        """What the connector has counted since the start, and what there is now; see ``docs/usage.md``."""
        return self._ask(LLMEngine.stats)

    def contents(self) -> Sequence[TierContents]:
        """What is kept below the device, tier by tier: pins in force, what tenants have, and prefixes of the last requests."""
        return self._ask(LLMEngine.contents)

    def close(self) -> None:
        """End everything and give the memory back. May be called twice. Does nothing in a process that was forked.

        Calls that wait for the model raise ``EngineDeadError``. Copies and writes in flight get ``shutdown_timeout_s`` to end.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, asked: Sequence[Asked], *, wants_pieces: bool = True) -> Generator[tuple[int, RequestOutput]]:
        """Have requests served, and yield their outputs as they come, each with the position of its request in ``asked``.

        Of each, the first and the last are enough unless it ``wants_pieces``. However the generator ends, requests that have
        not finished are aborted.
        """
        arrived = SimpleQueue[None]()
        mailbox = Mailbox(len(asked), lambda: arrived.put(None), wants_pieces=wants_pieces)
        try:
            if asked:
                self._engine.submit(asked, mailbox)
            while not mailbox.is_done:
                self._engine.check_process()
                arrived.get()
                yield from mailbox.take()
        finally:
            if not mailbox.is_done:
                self._engine.abandon(mailbox)

    def _ask(self, question: Callable[[LLMEngine], T], settled_within_s: float | None = None) -> T:
        """See ``EngineThread.ask``."""
        return self._engine.ask(question, settled_within_s).result()


class AsyncLLM(BaseLLM):
    """A language model whose methods are coroutines: those of ``LLM``, with the same arguments, results and errors.

    ::

        async with AsyncLLM("smollm2", offload=OffloadConfig(host_bytes="2GiB")) as llm:
            async for out in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
                print(out.new_text, end="")

    The engine runs in a thread of its own, so the event loop never waits for a step. A task that is cancelled aborts its
    requests. Several event loops may use one model. Making it loads the model, which takes seconds: make it before the event
    loop has other things to do.
    """

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Complete prompts; see ``LLM.generate``."""
        check_names("generate", ("prompts", "sampling", "progress"), options)
        asked = all_asked(prompts, sampling, options)
        done: dict[int, RequestOutput] = {}
        async with aclosing(self._serve(asked, wants_pieces=False)) as outputs:
            async for at, output in outputs:
                if output.finished:
                    done[at] = output
                    if progress is not None:
                        progress(len(done), len(asked))
        return [done[at] for at in range(len(asked))]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt, yielding an output per new piece; see ``LLM.stream``.

        Use ``contextlib.aclosing`` where you may leave the loop before its end: otherwise the request goes on until Python
        finalizes the generator.
        """
        check_names("stream", ("prompt", "sampling"), options)
        return self._stream(Asked(prompt, sampling, options))

    async def _stream(self, asked: Asked) -> AsyncGenerator[RequestOutput]:
        async with aclosing(self._serve([asked])) as outputs:
            async for _, output in outputs:
                yield output

    def stream_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        wants_pieces: bool = True,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Complete prompts, yielding outputs of all of them as they come; see ``LLM.stream_each``. Close it as ``stream``.

        Unless it ``wants_pieces``, the reader wakes up for the first and the last output of each only.
        """
        check_names("stream_each", ("prompts", "sampling", "wants_pieces"), options)
        return self._serve(all_asked(prompts, sampling, options), wants_pieces=wants_pieces)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Answer a conversation; see ``LLM.chat``."""
        check_names("chat", ("messages", "sampling"), options)
        return (await self.generate([self.chat_prompt(messages)], sampling, **options))[0]

    async def hint(self, hints: Hints, **about: Unpack[HintOptions]) -> list[HintOutcome]:
        """Tell the cache what is known of the future of a prompt; see ``LLM.hint``."""
        return await self._ask(lambda engine: engine.hint(hints, **about))

    async def take_hint_events(self) -> list[HintEvent]:
        """How hints have ended since the last call; see ``LLM.take_hint_events``."""
        return await self._ask(LLMEngine.take_hint_events)

    async def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until no copy and no write to a lower tier is in flight; see ``LLM.settle``."""
        timeout_s = self.plan.scheduler.load_timeout_s if timeout_s is None else timeout_s
        return await self._ask(lambda engine: not engine.has_work(), timeout_s)

    async def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and below; see ``LLM.reset_cache``."""
        return await self._ask(LLMEngine.reset_cache) or await self._ask(
            LLMEngine.reset_cache, self.plan.scheduler.load_timeout_s
        )

    async def take_events(self) -> list[KVEvent]:
        """KV events since the last call, if ``kv_events`` is on."""
        return await self._ask(LLMEngine.take_events)

    async def stats(self) -> Tally:
        """Counters of the connector since the start; see ``LLM.stats``. Answered between two steps."""
        return await self._ask(LLMEngine.stats)

    async def contents(self) -> Sequence[TierContents]:
        """What is kept below the device, tier by tier; see ``LLM.contents``. Answered between two steps."""
        return await self._ask(LLMEngine.contents)

    async def close(self) -> None:
        """End everything and give the memory back; see ``LLM.close``."""
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _serve(
        self, asked: Sequence[Asked], *, wants_pieces: bool = True
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Have requests served, and yield their outputs as they come, each with the position of its request in ``asked``.

        Of each, the first and the last are enough unless it ``wants_pieces``. However the generator ends, requests that have
        not finished are aborted.
        """
        arrived = asyncio.Event()
        mailbox = Mailbox(len(asked), _waking(arrived), wants_pieces=wants_pieces)
        try:
            if asked:
                self._engine.submit(asked, mailbox)
            while not mailbox.is_done:
                await arrived.wait()
                arrived.clear()
                for output in mailbox.take():
                    yield output
        finally:
            if not mailbox.is_done:
                self._engine.abandon(mailbox)

    async def _ask(self, question: Callable[[LLMEngine], T], settled_within_s: float | None = None) -> T:
        """See ``EngineThread.ask``."""
        return await asyncio.wrap_future(self._engine.ask(question, settled_within_s))


class _Bell:
    """Wakes the callers that wait in one event loop. However many a step wakes, the loop is interrupted once."""

    def __init__(self) -> None:
        self._due: deque[asyncio.Event] = deque()
        self._is_rung = False

    def ring(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set an event of that loop soon. For other threads."""
        self._due.append(event)
        if not self._is_rung:  # otherwise the loop has not looked at what is due: it looks after it has said so
            self._is_rung = True
            with suppress(RuntimeError):  # the loop is closed: no caller waits for this any longer
                loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._is_rung = False
        while self._due:
            self._due.popleft().set()


_bells: WeakKeyDictionary[asyncio.AbstractEventLoop, _Bell] = WeakKeyDictionary()


def _waking(event: asyncio.Event) -> Callable[[], None]:
    """A function for other threads, which sets an event of the running event loop."""
    loop = asyncio.get_running_loop()
    bell = _bells.setdefault(loop, _Bell())
    return lambda: bell.ring(loop, event)
