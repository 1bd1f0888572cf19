"""Fingerprints of what a model holds, and what they decide when vLLM's prefix cache is reset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import torch
from torch import nn

from cargohold.integrations.vllm import weights
from cargohold.integrations.vllm.weights import UnreadableWeightsError, fingerprint, sums_of
from tests.vllm.common import EAGER, RESTARTED, ask_twice, make_prompts, reload, restored, tokens, with_disk


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 33, bias=False).to(torch.bfloat16), nn.BatchNorm1d(33))
    model.register_buffer("transposed", torch.randn(7, 9).t())
    model.register_buffer("strided", torch.randn(8, 10)[:, ::3])
    return model


def on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Take sums, as of tensors that are not in the host's memory."""
    patch.setattr(weights, "contents_of", sums_of)


def flip_two_signs(model: Any) -> None:
    model[1].weight.data[3, 5] *= -1
    model[1].weight.data[4, 7] *= -1


def swap_two_values(model: Any) -> None:
    one, two = model[0].weight.data[0, 0].clone(), model[0].weight.data[9, 9].clone()
    model[0].weight.data[0, 0], model[0].weight.data[9, 9] = two, one


def change_a_buffer(model: Any) -> None:
    model[2].running_mean[1] += 2**-12


def change_the_last_bit(model: Any) -> None:
    model[1].weight.data.view(torch.int16)[32, 47] ^= 1


def change_what_is_strided(model: Any) -> None:
    model.strided[7, 3] += 1


def turn_a_matrix(model: Any) -> None:
    model.transposed = model.transposed.contiguous().t().contiguous().t().clone(memory_format=torch.contiguous_format)


CHANGES = [flip_two_signs, swap_two_values, change_a_buffer, change_the_last_bit, change_what_is_strided, turn_a_matrix]


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_seen(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], is_on_device: bool
) -> None:
    if is_on_device:
        on_a_device(monkeypatch)
    model = make_model()
    before = fingerprint([model])
    assert fingerprint([make_model()]) == before, "it depends on the contents alone"
    change(model)
    assert fingerprint([model]) != before


def test_stretches_do_not_stand_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    monkeypatch.setattr(weights, "_NUM_WORDS", 16)
    model = nn.Linear(16, 4, bias=False)
    before = fingerprint([model])
    model.weight.data[:2] = model.weight.data[:2].flip(0)
    assert fingerprint([model]) != before


def test_weights_that_are_kept_elsewhere_are_not_taken_for_known() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(UnreadableWeightsError, match="weight is empty"):
        fingerprint([model])


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_weights_beside_which_a_hook_computes_are_not_taken_for_known(register: str) -> None:
    """Found by trying: a model that was steered through a hook was restored what it had computed before."""
    model = make_model()
    hook = getattr(next(model.children()), register)(lambda *_: None)
    with pytest.raises(UnreadableWeightsError, match="a hook changes what a layer computes"):
        fingerprint([model])
    hook.remove()
    assert fingerprint([model]) == fingerprint([make_model()])


