"""``cargohold demo`` on a tiny model: the real conversations, the real comparison."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, RequestOutput
from cargohold.cli import demo as demonstration
from cargohold.connector.offloading import OffloadingScheduler
from tests.command import Command, Result


def demo(cargohold: Command, chat_model: str, *options: str) -> Result:
    return cargohold("demo", "--model", chat_model, "--turns", "2", "--answer-tokens", "4", *options)


def test_it_shows_that_answers_are_the_same_and_come_sooner(
    cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, show_row, asked, order = LLM.chat, demonstration.show_row, list[tuple[int, str]](), list[str]()

    def answer(llm: LLM, messages: Any, *args: Any) -> RequestOutput:
        asked.append((id(llm), messages[-1]["content"]))
        order.append("answer")
        return chat(llm, messages, *args)

    def show(*args: Any) -> None:
        order.append("row")
        show_row(*args)

    monkeypatch.setattr(LLM, "chat", answer)
    monkeypatch.setattr(demonstration, "show_row", show)
    result = demo(cargohold, chat_model, "--num-device-blocks", "300")
    assert result.status == 0, result.err
    _assert_engines_take_turns(asked)
    assert order == ["answer", "answer", "row"] * 8, "each visit is shown as soon as both engines have answered"
    *_, sentence, _, last = result.out.splitlines()
    summary = json.loads(last)
    assert list(summary) == [
        "identical",
        "visits",
        "restored_tokens",
        "ttft_recompute_s",
        "ttft_restored_s",
        "speedup",
    ]
    assert summary["identical"] is True
    assert summary["visits"] == 8
    assert summary["restored_tokens"] > 4 * 2000, "nearly all of the four contexts that come back"
    assert summary["speedup"] == pytest.approx(summary["ttft_recompute_s"] / summary["ttft_restored_s"], rel=0.1)
    assert sentence.startswith("All answers are identical. Coming back to a long context")
    rows = [line.split() for line in result.out.splitlines() if line.startswith(("harbour", "bakery"))]
    assert [(row[1], row[-1]) for row in rows] == [("1", "yes"), ("1", "yes"), ("2", "yes"), ("2", "yes")]
    assert [row[3] == "0" for row in rows] == [True, True, False, False], "restored on the second visit only"


def _assert_engines_take_turns(asked: list[tuple[int, str]]) -> None:
    """Found by use: one after the other, a machine that was busy in between decided how many times sooner it was."""
    for (plain, question), (offloading, same) in zip(asked[::2], asked[1::2], strict=True):
        assert (plain, offloading, question) == (asked[0][0], asked[1][0], same)
    assert asked[0][0] != asked[1][0]


def test_the_second_run_finds_on_the_disk_what_the_first_has_left(
    cargohold: Command, chat_model: str, tmp_path: Path
) -> None:
    first, second = (
        demo(cargohold, chat_model, "--num-device-blocks", "300", "--disk-dir", str(tmp_path)) for _ in range(2)
    )
    for result in (first, second):
        assert result.status == 0, result.err
        assert json.loads(result.out.splitlines()[-1])["identical"] is True
    sources = [
        [line.split()[4] for line in result.out.splitlines() if line.startswith("harbour")]
        for result in (first, second)
    ]
    assert sources[0][0] != "disk" and sources[1][0] == "disk", "a first visit that is none"


def test_it_fails_if_an_answer_differs(cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = LLM.chat

    def chat_wrongly(llm: LLM, messages: Any, *args: Any) -> RequestOutput:
        output = chat(llm, messages, *args)
        is_restored = bool(output.metrics.restored_tokens) and "bakery" in messages[0]["content"].lower()
        return replace(output, token_ids=(*output.token_ids[:-1], 0)) if is_restored else output

    monkeypatch.setattr(LLM, "chat", chat_wrongly)
    result = demo(cargohold, chat_model, "--num-device-blocks", "300")
    assert result.status == 1
    assert "ANSWERS DIFFER" in result.out
    assert json.loads(result.out.splitlines()[-1])["identical"] is False
    assert [line.split()[-1] for line in result.out.splitlines() if line.startswith("bakery")] == ["yes", "NO"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--answer-tokens", "100000"), "--answer-tokens.*512;"),
        (("--turns", "9"), "--turns.*4;"),
        (
            ("--num-device-blocks", "300", "--host-bytes", "1KiB"),
            "--host-bytes='1KiB' .* that is smaller than any chunk of KV",
        ),
    ],
)
def test_what_cannot_work_is_told_before_the_first_visit(
    options: tuple[str, ...], expected: str, cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "chat", lambda *_: pytest.fail("a visit was made"))
    result = demo(cargohold, chat_model, *options)
    assert result.status == 2
    assert "{" not in result.out
    assert re.search(f"^cargohold.*{expected}", result.err.splitlines()[-1])


@pytest.mark.parametrize("size", ["5", "99"])
def test_a_model_is_not_split_where_its_heads_cannot_be(size: str, cargohold: Command, chat_model: str) -> None:
    result = demo(cargohold, chat_model, "--tensor-parallel-size", size)
    assert result.status == 2
    told = f"cargohold: --tensor-parallel-size={size} is not possible: "
    assert result.err.startswith(told) and "which can be split over 1 or 2" in result.err


def test_it_fails_at_once_if_offloading_was_turned_off(
    cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, asked = LLM.chat, list[str]()

    def counted(llm: LLM, messages: Any, *args: Any) -> RequestOutput:
        asked.append(messages[-1]["content"])
        return chat(llm, messages, *args)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LLM, "chat", counted)
    monkeypatch.setattr(OffloadingScheduler, "get_num_new_matched_tokens", fails)
    result = demo(cargohold, chat_model, "--num-device-blocks", "300")
    assert result.status == 1
    assert "cargohold: offloading was turned off, so there is nothing to show; connector offloading: " in result.err
    assert "ZeroDivisionError" in result.err
    assert len(asked) == 2, "one visit to either engine"
