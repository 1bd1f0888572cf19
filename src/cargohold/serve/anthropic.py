"""Anthropic's interface: messages, and how many tokens they have."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestOutput
from cargohold.llm import AsyncLLM
from cargohold.serve.admission import Job, Outputs, Prompts, client_of, context_of, size_of, trace_of
from cargohold.serve.errors import ApiError, anthropic_body, invalid, json_response
from cargohold.serve.interfaces import (
    Body,
    CachedBody,
    Items,
    StopStrings,
    begin,
    cached_tokens,
    checked,
    fitting,
    in_turn,
    streamed,
    text_of,
    whole,
    with_errors,
)
from cargohold.serve.tools import AnswerReader, Part, ToolCall

router = APIRouter()

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}
_NOTHING_SAID: Final = {"type": "text", "text": ""}


class AnthropicMessage(BaseModel):
    """One message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]

    def for_template(self, param: str) -> list[dict[str, Any]]:
        """The messages of a template that say the same: results of tools are messages of their own there."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        texts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for at, block in enumerate(self.content):
            match block.get("type"):
                case "tool_result":
                    results.append(_result(block, f"{param}.content[{at}]"))
                case "tool_use":
                    calls.append(_call(block, f"{param}.content[{at}]"))
                case "thinking" | "redacted_thinking":
                    continue  # of earlier answers, which no template wants back
                case _:
                    texts.append(block)
        own: dict[str, Any] = {"role": self.role, "content": text_of(texts, f"{param}.content")}
        if calls:
            own["tool_calls"] = calls
        return [*results, own] if texts or calls or not results else results


class AnthropicTool(BaseModel):
    """A tool of the client's. Fields that are not declared here ask for what no template can say."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    description: str = ""
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None

    def for_template(self, param: str) -> dict[str, Any]:
        """The tool as templates know it. Raises ``ApiError`` for what the engine does not do with tools."""
        for name, value in (self.model_extra or {}).items():
            if value:
                raise invalid(f"this engine does not support {name[:80]} in tools: remove it", f"{param}.{name[:80]}")
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class Prompt(Body):
    """What a conversation consists of."""

    messages: Annotated[Items[AnthropicMessage], Field(min_length=1)]
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def tokens(self, llm: AsyncLLM, most: int) -> list[int]:
        """The conversation as the model's template writes it. Raises ``PromptTooLongError``, see ``AsyncLLM.chat_prompt``."""
        choice = (self.tool_choice or {"type": "auto"}).get("type")
        if choice not in ("auto", "none"):
            raise invalid(
                "tool_choice: the model decides itself whether it calls a tool; use auto or none", "tool_choice"
            )
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            raise invalid("this engine does not support thinking: remove it", "thinking")
        system = text_of(self.system, "system")
        messages = [{"role": "system", "content": system}] if system else []
        for at, message in enumerate(self.messages):
            messages += message.for_template(f"messages[{at}]")
        tools = [tool.for_template(f"tools[{at}]") for at, tool in enumerate(self.offered())]
        return llm.chat_prompt(messages, tools=tools, max_tokens=most)

    def offered(self) -> list[AnthropicTool]:
        """The tools that the model may call."""
        return [] if self.tool_choice is not None and self.tool_choice.get("type") == "none" else self.tools or []

    def new_reader(self) -> AnswerReader:
        """What tells calls of these tools from text."""
        wants_one = self.tool_choice is not None and self.tool_choice.get("disable_parallel_tool_use") is True
        return AnswerReader([tool.name for tool in self.offered()], 1 if wants_one else None)


