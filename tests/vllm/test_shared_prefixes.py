"""What prompts share is found again wherever they part, as vLLM finds it on a device that forgets nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from benchmarks.found import ALONE, CONNECTORS, MODELS, THEIRS, flood, found, lacks
from cargohold.integrations.vllm import compat
from tests.vllm.common import EAGER, tokens

pytestmark = pytest.mark.skipif(not compat.KEEPS_SHARED_PREFIXES, reason="this vLLM keeps no shared prefixes")

OF_KIND = {model.name: model for model in MODELS}


@pytest.mark.parametrize(
    ("kind", "traffic"),
    [
        ("gemma3", "shared beginnings"),
        ("lfm2", "shared beginnings"),
        ("lfm2", "forks"),
        ("qwen3-next-many-heads", "shared beginnings"),
    ],
)
def test_what_the_device_would_find_is_found_after_it_forgot(
    kind: str, traffic: str, vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    """Found by use: of models with states, nothing that prompts share was ever restored, however often it came."""
    path, model = vllm_model(kind), OF_KIND[kind]
    alone = found(start(path, num_blocks=1500, **model.options), traffic, None)
    expected = [answer.device for answer in alone]
    assert any(expected), "vLLM itself finds something"
    for name in CONNECTORS.keys() - {ALONE, THEIRS}:
        answers = found(start(path, CONNECTORS[name], num_blocks=model.num_blocks, **model.options), traffic, flood)
        counts = [answer.device for answer in answers]
        assert not lacks(counts, expected), f"{name}: {counts}, and vLLM alone {expected}"
        if kind != "qwen3-next-many-heads":  # of bfloat16 even vLLM's own cache changes tokens
            assert tokens(answers) == tokens(alone)


def test_states_are_found_as_with_single_blocks_if_larger_chunks_are_asked_for(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Found by the simulation: a state is seldom kept where a chunk of several blocks ends, so forks found less."""
    path, model = vllm_model("lfm2"), OF_KIND["lfm2"]
    counts = []
    for blocks_per_chunk in (1, 2):
        options = {**EAGER, "blocks_per_chunk": blocks_per_chunk}
        answers = found(start(path, options, num_blocks=model.num_blocks, **model.options), "forks", flood)
        counts.append([answer.device for answer in answers])
        assert ("blocks_per_chunk is taken as 1" in caplog.text) == (blocks_per_chunk > 1)
    assert counts[0] == counts[1]
