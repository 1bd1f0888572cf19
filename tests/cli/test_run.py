"""``cargohold run``."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cargohold import LLM, SamplingParams
from cargohold.cli.app import describe_reuse
from cargohold.engine.outputs import RequestMetrics
from tests.command import Command

PROMPT = "The harbour master wrote down every ship that"


@pytest.fixture(scope="module")
def completion(chat_model: str) -> str:
    with LLM(chat_model) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=12))[0].text


def test_the_completion_alone_is_on_standard_output(cargohold: Command, chat_model: str, completion: str) -> None:
    result = cargohold("run", chat_model, "--prompt", PROMPT, "--max-tokens", "12")
    assert result.status == 0
    assert result.out == f"{completion}\n"
    assert "0 on the device" in result.err and "computed; first token after" in result.err


def test_a_prompt_may_be_piped_in(cargohold: Command, chat_model: str, completion: str) -> None:
    assert cargohold("run", chat_model, "--max-tokens", "12", stdin=f"{PROMPT}\n").out == f"{completion}\n"


def test_standard_input_that_was_closed_has_no_prompt(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "StringIO", lambda _: None)  # what ``cargohold`` pipes in
    result = cargohold("run", "smollm2")
    assert (result.status, result.out) == (2, "")
    assert (
        "there is no prompt; give it with --prompt or pipe one in" in result.err and len(result.err.splitlines()) == 1
    )


@pytest.mark.parametrize("is_piped", [False, True])
def test_a_prompt_that_is_not_utf8_is_refused_in_a_line(
    is_piped: bool, cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_piped:
        piped = io.TextIOWrapper(io.BytesIO(b"Un caf\xe9 noir\n"), encoding="utf-8")
        monkeypatch.setattr(io, "StringIO", lambda _: piped)  # what ``cargohold`` pipes in
    result = cargohold("run", chat_model, *(() if is_piped else ("--prompt", "Un caf\udce9 noir")))
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("cargohold: character 7 of the text, '\\udce9', is no valid Unicode")
    assert "convert the text to UTF-8" in result.err and len(result.err.splitlines()) == 1


def test_several_prompts_are_answered_in_order_each_with_where_its_kv_came_from(
    cargohold: Command, chat_model: str, completion: str
) -> None:
    result = cargohold(
        "run", chat_model, "-p", PROMPT, "-p", "Bread [bold]is[/bold]", "-p", PROMPT, "--max-tokens", "12"
    )
    lines = result.out.splitlines()
    assert (lines[0], lines[2]) == (completion, completion)
    assert [line for line in result.err.splitlines() if line.startswith("> ")] == [
        f"> {PROMPT}",
        "> Bread [bold]is[/bold]",
        f"> {PROMPT}",
    ]
    assert result.err.count("prompt tokens: ") == 3


def test_json_has_one_object_per_prompt(cargohold: Command, chat_model: str, completion: str) -> None:
    result = cargohold(
        "run", chat_model, "-p", PROMPT, "-p", "x", "--max-tokens", "12", "--json", "--host-bytes", "8MiB"
    )
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert first["text"] == completion
    assert first["prompt"] == PROMPT
    assert first["finish_reason"] == "length"
    assert len(first["token_ids"]) == first["metrics"]["output_tokens"] == 12
    assert second["metrics"]["prompt_tokens"] == 1
    assert first["cache_notes"], "the connector explains itself"


def test_sampling_with_a_seed_is_repeatable_and_depends_on_it(cargohold: Command, chat_model: str) -> None:
    sample = ("run", chat_model, "-p", PROMPT, "--temperature", "1.5", "--top-p", "0.9", "--max-tokens", "12", "--seed")
    texts = [cargohold(*sample, seed).out for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_too_long_is_told_in_one_line_that_says_which(cargohold: Command, chat_model: str) -> None:
    short = ("--num-device-blocks", "5", "--max-tokens", "2")
    alone = cargohold("run", chat_model, "-p", "x" * 500, *short)
    assert alone.status == 2
    assert alone.err.count("\n") == 1 and "at most 63 fit" in alone.err
    assert "prompt 2 of 2: the prompt has" in cargohold("run", chat_model, "-p", "x", "-p", "x" * 500, *short).err


@pytest.mark.parametrize("options", [["-p", PROMPT], ["-p", PROMPT, "-p", "Hello"], ["-p", PROMPT, "--json"]])
def test_a_prompt_that_fails_is_a_failure_of_the_command_and_says_why(
    options: list[str], cargohold: Command, chat_model: str, tmp_path: Path
) -> None:
    model = shutil.copytree(chat_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    spoiled = {name: weight.fill_(math.inf) if "k_proj" in name else weight for name, weight in weights.items()}
    save_file(spoiled, model / "model.safetensors", {"format": "pt"})
    result = cargohold("run", str(model), *options)
    assert result.status == 1
    assert "the model computed non-finite numbers" in (result.out if "--json" in options else result.err)


def test_verbose_logs_what_follows_from_the_options(cargohold: Command, chat_model: str) -> None:
    args = ("run", chat_model, "-p", "x", "--num-device-blocks", "5", "--max-tokens", "1")
    assert "sequences are limited to the 64 tokens" in cargohold("--verbose", *args).err
    assert "sequences are limited" not in cargohold(*args).err


def test_a_pool_that_holds_hardly_any_prompt_is_warned_of(cargohold: Command, chat_model: str) -> None:
    args = ("run", chat_model, "-p", "x", "--num-device-blocks", "3", "--max-tokens", "1")
    assert "sequences are limited to the 32 tokens that 3 device blocks can hold" in cargohold(*args).err


def test_a_prompt_is_not_said_to_be_made_of_more_than_it_is() -> None:
    """What is restored after a preemption may be of the answer, and the same tokens as before."""
    came_back = RequestMetrics(100, 60, device_tokens=32, restored_tokens={"host": 64}, ttft_s=0.5)
    parts = "100 prompt tokens: 32 on the device, 64 from host"
    assert describe_reuse(came_back) == f"{parts}, 4 computed; first token after 0.50 s"
    assert describe_reuse(replace(came_back, preemptions=1)) == f"{parts} in 2 goes; first token after 0.50 s"
    assert describe_reuse(RequestMetrics(1, 1)) == "1 prompt token: 0 on the device, 1 computed"
