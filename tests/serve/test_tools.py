"""Calls of tools: found in what a model writes, told to clients of OpenAI and Anthropic, and their results to the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.serve.server import Server
from cargohold.serve.tools import AnswerReader, Part, ToolCall
from tests.serve import clients
from tests.serve.running import running
from tests.serve.scripted_model import save_scripted_model

SCRIPTS = {
    "tagged": [
        "Let me ",
        "look.\n\n",
        "<tool_",
        "call>",
        '\n{"name": "tide", ',
        '"arguments": {"at": ',
        '"noon"}}\n',
        "</tool_call>",
    ],
    "plain": ['{"name": ', '"tide", "parameters"', ': {"at": "dusk"}}'],
    "twice": ['[{"name": "tide", "arguments": {"at": 1}}', ', {"name": "tide", "arguments": {"at": 2}}]'],
    "unknown": ['{"name": "sink", ', '"arguments": {}}'],
    "told": ["High water", " is at noon."],
}
AT_NOON = '{"at": "noon"}'
# As kits for agents send them.
TOOLS: Any = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}, "strict": True}}]
TOOLS_OF_ANTHROPIC: Any = [{"name": "tide", "input_schema": {"type": "object"}}]


# --- the reader -------------------------------------------------------------------------------------------------------


def read(pieces: Sequence[str], max_calls: int | None = None) -> list[tuple[str, str] | str]:
    """What is found in an answer that comes in pieces: text, joined, and calls."""
    reader, parts = AnswerReader(["tide"], max_calls), list[Part]()
    for piece in pieces:
        parts += reader.read(piece, finished=False)
    parts += reader.read("", finished=True)
    found: list[tuple[str, str] | str] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append((part.name, part.arguments) if isinstance(part, ToolCall) else part)
    return found


def call(arguments: object, name: str = "tide", key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def tagged(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (tagged(f"\n{call({'at': 'noon'})}\n"), [("tide", AT_NOON)]),
        (f"Let me see.\n\n{tagged(call({}))}\n{tagged(call({}))}\n", ["Let me see.", ("tide", "{}"), ("tide", "{}")]),
        (f"<think>\n</think>\n{tagged(call({}))} Done.", ["<think>\n</think>", ("tide", "{}"), "Done."]),
        (tagged(f"[{call({})}, {call({})}]"), [("tide", "{}")] * 2),
        ("<tool_call>" + call({}), [("tide", "{}")]),  # it ended instead of closing the tag
        (tagged(call(AT_NOON)), [("tide", AT_NOON)]),  # arguments as JSON within JSON
        (tagged(call({"html": "a</tool_call>b"})), [("tide", '{"html": "a</tool_call>b"}')]),
        (call({"at": "noon"}, key="parameters"), [("tide", AT_NOON)]),
        (f"{call({})}; {call({})}", [("tide", "{}")] * 2),
        (f"[TOOL_CALLS] [{call({})}]", [("tide", "{}")]),
    ],
)
def test_calls_are_found_as_models_write_them(answer: str, found: list[Any]) -> None:
    assert read([answer]) == read(answer) == found


@pytest.mark.parametrize(
    "answer",
    [
        " The tide is high.\n",
        tagged(call({}, name="sink")),
        call({}, name="sink"),
        tagged("not JSON"),
        tagged(call([1])),
        tagged('{"name": "tide"}'),
        tagged('{"name": "tide", "arguments": {"at": NaN}}'),
        "<tool_call>" + call({})[:-1],
        '{"tide": 3}',
        "[1, 2]",
        "[" * 10_000,
        f"Write {call({})} to call it.",
        "<tool_call>" * 3,
    ],
    ids=lambda answer: repr(answer[:60]),
)
def test_what_is_no_call_of_an_offered_tool_stays_text(answer: str) -> None:
    assert read([answer]) == [answer]


ALPHABET = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        call({"at": "noon"}),
        call({"html": "</tool_call>"}),
        "{",
        "}",
        "[",
        '"',
        " ",
        "\n",
        "tide",
        "<tool",
        ";",
    ]
)


@given(st.lists(ALPHABET, max_size=12), st.data())
def test_it_does_not_matter_how_an_answer_is_cut(words: list[str], data: st.DataObject) -> None:
    answer = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    found = read([answer])
    assert read(pieces) == found
    if all(isinstance(part, str) for part in found):
        assert "".join(map(str, found)) == answer


def test_calls_beyond_those_that_are_wanted_are_dropped() -> None:
    assert read([f"One. {tagged(call({}))}{tagged(call({}))} Two."], max_calls=1) == ["One.", ("tide", "{}")]


def test_without_tools_nothing_is_held_back() -> None:
    assert AnswerReader().read(tagged(call({})), finished=False) == [tagged(call({}))]


# --- clients ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(save_scripted_model(tmp_path_factory.mktemp("models") / "scripted", SCRIPTS)) as server:
        yield server


@pytest.fixture(scope="module")
def of_openai(scripted: Server) -> Iterator[clients.openai.OpenAI]:
    with clients.openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def of_anthropic(scripted: Server) -> Iterator[clients.anthropic.Anthropic]:
    with clients.anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        yield client


def asked(script: str, **fields: Any) -> Any:
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": script}],
        "tools": TOOLS,
        "temperature": 0,
        **fields,
    }


def asked_anthropic(script: str, **fields: Any) -> Any:
    common = {"model": "scripted", "max_tokens": 50, "tools": TOOLS_OF_ANTHROPIC, "extra_body": {"temperature": 0}}
    return {**common, "messages": [{"role": "user", "content": script}], **fields}


@pytest.mark.parametrize(
    ("script", "text", "arguments"),
    [
        ("tagged", "Let me look.", [AT_NOON]),
        ("plain", None, ['{"at": "dusk"}']),
        ("twice", None, ['{"at": 1}', '{"at": 2}']),
    ],
)
def test_openais_client_gets_calls_whole_and_in_a_stream(
    of_openai: clients.openai.OpenAI, script: str, text: str | None, arguments: list[str]
) -> None:
    (choice,) = of_openai.chat.completions.create(**asked(script)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", text)
    calls: Any = choice.message.tool_calls
    assert [(one.type, one.function.name, one.function.arguments) for one in calls] == [
        ("function", "tide", one) for one in arguments
    ]
    with of_openai.chat.completions.stream(**asked(script)) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert (streamed.finish_reason, streamed.message.content or None) == ("tool_calls", text)
    again: Any = streamed.message.tool_calls
    assert [one.function.arguments for one in again] == arguments
    assert len({one.id for one in [*calls, *again]}) == 2 * len(arguments)


def test_openais_client_tells_the_model_what_came_of_a_call(of_openai: clients.openai.OpenAI) -> None:
    request = asked("tagged")
    (choice,) = of_openai.chat.completions.create(**request).choices
    (made,) = choice.message.tool_calls or []
    request["messages"] += [choice.message, {"role": "tool", "tool_call_id": made.id, "content": "noon"}]
    (last,) = of_openai.chat.completions.create(**request).choices
    assert (last.message.content, last.finish_reason) == ("High water is at noon.", "stop")


def test_openais_client_gets_text_where_nothing_is_called(of_openai: clients.openai.OpenAI) -> None:
    text = "".join(SCRIPTS["unknown"])
    (choice,) = of_openai.chat.completions.create(**asked("unknown")).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    (choice,) = of_openai.chat.completions.create(**asked("tagged", tool_choice="none")).choices
    assert (choice.message.content, choice.message.tool_calls) == ("".join(SCRIPTS["tagged"]), None)
    (choice,) = of_openai.chat.completions.create(**asked("twice", parallel_tool_calls=False)).choices
    assert len(choice.message.tool_calls or ()) == 1


def test_a_call_that_is_cut_off_is_text(of_openai: clients.openai.OpenAI) -> None:
    (choice,) = of_openai.chat.completions.create(**asked("tagged", max_tokens=6)).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == "".join(SCRIPTS["tagged"][:6])


@pytest.mark.parametrize(
    ("script", "kinds", "inputs"),
    [("tagged", ["text", "tool_use"], [{"at": "noon"}]), ("twice", ["tool_use", "tool_use"], [{"at": 1}, {"at": 2}])],
)
def test_anthropics_client_gets_calls_whole_and_in_a_stream(
    of_anthropic: clients.anthropic.Anthropic, script: str, kinds: list[str], inputs: list[Any]
) -> None:
    message: Any = of_anthropic.messages.create(**asked_anthropic(script))
    with of_anthropic.messages.stream(**asked_anthropic(script)) as stream:
        streamed: Any = stream.get_final_message()
    for one in (message, streamed):
        assert (one.stop_reason, [block.type for block in one.content]) == ("tool_use", kinds)
        assert [(block.name, block.input) for block in one.content if block.type == "tool_use"] == [
            ("tide", input_) for input_ in inputs
        ]
        assert [block.text for block in one.content if block.type == "text"] == ["Let me look."] * (
            len(kinds) - len(inputs)
        )


def test_anthropics_client_tells_the_model_what_came_of_a_call(of_anthropic: clients.anthropic.Anthropic) -> None:
    request = asked_anthropic("tagged")
    message: Any = of_anthropic.messages.create(**request)
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "noon"}
    request["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    last = of_anthropic.messages.create(**request)
    assert [block.to_dict() for block in last.content] == [{"type": "text", "text": "High water is at noon."}]
    assert last.stop_reason == "end_turn"


def test_anthropics_client_gets_at_most_one_call_if_it_says_so(of_anthropic: clients.anthropic.Anthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = of_anthropic.messages.create(**asked_anthropic("twice", tool_choice=choice))
    assert [block.type for block in message.content] == ["tool_use"]
    message = of_anthropic.messages.create(**asked_anthropic("twice", tool_choice={"type": "none"}))
    assert [block.type for block in message.content] == ["text"]
