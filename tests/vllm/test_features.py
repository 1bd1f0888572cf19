"""What requests and servers switch on beside a connector: the same answers, and nobody finds what is not theirs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.liars import kept_memories
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.vllm.common import EAGER, LATENT, LAZY, ask_twice, forget, make_prompts, restored, tokens
from tests.vllm.engine import Answer, Engine
from tests.vllm.models import save_adapter, save_tokenizer


@pytest.fixture
def llama(vllm_model: Callable[[str], str]) -> str:
    return vllm_model("llama")


def ask_again(engine: Engine, prompt: Mapping[str, Any], **options: Any) -> tuple[Answer, Answer]:
    """The answers to a prompt before and after the device has forgotten it."""
    (first,) = engine.ask_for([prompt], **options)
    forget(engine)
    (second,) = engine.ask_for([prompt], **options)
    forget(engine)
    return first, second


def test_device_pool_and_host_memory_are_one_cache(llama: str, start: Callable[..., Any]) -> None:
    """Five prompts of ten blocks in turn, where each of the two has room for four: stores as computed find nothing again."""
    prompts, found = make_prompts(5, 325), {"eager": 0, "exclusive": 0}
    for mode in found:
        engine = start(llama, {"mode": mode, "host_bytes": "1920KiB", "policy": "lru"}, num_blocks=41)
        for prompt in prompts * 3:
            found[mode] += engine.ask([prompt], 1)[0].device
            engine.settle()
    assert found["eager"] == 0
    assert found["exclusive"] == 2 * 5 * 320


def test_adapters_keep_their_prompts_apart_and_a_bit_that_flips_in_host_memory_is_found(
    llama: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = kept_memories(monkeypatch)
    adapters = [None, *(LoRARequest(name, at, save_adapter(llama, name)) for at, name in enumerate(("a", "b"), 1))]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    prompt = {"prompt_token_ids": make_prompts(1, 330)[0]}
    engine = start(llama, **options)
    expected = [engine.ask_for([prompt], adapter=adapter)[0].tokens for adapter in adapters]
    assert len(set(expected)) == 3, "adapters change nothing: this proves nothing"
    for extra in (EAGER, LAZY):
        engine = start(llama, extra, **options)
        for again in (False, True):
            for adapter, answer in zip(adapters, expected, strict=True):
                (found,) = engine.ask_for([prompt], adapter=adapter)
                assert (found.tokens, found.restored) == (answer, 320 * again)
                forget(engine)
        for is_lying in (False, True):
            memories[-1].rows[:, 3] ^= 0x40 * is_lying
            (found,) = engine.ask_for([prompt], adapter=adapters[-1], wishes={"max_load_tokens": 0})
            assert found.tokens == expected[-1]
            assert any("is not what was computed" in note for note in found.notes) is is_lying
            forget(engine)


def test_embeddings_in_place_of_tokens_are_told_apart(llama: str, start: Callable[..., Any], tmp_path: Path) -> None:
    model = str(tmp_path / "llama")
    shutil.copytree(llama, model)
    save_tokenizer(model)
    random = torch.Generator().manual_seed(1)
    prompts = [{"prompt_embeds": torch.randn(330, 64, generator=random)} for _ in range(2)]
    options = {"enable_prompt_embeds": True, "skip_tokenizer_init": False}
    engine = start(model, **options)
    expected = tokens([answer for prompt in prompts for answer in engine.ask_for([prompt])])
    engine = start(model, EAGER, **options)
    answers = [ask_again(engine, prompt) for prompt in prompts]
    assert tokens([first for first, _ in answers]) == tokens([second for _, second in answers]) == expected
    assert expected[0] != expected[1]
    assert [(first.restored, second.restored) for first, second in answers] == [(0, 320)] * 2


def test_several_answers_and_the_longest_one(llama: str, start: Callable[..., Any]) -> None:
    several, longest = ({"prompt_token_ids": prompt} for prompt in make_prompts(2, 500))
    choices: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 1}
    options = {"max_model_len": 512, "enable_chunked_prefill": False}
    engine = start(llama, **options)
    expected = [*ask_again(engine, several, **choices), *ask_again(engine, longest, max_tokens=100)]
    assert len({expected[0].tokens, *expected[0].others}) == 3
    engine = start(llama, EAGER, **options)
    answers = [*ask_again(engine, several, **choices), *ask_again(engine, longest, max_tokens=100)]
    assert [(answer.tokens, answer.others) for answer in answers] == [(one.tokens, one.others) for one in expected]
    assert (len(answers[3].tokens), answers[3].restored) == (12, 480)


@pytest.mark.parametrize("skip_reading_prefix_cache", [None, False])
def test_logprobs_of_the_prompt_are_computed(
    skip_reading_prefix_cache: bool | None, llama: str, start: Callable[..., Any]
) -> None:
    """A request that declined vLLM's care, which is not to reuse prefixes, had numbers from memory that nobody had written."""
    prompt = {"prompt_token_ids": make_prompts(1, 330)[0]}
    engine = start(llama, EAGER)
    (expected,) = engine.ask_for([prompt], prompt_logprobs=0)
    forget(engine)
    wish = {"prompt_logprobs": 0, "skip_reading_prefix_cache": skip_reading_prefix_cache}
    (answer,) = engine.ask_for([prompt], **wish)
    assert (answer.tokens, answer.restored) == (expected.tokens, 0)
    assert len(answer.prompt_logprobs) == 329
    assert answer.prompt_logprobs == pytest.approx(expected.prompt_logprobs, rel=1e-3)
    forget(engine)
    assert engine.ask_for([prompt])[0].restored == 320


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_quantized_cache(kv_cache_dtype: str, llama: str, start: Callable[..., Any], faults: Faults) -> None:
    prompts = make_prompts(3, 330)
    try:
        reference = start(llama, kv_cache_dtype=kv_cache_dtype)
    except NotImplementedError as error:
        pytest.skip(f"vLLM on this processor: {error}")
    expected = tokens(ask_twice(reference, prompts))
    assert expected != tokens(ask_twice(start(llama), prompts)), "nothing is quantized: this proves nothing"
    for scrambled in (False, True):
        faults.scramble_loads = scrambled
        answers = ask_twice(start(llama, EAGER, kv_cache_dtype=kv_cache_dtype), prompts)
        assert (tokens(answers) == expected) is not scrambled
        assert restored(answers) == 960


