"""What all interfaces do with a request: wait for its first output, answer in one piece, or stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from http import HTTPStatus

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cargohold.async_llm import AsyncLLM
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.serve.desk import Job, Outputs, hall_of, unless_gone
from cargohold.serve.errors import ApiError, api_error, invalid

Events = Callable[[Outputs], AsyncGenerator[bytes]]


async def make_prompt(llm: AsyncLLM, make: Callable[[], list[int]]) -> list[int]:
    """Make the tokens of a prompt in a thread: a long one takes seconds.

    Raises:
        RequestError: it cannot be made.
        ApiError: it is longer than what the engine serves.
    """
    return check_length(llm, await asyncio.to_thread(make))


def check_length(llm: AsyncLLM, prompt: list[int]) -> list[int]:
    """Return the prompt. Raises ``ApiError`` if it is too long, in words that clients of OpenAI and Anthropic look for."""
    longest = llm.plan.scheduler.max_model_len - 1
    if len(prompt) > longest:
        message = (
            f"prompt is too long: {len(prompt)} tokens > {longest} maximum; this model's maximum context length is "
            f"{longest + 1} tokens, the answer included"
        )
        raise invalid(message, code="context_length_exceeded")
    return prompt


async def whole(request: Request, job: Job) -> list[RequestOutput]:
    """The last output of each answer. Ends the request when its client goes away."""
    return await unless_gone(request.receive, _last_outputs(hall_of(request).desk.outputs(job)))


async def _last_outputs(outputs: Outputs) -> list[RequestOutput]:
    done: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for at, output in outputs:
            if output.finished:
                done[at] = checked(output)
    return [done[at] for at in range(len(done))]


def checked(output: RequestOutput) -> RequestOutput:
    """The output. Raises ``ApiError`` if its request has failed."""
    if output.finish_reason == "error":
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, output.error or "the request has failed")
    if output.finish_reason == "abort":
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the request was ended by the server")
    return output


async def streamed(request: Request, job: Job, events: Events) -> Response:
    """A stream of events.

    It begins when there is a first output: a request that is refused gets a status that says so.
    """
    outputs = hall_of(request).desk.outputs(job)
    try:
        first = await unless_gone(request.receive, anext(outputs))
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(outputs, events(_with_first(first, outputs)))


async def _with_first(first: tuple[int, RequestOutput], outputs: Outputs) -> Outputs:
    yield first
    async for output in outputs:
        yield output


class EventStream(Response):
    """Server-sent events. However it ends, the request has ended then.

    Args:
        outputs: of the engine; they have begun.
        events: what is sent for them.
    """

    media_type = "text/event-stream"

    def __init__(self, outputs: Outputs, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._outputs = outputs
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        async with aclosing(self._outputs), aclosing(self._events):
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def cached_tokens(metrics: RequestMetrics) -> int:
    """Tokens of the prompt that were not computed for it, wherever they were found."""
    return min(metrics.prompt_tokens, metrics.device_tokens + sum(metrics.restored_tokens.values()))


async def with_errors(events: AsyncGenerator[bytes], describe: Callable[[ApiError], bytes]) -> AsyncGenerator[bytes]:
    """The events; an error, after which there are no more, is one of them: the status was sent long ago."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:  # noqa: BLE001  # the client is told
        yield describe(api_error(error))
