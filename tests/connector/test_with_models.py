"""Every connector around real models, with real copies in the background: tokens are those without it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

from cargohold import LLM, OffloadConfig, RequestOutput, SamplingParams
from cargohold.connector.factory import connector_factory
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.tiers import HostMemory
from tests.devices import DEVICES
from tests.llms import SettledLLM
from tests.models import CONFIGS, VOCAB_SIZE

EAGER = OffloadConfig(host_bytes="64MiB")
CHUNKED = OffloadConfig(host_bytes="64MiB", blocks_per_chunk=3)
LAZY = OffloadConfig(mode="lazy", host_bytes="64MiB")
OFFLOADS: dict[str, Any] = {
    "eager": EAGER,
    "chunked": CHUNKED,
    "lazy": LAZY,
    "multi(eager, lazy)": [EAGER, LAZY],
    "multi(multi(lazy, chunked), eager)": [
        MultiConnectorFactory((connector_factory(LAZY), connector_factory(CHUNKED))),
        EAGER,
    ],
}
QUICK = {
    "eager": True,
    "chunked": False,
    "lazy": True,
    "multi(eager, lazy)": False,
    "multi(multi(lazy, chunked), eager)": True,
}
"""Whether the quick tests serve prompts together, for those that they do not play both ways."""
PLAYED_THROUGH = {"llama", "mistral-window", "gemma3"}
"""One model for each kind of attention; of others, the quick tests serve prompts together, with the first connector."""
NUM_GROUPS = {"gemma3": 3}


def visits() -> list[list[list[int]]]:
    """Conversations that grow, visited in turn: together larger than the pool."""
    generator = random.Random(3)
    talks = [[generator.randrange(VOCAB_SIZE) for _ in range(70)] for _ in range(4)]
    rounds = []
    for _ in range(3):
        rounds.append([list(talk) for talk in talks])
        for talk in talks:
            talk += [generator.randrange(VOCAB_SIZE) for _ in range(11)]
    return rounds


def run(llm: LLM, *, batched: bool) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of all visits in order, and how many tokens were restored."""
    sampling = SamplingParams(max_tokens=4)
    outputs = []
    for prompts in visits():
        outputs += llm.generate(prompts, sampling) if batched else [llm.generate([p], sampling)[0] for p in prompts]
    return [output.token_ids for output in outputs], sum(sum(o.metrics.restored_tokens.values()) for o in outputs)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str, device: str, tiny_model: Callable[[str], str]) -> list[tuple[int, ...]]:
    with SettledLLM(tiny_model(kind), device=device, block_tokens=4, prefix_caching=False) as llm:
        return run(llm, batched=True)[0]


def is_quick(kind: str, offload: str, *, batched: bool) -> bool:
    if kind in PLAYED_THROUGH:
        return batched is QUICK[offload] or (kind, offload) == ("llama", "eager")
    return batched and offload == "eager"


