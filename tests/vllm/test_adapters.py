"""LoRA adapters: whatever an adapter's name, path and number are, only KV of its very weights is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.lora.request import LoRARequest

from cargohold.integrations.vllm import adapters
from cargohold.integrations.vllm.adapters import AdapterWeights
from cargohold.integrations.vllm.weights import UnreadableWeightsError
from tests.vllm.common import EAGER, LAZY, RESTARTED, forget, make_prompts
from tests.vllm.engine import Answer, Engine
from tests.vllm.models import save_adapter

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
PROMPT = make_prompts(1, 330)[0]


@pytest.fixture
def llama(vllm_model: Callable[[str], str]) -> str:
    return vllm_model("llama")


@pytest.fixture
def served(llama: str, tmp_path: Path) -> Path:
    """Where an adapter is served from; holds one."""
    path = tmp_path / "served"
    shutil.copytree(save_adapter(llama, "one"), path)
    return path


def put(llama: str, name: str, served: Path) -> None:
    """Replace the adapter that is served by another one."""
    shutil.rmtree(served)
    shutil.copytree(save_adapter(llama, name), served)


def ask(engine: Engine, adapter: Any, prompt: Sequence[int] = PROMPT, max_tokens: int = 8) -> Answer:
    """The answer to a prompt, which the device forgets afterwards."""
    (answer,) = engine.ask_for([{"prompt_token_ids": list(prompt)}], max_tokens, adapter=adapter)
    forget(engine)
    return answer


def reload(engine: Engine, adapter: LoRARequest) -> None:
    """Load an adapter again, as vLLM's ``/v1/load_lora_adapter`` with ``load_inplace`` does."""
    again = LoRARequest(adapter.lora_name, adapter.lora_int_id, adapter.lora_path, load_inplace=True)
    assert engine.llm.llm_engine.add_lora(again)


@pytest.fixture
def expected(llama: str, start: Callable[..., Any]) -> Callable[[str], tuple[int, ...]]:
    """The tokens that a fresh engine without offloading gives with an adapter."""

    def tokens(name: str) -> tuple[int, ...]:
        return ask(start(llama, **OPTIONS), LoRARequest(name, 1, save_adapter(llama, name))).tokens

    return tokens


def on_disk(tmp_path: Path) -> dict[str, Any]:
    tier = {"kind": "disk", "directory": str(tmp_path / "kv"), "max_bytes": "64MiB", "reserve_bytes": 0}
    return {**RESTARTED, "tiers": [tier]}


