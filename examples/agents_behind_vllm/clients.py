"""Two agents with a tool, one of OpenAI's client and one of Anthropic's, as their documentation has them."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import anthropic
import openai
from scripted import ANSWER, QUESTION

MODEL = "the-model"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


class Turn(NamedTuple):
    """How a turn went: its prompt's tokens, those of them that were cached, and seconds to the first token."""

    prompt_tokens: int
    cached_tokens: int
    first_s: float


def openai_agent(url: str, system: str, tool: Callable[[], str], **extra: Any) -> list[Turn]:
    """Ask, call the tool, tell what it says, and so on until there is an answer. ``extra`` is what only pins need."""
    client = openai.OpenAI(base_url=url, api_key="none")
    tools: Any = [
        {"type": "function", "function": {"name": "tide", "description": "Tells the tide", "parameters": SCHEMA}}
    ]
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    turns = []
    while True:
        begun, first_s, content, calls, usage = time.perf_counter(), None, "", [], None
        stream = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in stream:
            usage = chunk.usage or usage
            delta = chunk.choices[0].delta if chunk.choices else None
            if delta is not None and (delta.content or delta.tool_calls):
                first_s = first_s or time.perf_counter() - begun
                content += delta.content or ""
                calls += [call.model_dump() for call in delta.tool_calls or () if call.id]
        assert usage is not None and usage.prompt_tokens_details is not None
        turns.append(Turn(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, first_s or 0.0))
        if not calls:
            assert content == ANSWER, content
            return turns
        called = [{**call, "function": {"name": "tide", "arguments": '{"at": "noon"}'}} for call in calls]
        messages.append({"role": "assistant", "content": content, "tool_calls": called})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": tool()} for call in calls]


def anthropic_agent(url: str, system: str, tool: Callable[[], str], **extra: Any) -> list[Turn]:
    """The same."""
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none")
    tools: Any = [{"name": "tide", "description": "Tells the tide", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    turns = []
    while True:
        begun, first_s = time.perf_counter(), None
        with client.messages.stream(
            model=MODEL, max_tokens=100, system=system, messages=messages, tools=tools, extra_body=extra
        ) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    first_s = first_s or time.perf_counter() - begun
            message: Any = stream.get_final_message()
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        prompt_tokens = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        turns.append(Turn(prompt_tokens, cached, first_s or 0.0))
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            assert message.content[0].text == ANSWER, message
            return turns
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": tool()} for call in calls]
        messages.append({"role": "user", "content": results})


def others(url: str, number: int, num_prompts: int, num_chars: int) -> None:
    """Prompts of other users, which fill the cache."""
    client = openai.OpenAI(base_url=url, api_key="none")
    for at in range(num_prompts):
        text = f"{number}.{at} {'Ships come and go. ' * num_chars}"[:num_chars]
        client.completions.create(model=MODEL, prompt=text, max_tokens=1)
