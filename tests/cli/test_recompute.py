"""``cargohold cache verify --recompute``: what a directory keeps is computed again, and a lie with good checksums is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cargohold import LLM, DiskTierConfig, OffloadConfig, SamplingParams
from cargohold.cli import cache
from cargohold.cli.app import app
from cargohold.tiers.disk.files import DirectoryLock
from tests.cli.test_cache import damage
from tests.connector.test_tiers_with_models import prompts
from tests.liars import Attack, exchange, flip, lie_on_disk

assert cache.cache is not None  # it has added itself to the app


def fill(directory: Path, model: str, make_llm: Callable[..., LLM], **options: Any) -> list[list[int]]:
    """Let an engine keep what it computes there; returns its prompts with what it has answered."""
    disk = DiskTierConfig(directory=str(directory), max_bytes="16MiB", reserve_bytes=0)
    llm = make_llm(model, offload=OffloadConfig(host_bytes="8MiB", tiers=[disk]), num_device_blocks=60, **options)
    outputs = llm.generate(prompts(2, 70), SamplingParams(max_tokens=30))
    llm.close()
    return [[*tokens, *output.token_ids] for tokens, output in zip(prompts(2, 70), outputs, strict=True)]


def verify(*words: object, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["cache", "verify", "--json", *map(str, words)])
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    (found["recomputed"],) = found["recomputed"].values()
    return found


def counts(found: dict[str, Any]) -> tuple[int, int, int]:
    of = found["recomputed"]
    return of["equal"] + of["close"], of["different"], of["unknown"]


@pytest.mark.parametrize("attack", [flip, exchange])
def test_what_lies_with_good_checksums_is_found(
    attack: Attack, tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    model = tiny_model("llama")
    fill(tmp_path, model, make_llm, kv_events=True)
    command = ("--recompute", "--model", model, tmp_path)
    assert counts(verify(*command)) == (12, 0, 0)
    assert lie_on_disk(tmp_path, attack) == 12
    num_lies = 1 if attack is flip else 2
    found = verify(*command, status=1)
    assert (found["good"], *counts(found)) == (12, 12 - num_lies, num_lies, 0)


def test_prompts_may_be_given_where_no_tokens_are_kept(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    model, place, file = tiny_model("llama"), tmp_path / "kv", tmp_path / "prompts.jsonl"
    first, second = fill(place, model, make_llm)
    command = ("--recompute", "--model", model, place)
    (lock,) = place.glob(f"*/{DirectoryLock.FILE}")
    os.utime(lock, (1000, 1000))
    assert counts(verify(*command)) == (0, 0, 12)
    assert lock.stat().st_mtime == 1000, "an audit does not count as a use"
    file.write_text(f"{json.dumps([1, 2, *second])}\n{json.dumps({'prompt': first[:70], 'token_ids': first[70:]})}\n")
    assert counts(verify(*command, "--prompts", file)) == (6, 0, 6), "a wrong prompt is not found"


def test_what_cannot_be_computed_again_is_said(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    fill(tmp_path, tiny_model("llama"), make_llm)

    def said(*words: object, status: int) -> str:
        result = CliRunner().invoke(app, ["cache", "verify", *map(str, words), str(tmp_path)])
        assert result.exit_code == status, result.output
        return result.output

    assert "--recompute needs --model" in said("--recompute", status=2)
    assert "cannot be computed again: the model" in said("--recompute", "--model", tiny_model("qwen2"), status=1)
    bad = tmp_path / "bad"
    bad.write_text("once upon a time")
    refused = said("--recompute", "--model", tiny_model("llama"), "--prompts", bad, status=2)
    assert "it must be JSON lines" in refused
    damage("disk", tmp_path)
    assert "nothing was computed again" in said("--recompute", "--model", tiny_model("llama"), status=1)