def key_by_name_only(weights: AdapterWeights, block_hash: bytes) -> bytes:
    return block_hash


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_restarted_engine_finds_what_the_same_weights_have_computed(
    is_mutant: bool,
    llama: str,
    served: Path,
    start: Callable[..., Any],
    expected: Callable[[str], tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_mutant:
        monkeypatch.setattr(AdapterWeights, "key_of", key_by_name_only)
    one, two = expected("one"), expected("two")
    assert one != two, "adapters change nothing: this proves nothing"
    adapter = LoRARequest("served", 1, str(served))
    assert ask(start(llama, on_disk(tmp_path), **OPTIONS), adapter).tokens == one
    engine = start(llama, on_disk(tmp_path), **OPTIONS)
    again = ask(engine, LoRARequest("served", 7, str(served)))
    assert (again.tokens, again.restored) == (one, 320)
    assert ask(engine, None).restored == 0
    put(llama, "two", served)
    other = ask(start(llama, on_disk(tmp_path), **OPTIONS), adapter)
    assert (other.tokens == two, other.restored) == ((False, 320) if is_mutant else (True, 0))
    put(llama, "one", served)
    back = ask(start(llama, on_disk(tmp_path), **OPTIONS), adapter)
    assert (back.tokens, back.restored) == (one, 320)


@pytest.mark.long
def test_two_workers_restarted_find_what_the_same_weights_have_computed(
    llama: str, served: Path, start: Callable[..., Any], tmp_path: Path
) -> None:
    """Each worker has a part of the adapter, and of the KV: keys are made of all parts."""
    options = {**OPTIONS, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    adapter, renumbered = (LoRARequest("served", number, str(served)) for number in (1, 7))
    one = ask(start(llama, on_disk(tmp_path), **options), adapter).tokens
    again = ask(start(llama, on_disk(tmp_path), **options), renumbered)
    assert (again.tokens, again.restored) == (one, 320)
    put(llama, "two", served)
    two = ask(start(llama, **options), adapter).tokens
    assert one != two, "adapters change nothing: this proves nothing"
    other = ask(start(llama, on_disk(tmp_path), **options), adapter)
    assert (other.tokens, other.restored) == (two, 0)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("extra", [EAGER, LAZY], ids=["eager", "lazy"])
def test_weights_that_are_loaded_in_place_are_found_apart_when_the_prefix_cache_was_reset(
    extra: dict[str, Any],
    llama: str,
    served: Path,
    start: Callable[..., Any],
    expected: Callable[[str], tuple[int, ...]],
) -> None:
    one, two = expected("one"), expected("two")
    adapter = LoRARequest("served", 1, str(served))
    engine = start(llama, extra, **OPTIONS)
    ask(engine, adapter)
    assert ask(engine, adapter).restored == 320
    put(llama, "two", served)
    assert ask(engine, adapter).tokens == one, "vLLM has them loaded: what is in the files does not matter"
    reload(engine, adapter)
    assert engine.llm.reset_prefix_cache()
    assert [(answer.tokens, answer.restored) for answer in (ask(engine, adapter), ask(engine, adapter))] == [
        (two, 0),
        (two, 320),
    ]
    put(llama, "one", served)
    reload(engine, adapter)
    assert engine.llm.reset_prefix_cache()
    back = ask(engine, adapter)
    assert (back.tokens, back.restored) == (one, 320), "what was kept of them is found again"


def test_an_adapter_that_is_unloaded_and_loaded_with_other_weights(
    llama: str,
    served: Path,
    start: Callable[..., Any],
    expected: Callable[[str], tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM's server gives it another number."""
    one, two = expected("one"), expected("two")
    engine = start(llama, EAGER, **OPTIONS)
    ask(engine, LoRARequest("served", 1, str(served)))
    same = ask(engine, LoRARequest("served", 2, str(served)))
    assert (same.tokens, same.restored) == (one, 320)
    put(llama, "two", served)
    again = LoRARequest("served", 3, str(served))
    answers = [ask(engine, again) for _ in range(2)]
    assert [(answer.tokens, answer.restored) for answer in answers] == [(two, 0)] * 2
    assert "the weights of its adapter have changed" in answers[1].notes[0]
    assert "the weights of its adapter have changed" in caplog.text
    assert engine.llm.reset_prefix_cache()
    answers = [ask(engine, again) for _ in range(2)]
    assert [(answer.tokens, answer.restored) for answer in answers] == [(two, 0), (two, 320)]


@pytest.mark.parametrize("is_mutant", [False, True])
def test_what_weights_that_are_loaded_in_place_compute_is_not_kept_under_the_ones_before(
    is_mutant: bool,
    llama: str,
    served: Path,
    start: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a reset, vLLM itself finds KV of the old weights; but no longer after a restart."""
    if is_mutant:
        monkeypatch.setattr(adapters.HeldAdapters, "check", lambda _: None)
    adapter, other = LoRARequest("served", 1, str(served)), make_prompts(1, 330, seed=7)[0]
    engine = start(llama, on_disk(tmp_path), **OPTIONS)
    ask(engine, adapter)
    put(llama, "two", served)
    reload(engine, adapter)
    ask(engine, adapter, other)
    put(llama, "one", served)
    again = ask(start(llama, on_disk(tmp_path), **OPTIONS), adapter, other)
    assert again.restored == (320 if is_mutant else 0)


def test_an_adapter_that_vllm_has_dropped_and_reads_again(llama: str, served: Path, start: Callable[..., Any]) -> None:
    adapter, other = LoRARequest("served", 1, str(served)), LoRARequest("other", 2, save_adapter(llama, "other"))
    engine = start(llama, EAGER, **{**OPTIONS, "max_loras": 1})
    one = ask(engine, adapter).tokens
    ask(engine, other)
    again = ask(engine, adapter)
    assert (again.tokens, again.restored) == (one, 320)


def test_an_adapter_whose_weights_cannot_be_told_is_served_without(
    llama: str,
    served: Path,
    start: Callable[..., Any],
    expected: Callable[[str], tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> str:
        raise UnreadableWeightsError("it is a riddle")

    one, adapter = expected("one"), LoRARequest("served", 1, str(served))
    monkeypatch.setattr(adapters, "fingerprint_of", refuse)
    engine = start(llama, EAGER, **OPTIONS)
    answers = [ask(engine, adapter) for _ in range(2)]
    assert [(answer.tokens, answer.restored) for answer in answers] == [(one, 0)] * 2
    assert "which weights its adapter has is unknown" in answers[1].notes[0]
    ask(engine, None)
    assert ask(engine, None).restored == 320


def test_all_that_vllm_reads_of_an_adapter_counts_and_nothing_else(
    llama: str, served: Path, start: Callable[..., Any], tmp_path: Path
) -> None:
    engine = start(llama, EAGER, **OPTIONS)
    (worker,) = engine.llm.collective_rpc(lambda worker: worker)

    def fingerprint(path: Path, number: int) -> str:
        worker.add_lora(LoRARequest(f"name{number}", number, str(path)))
        return adapters.fingerprint_of(worker.model_runner.lora_manager._adapter_manager.get_adapter(number))

    copied = tmp_path / "elsewhere"
    shutil.copytree(served, copied)
    assert fingerprint(served, 1) == fingerprint(copied, 2)
    description = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**description, "lora_alpha": 16}))
    assert fingerprint(copied, 3) != fingerprint(served, 4)