@pytest.mark.parametrize(
    ("kind", "offload", "batched"),
    [
        pytest.param(kind, name, batched, marks=() if is_quick(kind, name, batched=batched) else pytest.mark.long)
        for kind in CONFIGS
        for name in OFFLOADS
        for batched in (False, True)
    ],
    indirect=["kind"],
)
def test_tokens_are_those_without_it_and_contexts_are_restored(
    kind: str,
    device: str,
    offload: str,
    batched: bool,
    expected: list[tuple[int, ...]],
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(
        tiny_model(kind),
        device=device,
        offload=OFFLOADS[offload],
        block_tokens=4,
        num_device_blocks=1 + 30 * NUM_GROUPS.get(kind, 1),
        max_model_len=110,
        max_num_batched_tokens=64,
    )
    tokens, restored = run(llm, batched=batched)
    assert tokens == expected
    assert restored > 0


def test_in_half_precision_what_is_restored_is_what_was_there(
    device: str, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """What is computed again may be rounded differently; so compare with a pool that keeps everything."""
    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "block_tokens": 4, "max_model_len": 110}
    kept, _ = run(make_llm(tiny_model("llama"), **options, num_device_blocks=200), batched=False)
    llm = make_llm(tiny_model("llama"), **options, num_device_blocks=31, offload=EAGER)
    again, restored = run(llm, batched=False)
    assert again == kept
    assert restored > 0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in PLAYED_THROUGH else pytest.mark.long) for kind in CONFIGS],
    indirect=True,
)
def test_what_is_restored_matters(
    kind: str,
    device: str,
    expected: list[tuple[int, ...]],
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: with corrupted bytes in the tier, tokens must differ, or the test above would prove nothing."""
    memories: list[HostMemory] = []

    def remember(*arguments: Any) -> HostMemory:
        memories.append(HostMemory(*arguments))
        return memories[-1]

    monkeypatch.setattr("cargohold.connector.offloading.factory.HostMemory", remember)
    options: dict[str, Any] = {"num_device_blocks": 1 + 30 * NUM_GROUPS.get(kind, 1), "max_model_len": 110}
    llm = make_llm(tiny_model(kind), device=device, offload=EAGER, block_tokens=4, **options)
    sampling = SamplingParams(max_tokens=4)
    first, second, third = visits()
    for prompts in (first, second):
        for prompt in prompts:
            llm.generate([prompt], sampling)
        memories[0].rows[:] = 0
    outputs = [llm.generate([prompt], sampling)[0] for prompt in third]
    assert all(output.metrics.restored_tokens for output in outputs)
    assert [output.token_ids for output in outputs] != expected[-len(third) :]


POOLS: dict[str, dict[str, int]] = {
    "llama": {"num_device_blocks": 44, "max_num_batched_tokens": 48},
    "mistral-window": {"num_device_blocks": 22, "max_num_batched_tokens": 16},
    "gemma3": {"num_device_blocks": 60, "max_num_batched_tokens": 24},
}


PREEMPTED_QUICKLY = {
    ("llama", "eager"),
    ("llama", "multi(multi(lazy, chunked), eager)"),
    ("mistral-window", "lazy"),
    ("gemma3", "eager"),
}


def serve_all(llm: LLM) -> list[RequestOutput]:
    """The outputs of all prompts, served at the same time."""
    return llm.generate([prompt for prompts in visits() for prompt in prompts], SamplingParams(max_tokens=12))


@pytest.fixture(scope="module")
def answers_alone(device: str, tiny_model: Callable[[str], str]) -> Callable[[str], list[tuple[int, ...]]]:
    """What a model answers to all prompts in a pool that is large enough, computed once per kind of model."""

    @functools.cache
    def serve(kind: str) -> list[tuple[int, ...]]:
        with SettledLLM(tiny_model(kind), device=device, block_tokens=4, prefix_caching=False) as plain:
            return [output.token_ids for output in serve_all(plain)]

    return serve


@pytest.mark.parametrize(
    ("small", "offload"),
    [
        pytest.param(kind, offload, marks=() if (kind, offload) in PREEMPTED_QUICKLY else pytest.mark.long)
        for kind in POOLS
        for offload in OFFLOADS
        if kind == "llama" or offload in {"eager", "lazy"}
    ],
)
def test_a_pool_so_small_that_requests_are_preempted(
    small: str,
    device: str,
    offload: str,
    answers_alone: Callable[[str], list[tuple[int, ...]]],
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
) -> None:
    options: dict[str, Any] = {"device": device, "block_tokens": 4, "max_model_len": 130, **POOLS[small]}
    llm = make_llm(tiny_model(small), **options, offload=OFFLOADS[offload])
    outputs = serve_all(llm)
    assert [output.token_ids for output in outputs] == answers_alone(small)
    assert sum(output.metrics.preemptions for output in outputs) > 0, "the pool was not small enough"