class MessagesBody(Prompt, CachedBody):
    """The body of a request for a message."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: StopStrings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=0)

    def sampling(self) -> SamplingParams:
        """Sampling parameters. Raises ``ConfigError`` for impossible values."""
        temperature = 1.0 if self.temperature is None else self.temperature
        is_greedy = temperature == 0
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            top_p=1.0 if self.top_p is None or is_greedy else self.top_p,
            top_k=0 if self.top_k is None or is_greedy else self.top_k,
            stop=self.stop_sequences or (),
        )


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: Prompt) -> Response:
    """How many tokens a conversation has."""
    llm = begin(request, body)
    tokens = await in_turn(request, lambda: fitting(llm, partial(body.tokens, llm)))
    return json_response({"input_tokens": len(tokens)})


@router.post("/v1/messages")
async def messages(request: Request, body: MessagesBody) -> Response:
    """The next message of a conversation."""
    llm = begin(request, body)
    if body.messages[-1].role == "assistant":
        raise invalid("the assistant's message cannot be continued here: the last one must be the user's", "messages")
    client, sampling = client_of(request), [body.sampling()]

    def make_prompts() -> Prompts:
        prompt = fitting(llm, partial(body.tokens, llm))
        options = body.options(client)
        options["trace_headers"] = trace_of(request)
        return Prompts([prompt], sampling, options)

    request_id = f"msg_{context_of(request).admission.records.new_id()}"
    job = Job(request_id, request.url.path, client, 1, make_prompts, size_of(request), body.stream)
    head = {"id": request_id, "type": "message", "role": "assistant", "model": body.model}
    reader = body.new_reader()
    if body.stream:
        return await streamed(
            request, job, lambda outputs: with_errors(_events(outputs, head, llm, reader, body), _error_event)
        )
    (output,) = await whole(request, job)
    content = _blocks(reader.read(output.text, finished=True))
    answer = {**head, "content": content, **_stop(output, reader), "usage": _usage(output, llm)}
    return json_response(answer | body.of_cache([output]))


def _blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The blocks of a message: text, and calls where they were made."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            blocks.append({**_use(part), "input": msgspec.Raw(part.arguments.encode())})
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += part
        else:
            blocks.append({"type": "text", "text": part})
    return blocks or [_NOTHING_SAID]


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}


class _BlockEvents:
    """Writes the blocks of a message piece by piece."""

    def __init__(self) -> None:
        self._number = -1
        self._is_in_text = False

    def write(self, parts: Sequence[Part]) -> bytes:
        return b"".join(event for part in parts for event in self._events(part))

    def end(self) -> bytes:
        """What ends the last block. A message that says nothing has an empty one."""
        return b"".join([] if self._number >= 0 else self._events("")) + self._close_text()

    def _events(self, part: Part) -> list[bytes]:
        if isinstance(part, str):
            begin = [] if self._is_in_text else [self._begin(_NOTHING_SAID)]
            self._is_in_text = True
            return [*begin, self._delta({"type": "text_delta", "text": part})]
        begin = [self._close_text(), self._begin(_use(part))]
        delta = self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        return [*begin, delta, _event("content_block_stop", index=self._number)]

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._number += 1
        return _event("content_block_start", index=self._number, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._number, delta=delta)

    def _close_text(self) -> bytes:
        was_in_text, self._is_in_text = self._is_in_text, False
        return _event("content_block_stop", index=self._number) if was_in_text else b""


async def _events(
    outputs: Outputs, head: dict[str, Any], llm: AsyncLLM, reader: AnswerReader, body: MessagesBody
) -> AsyncGenerator[bytes]:
    has_begun, blocks = False, _BlockEvents()
    async for _, output in outputs:
        if not has_begun:
            has_begun = True
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**head, **nothing, "usage": {**_usage(output, llm), "output_tokens": 0}}
            yield _event("message_start", message=message)
        if written := blocks.write(reader.read(output.new_text, finished=output.finished)):
            yield written
        if output.finished:
            delta = _stop(checked(output), reader) | body.of_cache([output])
            yield blocks.end()
            yield _event("message_delta", delta=delta, usage=_usage(output, llm)) + _event("message_stop")


def _event(kind: str, **facts: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **facts}) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return _event("error", error=anthropic_body(error)["error"])


def _stop(output: RequestOutput, reader: AnswerReader) -> dict[str, Any]:
    reason = "stop_sequence" if output.stop_string is not None else _STOP_REASONS.get(output.finish_reason or "")
    if reason == "end_turn" and reader.num_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": output.stop_string}


def _usage(output: RequestOutput, llm: AsyncLLM) -> dict[str, int]:
    """Tokens of the prompt: read from the cache, newly in it, and neither, which is less than a block at its end."""
    config, metrics = llm.plan.config, output.metrics
    read = cached_tokens(metrics)
    kept = metrics.prompt_tokens - metrics.prompt_tokens % config.block_tokens if config.prefix_caching else 0
    created = max(0, kept - read)
    return {
        "input_tokens": metrics.prompt_tokens - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "output_tokens": metrics.output_tokens,
    }


def _result(block: dict[str, Any], param: str) -> dict[str, Any]:
    content = block.get("content")
    if not isinstance(content, str | list | None):
        raise invalid(f"{param}.content must be text, or a list of blocks of text", param)
    return {"role": "tool", "content": text_of(content, f"{param}.content"), "tool_call_id": block.get("tool_use_id")}


def _call(block: dict[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise invalid(f"{param} needs a name and an input", param)
    function = {"name": block["name"], "arguments": block["input"]}
    return {"type": "function", "id": block.get("id"), "function": function}
