"""``AsyncLLM``: the same answers as ``LLM``, as coroutines that never keep the event loop waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from cargohold import LLM, AsyncLLM, ConfigError, EngineDeadError, OffloadConfig, RequestError, SamplingParams
from cargohold.engine.llm_engine import LLMEngine
from cargohold.protocol import metrics
from tests.llms import scheduler_of, thread_of

T = TypeVar("T")

PROMPT = list(range(5, 25))
SHORT, LONG = SamplingParams(max_tokens=6), SamplingParams(max_tokens=150)


@pytest.fixture
def serve(tiny_model: Callable[[str], str]) -> Callable[[Callable[[AsyncLLM], Coroutine[Any, Any, T]]], T]:
    """Runs a coroutine function with a model, and asserts that nothing is left behind."""

    def run(use: Callable[[AsyncLLM], Coroutine[Any, Any, T]]) -> T:
        async def with_model() -> T:
            async with AsyncLLM(tiny_model("llama"), offload=OffloadConfig(host_bytes="1MiB")) as llm:
                result = await use(llm)
            scheduler_of(llm).check_settled()
            return result

        return asyncio.run(with_model())

    return run


Serve = Callable[[Callable[[AsyncLLM], Coroutine[Any, Any, Any]]], Any]


def test_answers_are_those_of_the_other_door(
    serve: Serve, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    prompts = [[number, *PROMPT] for number in range(3)]
    expected = [output.token_ids for output in make_llm(tiny_model("llama")).generate(prompts, SHORT)]

    async def use(llm: AsyncLLM) -> None:
        progress: list[tuple[int, int]] = []

        async def stream() -> tuple[int, ...]:
            outputs = [output async for output in llm.stream(prompts[0], SHORT)]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            return outputs[-1].token_ids

        generated, streamed = await asyncio.gather(
            llm.generate(prompts, SHORT, progress=lambda *done: progress.append(done)), stream()
        )
        assert [output.token_ids for output in generated] == expected
        assert streamed == expected[0]
        assert progress == [(1, 3), (2, 3), (3, 3)]
        assert await llm.settle()
        assert (await llm.stats())[metrics.STORED.of("host")] > 0
        assert await llm.take_events() == []
        assert await llm.reset_cache()
        (again,) = await llm.generate(prompts[0], SHORT)
        assert again.metrics.device_tokens == 0

    serve(use)


def test_who_wants_no_pieces_hears_of_the_beginning_and_of_the_end(serve: Serve) -> None:
    async def use(llm: AsyncLLM) -> None:
        prompts = [PROMPT, PROMPT[1:]]
        heard = [out async for out in llm.stream_each(prompts, LONG, wants_pieces=False)]
        for at, expected in enumerate(await llm.generate(prompts, LONG)):
            first, *others = [out for where, out in heard if where == at]
            assert not first.finished and [out.finished for out in others][-1]
            # Whoever wakes up for one request also hears of the other.
            assert len(others) <= 3
            assert others[-1].token_ids == expected.token_ids

    serve(use)


def test_a_conversation_is_answered(chat_model: str) -> None:
    async def use() -> str:
        async with AsyncLLM(chat_model) as llm:
            return (await llm.chat([{"role": "user", "content": "Hello"}], SHORT)).text

    with LLM(chat_model) as llm:
        assert asyncio.run(use()) == llm.chat([{"role": "user", "content": "Hello"}], SHORT).text


def test_what_cannot_be_served_is_refused(serve: Serve) -> None:
    async def use(llm: AsyncLLM) -> None:
        assert await llm.generate([]) == []
        with pytest.raises(RequestError, match="prompt 2 of 2: the prompt is empty"):
            await llm.generate([PROMPT, []])
        with pytest.raises(RequestError, match="the prompt is empty"):
            await anext(llm.stream([]))
        with pytest.raises(ConfigError, match="there is no such option of stream"):
            llm.stream(PROMPT, colour="red")  # type: ignore[call-arg]  # that is what is tested

    serve(use)


def test_a_task_that_is_cancelled_aborts_its_request(serve: Serve) -> None:
    async def use(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async with aclosing(llm.stream(PROMPT, LONG)) as outputs:
                async for _ in outputs:
                    started.set()

        tasks = [asyncio.create_task(read()), asyncio.create_task(llm.generate(PROMPT, LONG))]
        await started.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        assert await llm.settle()
        assert llm.status.num_free_blocks == llm.status.num_blocks

    serve(use)


def test_a_request_is_aborted_by_its_id(serve: Serve) -> None:
    async def use(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.stream(PROMPT, LONG, request_id="mine"):
            outputs.append(output)
            llm.abort("mine")
        assert outputs[-1].finish_reason == "abort"

    serve(use)


def test_the_event_loop_goes_on_while_the_engine_computes(serve: Serve) -> None:
    async def use(llm: AsyncLLM) -> None:
        gate = threading.Event()

        def compute(_: LLMEngine) -> bool:
            return gate.wait(60)

        computed = thread_of(llm).ask(compute)
        answer = asyncio.create_task(llm.generate(PROMPT, SHORT))
        for _ in range(5):
            await asyncio.sleep(0)  # would not return if a task waited for the engine's thread
        assert not answer.done()
        gate.set()
        assert (await answer)[0].finished
        assert computed.result()

    serve(use)


def test_everybody_who_waits_hears_of_the_engines_end(serve: Serve) -> None:
    async def use(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(llm.generate(PROMPT, LONG)) for _ in range(3)]
        stream = llm.stream(PROMPT, LONG)
        await anext(stream)
        await llm.close()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="it was shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await llm.stats()

    serve(use)


def test_an_event_loop_that_ends_early_harms_no_other(tiny_model: Callable[[str], str]) -> None:
    llm = AsyncLLM(tiny_model("llama"))

    async def begin() -> None:
        await anext(llm.stream(PROMPT, LONG))

    async def use() -> None:
        (output,) = await llm.generate(PROMPT, SHORT)
        assert output.finish_reason == "length"
        assert await llm.settle()
        await llm.close()

    asyncio.run(begin())
    asyncio.run(use())
    scheduler_of(llm).check_settled()
