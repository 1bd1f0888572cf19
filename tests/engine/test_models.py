"""The engine against transformers itself: the same tokens, however requests are batched, chunked, reused or preempted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, SamplingParams, UnsupportedModelError
from tests.models import CONFIGS, VOCAB_SIZE, greedy_reference, make_model

NUM_TOKENS = 10


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    generator = random.Random(7)
    shared = [generator.randrange(VOCAB_SIZE) for _ in range(longest)]
    return [
        shared[: generator.randrange(longest // 2)]
        + [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(1, longest // 2))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str) -> list[tuple[int, ...]]:
    model = make_model(kind)
    return [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts(6)]


def generate(llm: LLM, batch: list[list[int]]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(batch, SamplingParams(max_tokens=NUM_TOKENS))]


def test_outputs_depend_on_the_prompt(reference: list[tuple[int, ...]]) -> None:
    assert len(set(reference)) == len(reference), "the comparison below would prove nothing"
    assert all(len(set(tokens)) > 1 for tokens in reference)
    assert len({token for tokens in reference for token in tokens}) > 5


def test_tokens_are_those_of_transformers_when_batched(
    kind: str, reference: list[tuple[int, ...]], tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(tiny_model(kind), block_tokens=4)
    assert generate(llm, prompts(6)) == reference
    assert generate(llm, prompts(6)) == reference, "and again, from the prefix cache"


def test_tokens_are_those_of_transformers_one_by_one(
    kind: str, reference: list[tuple[int, ...]], tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(tiny_model(kind), block_tokens=4, prefix_caching=False)
    assert [generate(llm, [prompt])[0] for prompt in prompts(6)[:3]] == reference[:3]


@pytest.mark.parametrize("max_num_batched_tokens", [pytest.param(3, marks=pytest.mark.long), 16])
def test_tokens_are_those_of_transformers_when_prompts_are_chunked(
    kind: str,
    reference: list[tuple[int, ...]],
    max_num_batched_tokens: int,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(tiny_model(kind), block_tokens=8, max_num_batched_tokens=max_num_batched_tokens)
    assert generate(llm, prompts(6)) == reference


def test_tokens_are_those_of_transformers_when_requests_are_preempted(
    kind: str, reference: list[tuple[int, ...]], tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    num_blocks = {"gemma3": 60}.get(kind, 27)  # it has three groups
    llm = make_llm(
        tiny_model(kind),
        block_tokens=4,
        num_device_blocks=1 + num_blocks,
        max_model_len=108,
        max_num_batched_tokens=32,
    )
    outputs = llm.generate(prompts(6), SamplingParams(max_tokens=NUM_TOKENS))
    assert [output.token_ids for output in outputs] == reference
    if kind != "mistral-window":  # its requests hold a window each, so that all eight fit
        assert sum(output.metrics.preemptions for output in outputs) > 0, "the pool was not small enough"


def test_tokens_are_those_of_transformers_for_prompts_longer_than_a_query_tile(
    kind: str, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.engine.model.batch.QUERY_TILE", 16)
    batch = prompts(3, longest=300)
    model = make_model(kind)
    llm = make_llm(tiny_model(kind), block_tokens=4, max_num_batched_tokens=128)
    assert generate(llm, batch) == [greedy_reference(model, prompt, NUM_TOKENS) for prompt in batch]


def test_mixed_windows_get_groups_of_equal_size(tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]) -> None:
    groups = make_llm(tiny_model("gemma3")).plan.layout.groups
    assert [(group.kind.value, group.window_tokens, group.layer_names) for group in groups] == [
        ("full", None, ("layers.2", "layers.4")),
        ("sliding_window", 24, ("layers.0", "layers.1")),
        ("sliding_window", 24, ("layers.3",)),
    ]


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_attention_with_sinks_is_refused_before_it_answers_wrongly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM  # noqa: PLC0415  # only here

    config = GptOssConfig(
        **SMALL,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    path = tmp_path_factory.mktemp("sinks")
    GptOssForCausalLM(config).save_pretrained(path)
    with pytest.raises(UnsupportedModelError, match="s_aux"):
        LLM(str(path))


def test_attention_with_a_mask_of_the_models_own_is_refused_before_it_answers_wrongly(tmp_path: Path) -> None:
    from transformers import DogeConfig, DogeForCausalLM  # noqa: PLC0415  # only here

    # With as few tokens as the probe has, its mask hides nothing; beyond the window, it hides what scores lowest.
    config = DogeConfig(
        **SMALL,
        keep_window_size=32,
    )
    DogeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        LLM(str(tmp_path))
