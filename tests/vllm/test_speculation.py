"""Speculative decoding: of what drafts leave in the blocks only what was accepted is stored, and drafts get their own back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.config import VllmConfig

from cargohold.integrations.vllm import compat
from tests.vllm.common import CAN_DRAFT, EAGER, LAZY, RESTARTED, ask_twice, forget, make_prompts, restored, tokens
from tests.vllm.engine import BLOCK_TOKENS, Engine
from tests.vllm.models import save_eagle3, save_guesser, save_mtp

pytestmark = pytest.mark.skipif(not CAN_DRAFT, reason="vLLM 0.30's build for CPUs ends at the first draft")

NUM_DRAFTS = 3


@pytest.fixture
def llama(vllm_model: Callable[[str], str]) -> str:
    return vllm_model("llama")


def drafted_by(model: str, method: str = "draft_model") -> dict[str, Any]:
    return {"method": method, "model": model, "num_speculative_tokens": NUM_DRAFTS, "draft_tensor_parallel_size": 1}


def acceptance(engine: Engine) -> float:
    accepted = engine.metric("spec_decode_num_accepted_tokens")
    return accepted / engine.metric("spec_decode_num_draft_tokens")


@pytest.mark.parametrize(("kind", "async_scheduling"), [("llama", False), ("llama", True), ("mistral-window", True)])
def test_what_was_rejected_is_never_restored(
    kind: str, async_scheduling: bool, vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    model = vllm_model(kind)
    prompts = make_prompts(2, 310)
    reference = start(model, num_blocks=80)
    answers = reference.ask(prompts, 90)
    # Blocks of the answers, through which drafts were written over and over, are hit when the conversation goes on.
    longer = [[*prompt, *answer.tokens, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    expected = tokens(reference.ask(longer, 20))
    options = {"async_scheduling": async_scheduling, "speculative_config": drafted_by(save_guesser(model, 0.05))}
    for extra in (EAGER, LAZY):
        engine = start(model, extra, **options)
        assert tokens(engine.ask(prompts, 90)) == tokens(answers)
        forget(engine)
        again = engine.ask(longer, 20)
        assert tokens(again) == expected
        assert restored(again) >= (2 * 288 if extra is EAGER else 1)  # the other loses what is evicted at once
        assert 0.2 < acceptance(engine) < 0.8, "drafts are all the same to it: this proves nothing"
        assert not engine.side.guard.broken


def test_a_draft_model_has_its_own_kv_back(llama: str, start: Callable[..., Any], faults: Faults) -> None:
    # The model drafts for itself: what it says, it has guessed, unless it has lost its own past.
    prompts = make_prompts(3, 330)
    expected = tokens(ask_twice(start(llama), prompts, 20))
    options = {"speculative_config": drafted_by(llama), "num_blocks": 50}
    engine = start(llama, EAGER, **options)
    answers = ask_twice(engine, prompts, 20)
    assert tokens(answers) == expected
    assert restored(answers) == 960
    assert acceptance(engine) == 1
    faults.scramble_loads, faults.spared_regions = True, 3  # the layers of the model itself
    engine = start(llama, EAGER, **options)
    answers = ask_twice(engine, prompts, 20)
    assert tokens(answers) == expected, "drafts decide on how fast answers come, and on nothing else"
    assert restored(answers) == 960
    assert acceptance(engine) < 1


@pytest.mark.parametrize(("head", "num_prompt_tokens"), [("eagle3", 320), ("eagle3", 330), ("mtp", 330)])
def test_drafts_from_hidden_states_are_those_of_a_device_hit(
    head: str, num_prompt_tokens: int, vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    prompts = make_prompts(3, num_prompt_tokens)
    if head == "mtp":
        model = save_mtp(vllm_model("ernie"))
        speculation = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    else:
        model = vllm_model("llama")
        speculation = drafted_by(save_eagle3(model), "eagle3")
    options = {"speculative_config": speculation, "async_scheduling": True}
    engine = start(model, num_blocks=200, **options)
    first = [engine.ask([prompt], 20)[0] for prompt in prompts]
    drafted = note_drafts(engine)
    hits = [engine.ask([prompt], 20)[0] for prompt in prompts]
    engine = start(model, EAGER, **options)
    for prompt in prompts:
        engine.ask([prompt], 20)
    forget(engine)
    drafted_again = note_drafts(engine)
    answers = [engine.ask([prompt], 20)[0] for prompt in prompts]
    assert tokens(answers) == tokens(hits) == tokens(first)
    assert restored(answers) == 960
    assert drafted_again == drafted
    # vLLM computes the last block of a device hit again, for the head's sake: that is not what host memory is for.
    answers = [engine.ask([prompt], 20)[0] for prompt in prompts]
    assert tokens(answers) == tokens(first)
    # Since 0.33, vLLM does that only where it has a connector, whichever it is.
    on_device = hits[0].device - (BLOCK_TOKENS if hasattr(VllmConfig, "num_hash_lookahead_tokens") else 0)
    assert (restored(answers), answers[0].device) == (0, on_device)
    assert answers[0].notes[0].startswith(f"of {num_prompt_tokens} tokens, {on_device} were on the device and 0 more")
    # The control: the head reads KV of its own, behind that of the model.
    faults.scramble_loads, faults.spared_regions = True, 3
    forget(engine)
    del drafted_again[:]
    answers = [engine.ask([prompt], 20)[0] for prompt in prompts]
    assert (tokens(answers), restored(answers)) == (tokens(first), 960)
    assert drafted_again != drafted


def test_several_drafting_layers_want_more_than_a_window_back(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    """Found by a review: vLLM keeps some tokens behind the window for them, which were not asked for and not there to load."""
    if compat.TransferResults is None:
        pytest.skip("this version of vLLM cannot be told that a load of a window failed; 0.30 and later can")
    model = save_mtp(vllm_model("ernie"), 3, sliding_window=64)
    speculation = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    prompts = make_prompts(3, 330)
    extra = {
        **RESTARTED,
        "tiers": [{"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB", "reserve_bytes": 0}],
    }
    engine = start(model, extra, num_blocks=40, speculative_config=speculation)
    (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
    if not getattr(group.kv_cache_spec, "extra_retained_tokens", 0):
        pytest.skip("this version of vLLM keeps no more than the window")
    expected = tokens([engine.ask([prompt], 6)[0] for prompt in prompts])
    engine = start(model, extra, num_blocks=40, speculative_config=speculation)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == expected
    assert restored(answers) == 960
    assert not engine.side.guard.broken


def test_a_step_that_vllm_does_not_end_is_ended_by_the_next(
    llama: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: with drafts, vLLM ends steps behind them, and so only on that stage of a pipeline that has them."""
    from vllm.v1.worker.kv_connector_model_runner_mixin import (  # noqa: PLC0415  # not there in all versions
        KVConnectorModelRunnerMixin as Runner,
    )

    monkeypatch.setattr(Runner, "finalize_kv_connector", staticmethod(lambda: None))
    engine = start(llama, EAGER, speculative_config=drafted_by(llama), num_blocks=50)
    assert restored(ask_twice(engine, make_prompts(2, 330))) == 640
    assert not engine.side.guard.broken


def note_drafts(engine: Engine) -> list[Any]:
    """What is drafted from now on."""
    drafts: list[Any] = []
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    propose = runner.drafter.propose

    def note(*args: Any, **options: Any) -> Any:
        proposed = propose(*args, **options)
        drafts.append(proposed.tolist())
        return proposed

    runner.drafter.propose = note
    return drafts
