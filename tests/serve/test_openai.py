"""OpenAI's interface, asked by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cargohold import LLM, SamplingParams
from cargohold.serve.server import Server
from tests.serve import clients
from tests.serve.running import call

HELLO: Any = [{"role": "user", "content": "Tell me about the harbour."}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[clients.openai.OpenAI]:
    with clients.openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def long_prompt(start: str) -> str:
    return f"{start} {'The ship sails on. ' * 40}"


def test_the_model_is_listed_under_its_name(client: clients.openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "chat"
    assert client.models.retrieve("chat").id == "chat"
    with pytest.raises(clients.openai.NotFoundError, match="there is no model 'gpt-4' here, but 'chat'"):
        client.models.retrieve("gpt-4")


def test_answers_are_those_of_the_library(client: clients.openai.OpenAI, chat_model: str) -> None:
    with LLM(chat_model, num_device_blocks=600) as llm:
        expected = llm.chat(HELLO, SamplingParams(max_tokens=12)).text
        completed = llm.generate("Once upon a time", SamplingParams(max_tokens=12))[0].text
    answer = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    text = client.completions.create(model="chat", prompt="Once upon a time", max_tokens=12, temperature=0)
    assert text.choices[0].text == completed


def test_a_stream_has_the_same_text_piece_by_piece_and_its_usage(client: clients.openai.OpenAI) -> None:
    # As many tokens as some of untrained weights need to come by themselves: halves of characters wait.
    whole = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=40, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="chat",
            messages=HELLO,
            max_completion_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert len(pieces) > 1 and "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 40)


def test_completions_of_several_prompts_keep_their_order(client: clients.openai.OpenAI) -> None:
    prompts = ["Once upon a time", "In the harbour"]
    alone = [client.completions.create(model="chat", prompt=prompt, temperature=0) for prompt in prompts]
    together = client.completions.create(model="chat", prompt=prompts, temperature=0)
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    streamed = ["", ""]
    for chunk in client.completions.create(model="chat", prompt=prompts, temperature=0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [one.choices[0].text for one in alone]


def test_usage_of_several_prompts_is_the_same_in_a_stream(client: clients.openai.OpenAI) -> None:
    prompts = [f"usage {'The ship sails on. ' * times}" for times in (30, 1)]
    usages = []
    for prompt in prompts:  # so that all of it is cached from now on
        client.completions.create(model="chat", prompt=prompt, max_tokens=1)
    for stream in (False, True):
        asked: Any = {"model": "chat", "prompt": prompts, "n": 2, "max_tokens": 3, "seed": 1}
        if stream:
            *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            usages.append(last.usage)
        else:
            usages.append(client.completions.create(**asked).usage)
    assert usages[0] == usages[1] and usages[0].prompt_tokens_details.cached_tokens > 100


def test_a_prompt_may_be_token_ids(client: clients.openai.OpenAI, server: Server) -> None:
    token_ids = server.admission.llm.tokenize("Once upon a time")
    text = client.completions.create(model="chat", prompt="Once upon a time", temperature=0).choices[0].text
    for prompt in (token_ids, [token_ids]):
        assert client.completions.create(model="chat", prompt=prompt, temperature=0).choices[0].text == text


def test_several_answers_differ_and_repeat_with_their_seed(client: clients.openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=8, n=3, seed=7)
        assert answer.usage is not None and answer.usage.completion_tokens == 24
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_stop_string_ends_the_answer_before_it(client: clients.openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=30, temperature=0)
    text = whole.choices[0].message.content
    assert text is not None
    stop = text[len(text) // 2 :][:4]
    cut = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=30, temperature=0, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_what_came_from_the_cache_is_in_the_usage(client: clients.openai.OpenAI) -> None:
    def cached(prompt: str, **extra: Any) -> int:
        answer = client.completions.create(model="chat", prompt=prompt, max_tokens=1, extra_body=extra)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    prompt = long_prompt("cached")
    assert cached(prompt) == 0
    assert cached(prompt) >= 100
    assert cached(prompt, cache_salt="mine") == 0
    assert cached(prompt, cache_salt="mine") >= 100


def test_parts_of_text_and_the_role_of_developers_are_understood(client: clients.openai.OpenAI) -> None:
    plain: Any = [{"role": "system", "content": "Be brief."}, *HELLO]
    parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *HELLO,
    ]
    texts = {
        client.chat.completions.create(model="chat", messages=messages, max_tokens=6, temperature=0)
        .choices[0]
        .message.content
        for messages in (plain, parts)
    }
    assert len(texts) == 1


def test_a_template_without_tools_refuses_them_unless_they_may_not_be_used(client: clients.openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
    with pytest.raises(clients.openai.BadRequestError, match="the chat template of this model does not support tools"):
        client.chat.completions.create(model="chat", messages=HELLO, tools=tools)
    answer = client.chat.completions.create(model="chat", messages=HELLO, tools=tools, tool_choice="none", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"


SAID: dict[str, Any] = {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"logprobs": True}, "logprobs", "this engine does not support logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "this engine does not support frequency_penalty"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "this engine does not support response_format",
        ),
        ({"logit_bias": {"3": 1}}, "logit_bias", "this engine does not support logit_bias"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"temperature": -1}, "temperature", "a number from 0"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 2}, "top_p", "at most 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1024}, "n", "more than the 320 that this server takes"),
        ({"seed": -1}, "seed", "an integer from 0"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": [3]}, "stop[0]", "valid string"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({"stop": "x" * 257}, "stop", "at most 256 characters"),
        ({"tool_choice": "required"}, "tool_choice", "use auto or none"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role", "'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "reads text only",
        ),
        ({"messages": "Hello"}, "messages", "valid list"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"chat_template_kwargs": {"tokenize": True}}, None, "not a variable of chat templates"),
        ({"tools": [{"type": "custom", "custom": {"name": "tide"}}]}, "tools[0]", "type function"),
        ({"tools": [{"type": "function", "function": {"strict": True}}]}, "tools[0]", "has a name"),
        ({"messages": [{**SAID, "function_call": {"name": "tide"}}, *HELLO]}, "messages[0].function_call", "be None"),
        ({"messages": [{**SAID, "audio": {"id": "a"}}, *HELLO]}, "messages[0].audio", "be None"),
        ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous", "not permitted"),
    ],
    ids=str,
)
def test_what_the_engine_has_not_is_refused_by_name(
    server: Server, body: dict[str, Any], param: str | None, message: str
) -> None:
    reply = call(server, "/v1/chat/completions", {"model": "chat", "messages": HELLO, **body})
    error = reply.json["error"]
    assert reply.status == 400 and error["type"] == "invalid_request_error"
    assert (error["param"], message in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": False, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": None},
        {"user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "key", "service_tier": "auto", "store": False},
        {"temperature": 0, "top_p": 0.5, "top_k": 3},
        {"response_format": {"type": "text"}, "top_k": -1, "parallel_tool_calls": True},
        {"messages": [{**SAID, "function_call": None, "audio": None, "refusal": None, "annotations": []}, *HELLO]},
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": True}},
    ],
    ids=str,
)
def test_values_that_ask_for_nothing_are_taken(server: Server, body: dict[str, Any]) -> None:
    reply = call(server, "/v1/chat/completions", {"model": "chat", "messages": HELLO, "max_tokens": 1, **body})
    assert reply.status == 200, reply.json


def test_scores_are_refused_also_where_a_number_asks_for_them(server: Server) -> None:
    reply = call(server, "/v1/completions", {"model": "chat", "prompt": "Hello", "logprobs": 0})
    assert (reply.status, reply.json["error"]["param"]) == (400, "logprobs")


def test_a_prompt_that_is_too_long_is_told_by_its_code(client: clients.openai.OpenAI) -> None:
    with pytest.raises(clients.openai.BadRequestError, match="maximum context length is 8192 tokens") as caught:
        client.completions.create(model="chat", prompt="The ship sails on. " * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(client: clients.openai.OpenAI) -> None:
    with pytest.raises(clients.openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert caught.value.code == "model_not_found"
