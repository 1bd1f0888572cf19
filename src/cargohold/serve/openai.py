"""OpenAI's interface: models, completions of text, and of conversations."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cargohold.base_llm import RequestOptions
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.llm import AsyncLLM
from cargohold.serve.admission import Job, Outputs, Prompts, ServerContext, client_of, context_of, size_of, trace_of
from cargohold.serve.errors import ApiError, json_response, openai_body
from cargohold.serve.interfaces import (
    Items,
    Message,
    OpenAIBody,
    ToolChoice,
    begin,
    cached_tokens,
    checked,
    fitting,
    offered_tools,
    streamed,
    tool_names,
    whole,
    with_errors,
)
from cargohold.serve.tools import AnswerReader, Part, ToolCall, calls_in, text_in

router = APIRouter()

Choice = Callable[[int, Sequence[Part], str | None], dict[str, Any]]
TokenIds = Annotated[Items[int], Field(min_length=1)]

_DEFAULT_COMPLETION_TOKENS = 16
_DONE = b"data: [DONE]\n\n"


class CompletionBody(OpenAIBody):
    """The body of a request to complete text."""

    prompt: str | TokenIds | Annotated[Items[str] | Items[TokenIds], Field(min_length=1, max_length=1024)]

    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # token ids, as the first is one
        return list(self.prompt)


class ChatBody(OpenAIBody):
    """The body of a request to go on with a conversation."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served, under each of its names."""
    context = context_of(request)
    return json_response({"object": "list", "data": [_model(context, name) for name in context.names()]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The model, if it is served under this name."""
    context = context_of(request)
    return json_response(_model(context, context.check_model(name)))


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Complete text."""
    llm = begin(request, body)
    sampling = body.sampling(body.max_tokens or _DEFAULT_COMPLETION_TOKENS)
    prompts = body.prompts()
    form = Form("cmpl", "text_completion", "text_completion", _text_choice, _text_choice)
    makers = [partial(_tokens, llm, prompt) for prompt in prompts]
    return await _answer(request, body, form, makers, sampling)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Go on with a conversation."""
    llm = begin(request, body)
    messages = [message.for_template(f"messages[{at}]") for at, message in enumerate(body.messages)]
    tools = offered_tools(body.tools, body.tool_choice)

    def make(most: int) -> list[int]:
        return llm.chat_prompt(messages, tools=tools, template_options=body.chat_template_kwargs, max_tokens=most)

    sampling = body.sampling(body.max_completion_tokens or body.max_tokens or llm.plan.scheduler.max_model_len)
    new_reader = partial(AnswerReader, tool_names(tools), 1 if body.parallel_tool_calls is False else None)
    form = Form("chatcmpl", "chat.completion", "chat.completion.chunk", _message_choice, _delta_choice, new_reader)
    return await _answer(request, body, form, [make], sampling)


@dataclass(frozen=True, slots=True)
class Form:
    """How the answers of one endpoint are written.

    Attributes:
        prefix: of ids.
        kind, chunk_kind: what an answer says that it is, whole and in parts.
        choice, part: one answer, whole and in parts, of its number, what it says, and its finish reason.
        new_reader: makes what reads an answer.
    """

    prefix: str
    kind: str
    chunk_kind: str
    choice: Choice
    part: Choice
    new_reader: Callable[[], AnswerReader] = AnswerReader


def _text_choice(at: int, parts: Sequence[Part], reason: str | None) -> dict[str, Any]:
    return {"index": at, "text": text_in(parts), "logprobs": None, "finish_reason": reason}


def _message_choice(at: int, parts: Sequence[Part], reason: str | None) -> dict[str, Any]:
    text, calls = text_in(parts), [_call(call) for call in calls_in(parts)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {"index": at, "message": message, "logprobs": None, "finish_reason": reason}


def _delta_choice(at: int, parts: Sequence[Part], reason: str | None) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if text := text_in(parts):
        delta["content"] = text
    if calls := calls_in(parts):
        delta["tool_calls"] = [{"index": call.number, **_call(call)} for call in calls]
    return {"index": at, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tokens(llm: AsyncLLM, prompt: str | list[int], most: int) -> list[int]:
    return llm.tokenize(prompt, max_tokens=most) if isinstance(prompt, str) else prompt


async def _answer(
    request: Request,
    body: OpenAIBody,
    form: Form,
    makers: Sequence[Callable[[int], list[int]]],
    sampling: list[SamplingParams],
) -> Response:
    """Answer each prompt as often as there is sampling."""
    client, admission = client_of(request), context_of(request).admission
    llm = admission.llm
    options: RequestOptions = {
        **body.options(client),
        "priority": body.priority,
        "trace_headers": trace_of(request),
    }

    def make_prompts() -> Prompts:
        each = [fitting(llm, make) for make in makers]
        return Prompts([prompt for prompt in each for _ in sampling], sampling * len(each), options)

    request_id = f"{form.prefix}-{admission.records.new_id()}"
    num_answers = len(makers) * len(sampling)
    job = Job(request_id, request.url.path, client, num_answers, make_prompts, size_of(request), body.stream)
    head = {"id": request_id, "created": int(time.time()), "model": body.model}
    if body.stream:
        return await streamed(request, job, lambda outputs: _with_end(_events(outputs, form, head, num_answers, body)))
    outputs = await whole(request, job)
    choices = []
    for at, output in enumerate(outputs):
        reader = form.new_reader()
        choices.append(form.choice(at, reader.read(output.text, finished=True), _finish_reason(output, reader)))
    usage = _usage([output.metrics for output in outputs], body.n or 1)
    answer = {**head, "object": form.kind, "choices": choices, "usage": usage}
    return json_response(answer | body.of_cache(outputs))


async def _events(
    outputs: Outputs, form: Form, head: dict[str, Any], num_answers: int, body: OpenAIBody
) -> AsyncGenerator[bytes]:
    head = {**head, "object": form.chunk_kind}
    last: dict[int, RequestOutput] = {}
    readers = [form.new_reader() for _ in range(num_answers)]
    if form.part is _delta_choice:  # who is to speak, before anything is said
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        for at in range(num_answers):
            yield _event({**head, "choices": [{"index": at, **role}]})
    async for at, output in outputs:
        parts = readers[at].read(output.new_text, finished=output.finished)
        if parts or output.finished:
            yield _event({**head, "choices": [form.part(at, parts, _finish_reason(checked(output), readers[at]))]})
        if output.finished:
            last[at] = output
    in_order = [last[at] for at in sorted(last)]
    if said := body.of_cache(in_order):
        yield _event({**head, "choices": [], **said})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage([output.metrics for output in in_order], body.n or 1)})


def _finish_reason(output: RequestOutput, reader: AnswerReader) -> str | None:
    return "tool_calls" if reader.num_calls and output.finish_reason == "stop" else output.finish_reason


async def _with_end(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The events, and after them what tells clients that no more will come, also after an error."""
    async with aclosing(with_errors(events, _error_event)) as all_events:
        async for event in all_events:
            yield event
    yield _DONE


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return _event(openai_body(error))


def _usage(metrics: Sequence[RequestMetrics], answers_each: int) -> dict[str, Any]:
    """Tokens of a request. Several answers to one prompt share it: it is counted once, as OpenAI does."""
    prompts = metrics[::answers_each]
    prompt_tokens = sum(one.prompt_tokens for one in prompts)
    output_tokens = sum(one.output_tokens for one in metrics)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(map(cached_tokens, prompts))},
    }


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    llm = context.admission.llm
    return {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "cargohold",
        "max_model_len": llm.plan.scheduler.max_model_len,
    }
