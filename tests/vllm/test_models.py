"""Every kind of attention that vLLM's CPU build runs: the same tokens, from KV that was really restored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cargohold.cache.rows import plan_rows
from cargohold.tiers.kinds import open_inventory
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests.vllm.common import COMPOSED, EAGER, LAZY, RESTARTED, ask_twice, make_prompts, restored, tokens


@dataclass(frozen=True)
class Case:
    """A model, and what its blocks ask for."""

    num_groups: int
    num_blocks: int
    prompt_tokens: int
    least_restored: int
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = (1,)


CASES = {
    "llama": Case(1, 40, 330, 320),
    "mistral-window": Case(1, 40, 330, 320),
    "gemma3": Case(7, 150, 330, 320),
    "gemma3-uneven": Case(3, 80, 330, 320, rows=(2, 2, 1)),
    # vLLM pads its states to sixteen times their size, which is left out.
    "lfm2": Case(2, 40, 330, 320, {"mamba_cache_mode": "align"}, rows=(16, 1)),
    # In a smaller pool, what lazy offloading saves in time depends on how quick copies are beside steps.
    "qwen3-next": Case(2, 24, 700, 544, {"mamba_cache_mode": "align", "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("kind", CASES)
def test_tokens_are_those_without_a_connector_and_depend_on_what_is_restored(
    kind: str, vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    case = CASES[kind]
    options = {"num_blocks": case.num_blocks, "enable_prefix_caching": True, **case.options}
    prompts = make_prompts(3, case.prompt_tokens)
    expected = tokens(ask_twice(start(vllm_model(kind), **options), prompts))
    assert len(set(expected)) == len(expected), "the model says the same whatever it is asked: this proves nothing"
    for extra in (EAGER, LAZY, COMPOSED):
        engine = start(vllm_model(kind), extra, **options)
        assert len(engine.side.layout.groups) == case.num_groups
        rows = plan_rows(engine.side.layout).per_block
        assert sorted(rows) == sorted(case.rows) if max(case.rows) > 1 else set(rows) == {1}
        answers = ask_twice(engine, prompts)
        assert tokens(answers) == expected
        assert restored(answers) >= 2 * case.least_restored
        assert not engine.side.guard.broken
    # The control: bytes that changed on the way must change what the model says.
    faults.scramble_loads = True
    answers = ask_twice(start(vllm_model(kind), EAGER, **options), prompts)
    assert restored(answers) >= 2 * case.least_restored
    assert tokens(answers) != expected


def test_a_chunk_of_several_blocks_is_restored_as_a_whole(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    options = {"num_blocks": CASES["gemma3"].num_blocks}
    prompts = make_prompts(3, 330)
    expected = tokens(ask_twice(start(vllm_model("gemma3"), **options), prompts))
    answers = ask_twice(start(vllm_model("gemma3"), {**EAGER, "blocks_per_chunk": 3}, **options), prompts)
    assert tokens(answers) == expected
    assert [answer.restored for answer in answers] == [288] * 3  # three chunks of three blocks of 32 tokens


def test_on_a_disk_chunks_take_what_their_groups_need_and_are_found_after_a_restart(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    """Found on DeepSeek V4 and Qwen4-Exp: each chunk's slot was as large as the largest group's, a fifth of it empty."""
    tier = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB", "reserve_bytes": 0}
    model, options = vllm_model("gemma3-uneven"), {"num_blocks": CASES["gemma3-uneven"].num_blocks}
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(start(model, **options), prompts))
    engine = start(model, {**RESTARTED, "tiers": [tier]}, **options)
    assert tokens(ask_twice(engine, prompts)) == expected
    sizes = engine.side.layout.group_bytes
    engine.settle()
    engine = start(model, {**RESTARTED, "tiers": [tier]}, **options)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == expected and restored(answers) == 640
    (description,) = tmp_path.glob("*/shard.json")
    assert json.loads(description.read_text())["slot_bytes"] == min(sizes) < max(sizes)


@pytest.mark.parametrize("kind", ["llama", "gemma3-uneven"])
def test_packed_chunks_are_found_after_a_restart(
    kind: str,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    tmp_path: Path,
) -> None:
    pytest.importorskip("zstandard", reason="needs cargohold[packing]")
    model, options = vllm_model(kind), {"num_blocks": CASES[kind].num_blocks}
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(start(model, **options), prompts))
    found = {}
    for pack in ("none", "exponent"):
        place = tmp_path / pack
        tier = {"kind": "disk", "directory": str(place), "max_bytes": "64MiB", "reserve_bytes": 0, "pack": pack}
        engine = start(model, {**RESTARTED, "tiers": [tier]}, **options)
        assert all(group.number_type == "float32" for group in engine.side.layout.groups)
        assert tokens(ask_twice(engine, prompts)) == expected
        engine.settle()
        engine = start(model, {**RESTARTED, "tiers": [tier]}, **options)
        answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
        assert tokens(answers) == expected
        (holding,) = open_inventory(str(place)).holdings()
        found[pack] = restored(answers), holding.num_chunks, holding.plain_bytes > 0
    assert found["exponent"][:2] == found["none"][:2] and found["none"][0] >= 640
    assert (found["none"][2], found["exponent"][2]) == (False, True)
