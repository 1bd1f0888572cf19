"""Anthropic's interface, asked by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cargohold.serve.server import Server
from tests.serve import clients
from tests.serve.running import call

HELLO: Any = [{"role": "user", "content": "Tell me about the harbour."}]
ASKED: Any = {"model": "chat", "max_tokens": 8, "temperature": 0}
# The client's newest versions have no argument for the temperature.
OF_OURS: Any = {"model": "chat", "max_tokens": 8, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[clients.anthropic.Anthropic]:
    with clients.anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message: clients.anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_a_message_is_what_the_other_interface_answers(client: clients.anthropic.Anthropic, server: Server) -> None:
    message = client.messages.create(**OF_OURS, messages=HELLO, system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    answer = call(server, "/v1/chat/completions", {**ASKED, "messages": [system, *HELLO]}).json
    assert text_of(message) == answer["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.role, message.model) == ("max_tokens", "assistant", "chat")


def test_a_stream_adds_up_to_the_message(client: clients.anthropic.Anthropic) -> None:
    # Untrained weights say other words on every kind of processor, often with halves of characters, which wait for
    # the other half: of many tokens some come by themselves.
    long: Any = {**OF_OURS, "max_tokens": 40}
    whole = client.messages.create(**long, messages=HELLO)
    with client.messages.stream(**long, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == text_of(message) == text_of(whole)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 40)


def test_blocks_and_marks_for_caching_are_read(client: clients.anthropic.Anthropic) -> None:
    mark = {"type": "ephemeral"}
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": mark}]
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"], "cache_control": mark}]}]
    plain = client.messages.create(**OF_OURS, messages=HELLO, system="Be brief.")
    assert text_of(client.messages.create(**OF_OURS, messages=blocks, system=system)) == text_of(plain)


def test_a_stop_sequence_is_named(client: clients.anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(**OF_OURS, messages=HELLO))
    stop = text[len(text) // 2 :][:3]
    message = client.messages.create(**OF_OURS, messages=HELLO, stop_sequences=["never seen", stop])
    assert text_of(message) == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_all_tokens_of_the_prompt_are_counted_once(client: clients.anthropic.Anthropic) -> None:
    conversation: Any = [{"role": "user", "content": f"counted {'The ship sails on. ' * 40}"}]
    (total,) = {client.messages.count_tokens(model="chat", messages=conversation).input_tokens}
    for round_ in range(2):
        usage = client.messages.create(**OF_OURS, messages=conversation).usage
        read, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert usage.input_tokens + read + created == total
        assert (read > 100, created > 100) == ((False, True) if round_ == 0 else (True, False))
        assert usage.input_tokens <= 16


TIDE: dict[str, Any] = {"name": "tide", "input_schema": {}}
MARK = {"type": "ephemeral"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "this engine does not support thinking"),
        ({"tool_choice": {"type": "any"}}, "use auto or none"),
        ({"tools": [TIDE]}, "not support tools"),
        ({"tools": [{"name": "search", "type": "web_search_20250305"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": "The ship sails on. " * 3000}]}, "prompt is too long"),
        ({"tempratur": 1}, "did you mean temperature?"),
        ({"tools": [{**TIDE, "strict": True}]}, "not support strict in tools"),
        ({"tools": [{**TIDE, "input_examples": [{}]}]}, "not support input_examples in tools"),
        ({"tools": [{**TIDE, "defer_loading": False, "cache_control": MARK}]}, "not support tools"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Once upon"}]}, "cannot be continued"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals_have_the_form_of_anthropic(server: Server, body: dict[str, Any], message: str) -> None:
    reply = call(server, "/v1/messages", {**ASKED, "messages": HELLO, **body})
    assert reply.status == 400
    assert (reply.json["type"], reply.json["error"]["type"]) == ("error", "invalid_request_error")
    assert message in reply.json["error"]["message"]


def test_errors_are_those_that_the_client_expects(client: clients.anthropic.Anthropic) -> None:
    with pytest.raises(clients.anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**{**OF_OURS, "model": "claude"}, messages=HELLO)


def test_results_of_tools_become_messages_of_their_own(server: Server) -> None:
    conversation = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "tide", "input": {"at": "noon"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "It is high."}]},
    ]
    reply = call(server, "/v1/messages/count_tokens", {"model": "chat", "messages": conversation})
    written = "<|user|>Tell me about the harbour.<|end|><|assistant|><|end|><|tool|>It is high.<|end|><|assistant|>"
    assert reply.json["input_tokens"] == len(server.admission.llm.tokenize(written))


def test_a_conversation_that_ends_with_the_assistant_can_be_counted(server: Server) -> None:
    """What cannot be continued is history all the same."""
    conversation = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    reply = call(server, "/v1/messages/count_tokens", {"model": "chat", "messages": conversation})
    assert reply.status == 200 and reply.json["input_tokens"] > 0