@pytest.mark.usefixtures("readable")
def test_a_reset_without_other_weights_keeps_what_is_kept(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine, prompts = start(vllm_model("llama"), EAGER), make_prompts(2, 330)
    expected = tokens(ask_twice(engine, prompts))
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected and restored(answers) == 640


@pytest.mark.usefixtures("readable")
def test_a_model_that_is_steered_finds_nothing_of_before(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    """Found by trying: its weights are the same, so all of its prompts were restored as they had been without steering."""

    def steer(model: Any) -> None:
        model.model.layers[0].register_forward_hook(lambda layer, args, out: (out[0] + 1, *out[1:]))

    prompts, said = make_prompts(2, 330), []
    for extra in (None, EAGER):
        engine = start(vllm_model("llama"), extra)
        before = engine.ask(prompts, 6)
        engine.settle()
        engine.llm.apply_model(steer)
        assert engine.llm.reset_prefix_cache()
        after = engine.ask(prompts, 6)
        assert restored(after) == 0
        said.append((tokens(before), tokens(after)))
    assert said[0] == said[1]
    assert said[0][0] != said[0][1], "steering changes nothing: this proves nothing"


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("may_sleep", [False, True])
def test_a_pause_that_clears_drops_what_is_kept_unless_vllm_may_sleep(
    vllm_model: Callable[[str], str], start: Callable[..., Any], may_sleep: bool
) -> None:
    """vLLM resets connectors before it sleeps, and does not say why."""
    engine, prompts = start(vllm_model("llama"), EAGER), make_prompts(2, 330)
    engine.side._resets._may_sleep = may_sleep  # the CPU build has no such mode
    ask_twice(engine, prompts)
    engine.settle()
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("abort")
    core.resume_scheduler()
    assert restored(engine.ask(prompts, 6)) == (640 if may_sleep else 0)


@pytest.mark.usefixtures("readable")
def test_other_weights_are_noticed_whenever_they_come(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    """Before the reset, as people do it, and after it, as vLLM's own pause and sleep do."""
    before, after = vllm_model("llama"), vllm_model("llama-retrained")
    prompts = make_prompts(2, 330)
    expected = {path: tokens(start(path).ask(prompts)) for path in (before, after)}
    engine = start(before, EAGER)
    assert restored(ask_twice(engine, prompts)) == 640
    reload(engine, after)
    assert engine.llm.reset_prefix_cache()
    answers = engine.ask(prompts)
    assert tokens(answers) == expected[after] and restored(answers) == 0
    assert restored(ask_twice(engine, prompts)) == 640
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    reload(engine, before)
    answers = engine.ask(prompts)
    assert tokens(answers) == expected[before] and restored(answers) == 640, "kept, and found again"


@pytest.mark.usefixtures("readable")
def test_a_later_server_finds_what_was_computed_with_the_weights_of_the_files_alone(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = vllm_model("llama"), vllm_model("llama-retrained")
    extra = with_disk(tmp_path)
    of_files, of_trainer = make_prompts(2, 330)
    engine = start(before, extra)
    for prompt, weights_of in ((of_trainer, after), (of_files, before)):
        reload(engine, weights_of)
        assert engine.llm.reset_prefix_cache()
        ask_twice(engine, [prompt])
    assert [restored(start(before, extra).ask([prompt])) for prompt in (of_trainer, of_files)] == [0, 320]


@pytest.mark.usefixtures("readable")
def test_a_later_server_finds_what_was_computed_with_other_weights_if_they_return(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = vllm_model("llama"), vllm_model("llama-retrained")
    tier = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB"}
    extra = {**RESTARTED, "tiers": [tier]}
    prompts = make_prompts(1, 330)
    expected = tokens(start(after).ask(prompts))
    engine = start(before, extra)
    reload(engine, after)
    engine.ask(prompts)
    engine.settle()
    engine = start(before, extra)
    assert restored(engine.ask(prompts)) == 0, "of the weights of the files there is nothing"
    reload(engine, after)
    assert engine.llm.reset_prefix_cache()
    answers = engine.ask(prompts)
    assert tokens(answers) == expected and restored(answers) == 320


@pytest.mark.usefixtures("readable")
def test_weights_that_come_back_after_a_drop_on_demand_find_nothing_of_others(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    first, second = vllm_model("llama"), vllm_model("llama-retrained")
    prompts = make_prompts(2, 330)
    engine = start(first, EAGER)
    expected = tokens(engine.ask(prompts))
    reload(engine, second)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert restored(ask_twice(engine, prompts)) == 640
    reload(engine, first)
    assert engine.llm.reset_prefix_cache()
    answers = engine.ask(prompts)
    assert tokens(answers) == expected and restored(answers) == 0


@pytest.mark.usefixtures("readable")
def test_weights_before_the_first_request_need_no_reset(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = vllm_model("llama"), vllm_model("llama-retrained")
    extra = with_disk(tmp_path)
    prompts = make_prompts(1, 330)
    engine = start(before, extra)
    reload(engine, after)
    assert restored(ask_twice(engine, prompts)) == 320
    assert restored(start(before, extra).ask(prompts)) == 0


def test_where_weights_cannot_be_read_a_reset_drops_what_is_kept(
    vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "worker_of", lambda _: None)
    engine, prompts = start(vllm_model("llama"), EAGER), make_prompts(2, 330)
    ask_twice(engine, prompts)
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    assert restored(engine.ask(prompts)) == 0