def test_latent_attention(vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults) -> None:
    # What is decoded behind a prefix differs from what is computed with it, in vLLM itself: a device hit says what is right.
    model, prompts = vllm_model("deepseek"), make_prompts(3, 330)
    options = {**LATENT, "caches_latents": True}
    reference = start(model, **options)
    expected = tokens([reference.ask([prompt])[0] for prompt in prompts * 2][3:])
    for scrambled in (False, True):
        faults.scramble_loads = scrambled
        answers = ask_twice(start(model, EAGER, **options), prompts, 8)
        assert (tokens(answers) == expected) is not scrambled
        assert restored(answers) == 960


def test_latent_attention_where_vllm_reuses_no_prefix_is_served_without(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With its prefix cache off, as vLLM turns it off on CPUs, what was computed behind a load were other tokens."""
    model, prompts = vllm_model("deepseek"), make_prompts(3, 330)
    expected = tokens(ask_twice(start(model, **LATENT), prompts))
    answers = ask_twice(start(model, EAGER, **LATENT), prompts)
    assert (tokens(answers), restored(answers)) == (expected, 0)
    assert "reuses no prefix of latent attention on this CPU" in caplog.text


def test_sessions_that_change_their_past_are_served_without(llama: str, start: Callable[..., Any]) -> None:
    begun, added = make_prompts(2, 330)
    reference = start(llama)
    expected = talk(reference, [begun, added[:100]])
    for extra in (EAGER, LAZY):
        engine = start(llama, extra)
        engine.ask([[*begun, *added]])
        forget(engine)
        # The last token that it said is taken back when the next words come.
        assert talk(engine, [begun, added[:100]]) == expected
        forget(engine)
        assert engine.ask([begun])[0].restored == 320
        assert not engine.side.guard.broken


def talk(engine: Engine, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers of one session to one input after the other."""
    llm, params = engine.llm.llm_engine, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
    answers: list[list[int]] = []
    for words in (*inputs, ()):  # the last one ends it
        request = llm.input_processor.process_inputs(
            "session",
            {"type": "token", "prompt_token_ids": list(words or (1,))},
            params,
            supported_tasks=("generate",),
            resumable=bool(words),
        )
        request.request_id = "session"
        llm.engine_core.add_request(request)
        answers.append([])
        while words and len(answers[-1]) < 6:
            for output in llm.engine_core.get_output().outputs:
                answers[-1] += output.new_token_ids
    return answers[:-1]
