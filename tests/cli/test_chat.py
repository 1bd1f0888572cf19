"""``cargohold chat``, with what the user types coming from a pipe."""

from __future__ import annotations

import io

import pytest

from cargohold import LLM, SamplingParams
from tests.command import Command

QUESTIONS = ("How many ships came in?", "And how many left?")


@pytest.fixture(scope="module")
def answers(chat_model: str) -> list[str]:
    messages: list[dict[str, str]] = []
    with LLM(chat_model) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            text = llm.chat(messages, SamplingParams(max_tokens=16)).text
            messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def talk(
    cargohold: Command, chat_model: str, *lines: str, options: tuple[str, ...] = (), status: int = 0
) -> tuple[list[str], list[str]]:
    result = cargohold("chat", chat_model, "--max-tokens", "16", *options, stdin="".join(f"{line}\n" for line in lines))
    assert result.status == status
    return result.out.splitlines(), result.err.splitlines()[1:]  # the first line says which commands there are


def test_answers_see_the_whole_conversation(cargohold: Command, chat_model: str, answers: list[str]) -> None:
    out, err = talk(cargohold, chat_model, *QUESTIONS)
    assert out == answers
    assert len(err) == len(answers) and all("prompt tokens: " in line for line in err)


def test_each_answer_tells_what_was_reused(cargohold: Command, chat_model: str) -> None:
    # The first question fills two blocks without its answer, which may be short.
    _, (first, second) = talk(cargohold, chat_model, QUESTIONS[0] * 5, QUESTIONS[1])
    assert ": 0 on the device" in first
    assert " on the device" in second and ": 0 on the device" not in second


def test_what_was_evicted_comes_back_from_the_host(cargohold: Command, chat_model: str) -> None:
    # The pool has room for 304 tokens: the second conversation pushes the first one out.
    first, second = "a" * 200, "b" * 200
    _, err = talk(cargohold, chat_model, first, "/new", second, "/new", first, options=("--num-device-blocks", "20"))
    first_time, again = err[0], err[-1]
    assert " from host" in again
    assert " from host" not in first_time


def test_a_new_conversation_forgets_the_old_one(cargohold: Command, chat_model: str, answers: list[str]) -> None:
    out, err = talk(cargohold, chat_model, QUESTIONS[0], "/new", QUESTIONS[0])
    assert out == [answers[0], answers[0]]
    assert err[1] == "a new conversation"


def test_a_pipe_whose_only_question_fails_ends_with_a_failure(
    cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8")
    monkeypatch.setattr(io, "StringIO", lambda _: piped)  # what ``cargohold`` pipes in
    out, err = talk(cargohold, chat_model, status=1)
    assert out == [] and len(err) == 1


def test_a_question_that_is_not_utf8_is_refused_and_the_conversation_goes_on(
    cargohold: Command, chat_model: str, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n" + QUESTIONS[0].encode()), encoding="utf-8")
    monkeypatch.setattr(io, "StringIO", lambda _: piped)  # what ``cargohold`` pipes in
    out, err = talk(cargohold, chat_model, status=1)
    assert out == answers[:1]
    assert "is no valid Unicode" in err[0] and len(err) == 2


def test_why_explains_the_last_answer(cargohold: Command, chat_model: str) -> None:
    _, err = talk(cargohold, chat_model, "/why", QUESTIONS[0], "/why")
    assert err[0].startswith("nothing to explain yet")
    assert "had to be computed" in err[2]


def test_empty_lines_are_ignored_and_unknown_commands_are_told(cargohold: Command, chat_model: str) -> None:
    out, err = talk(cargohold, chat_model, "", "  ", "/nonsense", "/quit", "never asked")
    assert out == []
    assert len(err) == 1 and err[0].startswith("there is no /nonsense; ")


def test_a_conversation_too_long_can_go_on_anew(cargohold: Command, chat_model: str, answers: list[str]) -> None:
    lines = (QUESTIONS[0], "x" * 300, QUESTIONS[1])
    out, err = talk(cargohold, chat_model, *lines, options=("--num-device-blocks", "16"), status=1)
    assert out == answers, "the question that was refused is no part of the conversation"
    assert "tokens; with one token to generate, at most" in err[1] and "/new starts over" in err[1]


def test_standard_input_that_was_closed_asks_nothing(
    cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "StringIO", lambda _: None)  # what ``cargohold`` pipes in
    result = cargohold("chat", chat_model)
    assert (result.status, result.out) == (0, "")


def test_a_model_without_a_chat_template_says_so_before_the_first_question(
    cargohold: Command, tiny_model: object
) -> None:
    assert callable(tiny_model)
    result = cargohold("chat", tiny_model("llama"), stdin="Hello\n")
    assert result.status == 2
    assert result.out == ""
    assert "this model has no tokenizer, so it has no chat template" in result.err
