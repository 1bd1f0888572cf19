"""SmolLM2-135M: a trained model, in float32, against transformers; its tokens with and without offloading.

What a tiny model shows as well is played with this one in the long tests alone.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from cargohold import LLM, OffloadConfig, RequestOutput, SamplingParams
from cargohold.cli.demo import load_conversations
from cargohold.connector.factory import connector_factory
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.engine.model.files import SMOLLM2_PACKAGE, locate_model
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.model.weights import load_model

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(importlib.util.find_spec(SMOLLM2_PACKAGE) is None, reason=f"{SMOLLM2_PACKAGE} is not installed"),
]

Answers = list[tuple[int, ...]]

NUM_TOKENS = 8
STORY = load_conversations(2)[0].questions[0]
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    STORY[:300],
    STORY[:200] + "\n\nIn short:",
    "def fibonacci(n):",
)


@pytest.fixture(scope="module", autouse=True)
def _load_once() -> Iterator[None]:
    """The engines of this module share one copy of the weights and one tokenizer: there is one engine at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", functools.cache(Tokenizer.load))
        patch.setattr("cargohold.engine.model.hf_runner.load_model", functools.cache(load_model))
        torch.set_num_threads(1)  # several tests at once on few cores would wait for each other's threads
        yield


@pytest.fixture
def smollm2(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return functools.partial(make_llm, "smollm2", num_device_blocks=256)


@pytest.fixture(scope="module")
def chosen() -> Callable[[Answers], Answers]:
    """What transformers chooses in the place of each token of these answers, after those before it.

    If these are the same tokens, they are its own greedy answers; one forward pass for each tells it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  # slow to import

    path = locate_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def choose(answers: Answers) -> Answers:
        found = []
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = [*tokenizer(prompt).input_ids, *answer]
            with torch.inference_mode():
                (logits,) = model(torch.tensor([ids[:-1]])).logits
            found.append(tuple(logits[-len(answer) :].argmax(-1).tolist()))
        return found

    return choose


def generate(llm: LLM, prompts: tuple[str, ...] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="together"),
        pytest.param({"max_num_batched_tokens": 37}, id="in chunks", marks=pytest.mark.long),
        pytest.param({"max_num_seqs": 1, "prefix_caching": False}, id="one by one", marks=pytest.mark.long),
        pytest.param({"block_tokens": 7}, id="in odd blocks", marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    options: dict[str, Any],
    chosen: Callable[[Answers], Answers],
    smollm2: Callable[..., LLM],
) -> None:
    answers = generate(smollm2(**options))
    assert answers == chosen(answers)
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(PROMPTS)


def test_it_knows_the_capital_of_france(smollm2: Callable[..., LLM]) -> None:
    output = smollm2().chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=20)
    )
    assert "Paris" in output.text
    assert output.finish_reason == "stop", "the end-of-sequence token ends an answer"


# --- offloading -------------------------------------------------------------------------------------------------------

EAGER, LAZY = OffloadConfig(host_bytes="256MiB"), OffloadConfig(mode="lazy", host_bytes="256MiB")
OFFLOADS: dict[str, Any] = {
    "eager": EAGER,
    "lazy": LAZY,
    "multi(eager, lazy)": [EAGER, LAZY],
    "multi(multi(lazy, eager), eager)": [
        MultiConnectorFactory((connector_factory(LAZY), connector_factory(EAGER))),
        EAGER,
    ],
}


def visit(llm: LLM, num_conversations: int = 2) -> list[RequestOutput]:
    """Some conversations in turn, twice; each answer becomes part of what follows."""
    talks = [(talk.questions[0][:160], talk.questions[1]) for talk in load_conversations(2)[:num_conversations]]
    messages: list[list[dict[str, str]]] = [[] for _ in talks]
    outputs = []
    for turn in range(2):
        for questions, history in zip(talks, messages, strict=True):
            history.append({"role": "user", "content": questions[turn]})
            outputs.append(llm.chat(history, SamplingParams(max_tokens=4)))
            history.append({"role": "assistant", "content": outputs[-1].text})
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def restored(output: RequestOutput) -> int:
    return sum(output.metrics.restored_tokens.values())


@pytest.fixture(scope="module")
def answers() -> list[tuple[int, ...]]:
    with LLM("smollm2", num_device_blocks=256, prefix_caching=False) as llm:
        return tokens_of(visit(llm))


@pytest.mark.parametrize(
    "offload", ["eager", *(pytest.param(name, marks=pytest.mark.long) for name in OFFLOADS if name != "eager")]
)
def test_conversations_that_come_back_are_restored_and_go_on_the_same(
    offload: str, answers: list[tuple[int, ...]], smollm2: Callable[..., LLM]
) -> None:
    outputs = visit(smollm2(offload=OFFLOADS[offload], num_device_blocks=9))
    assert tokens_of(outputs) == answers
    first, second = outputs[:2], outputs[2:]
    assert all(not output.metrics.restored_tokens for output in first)
    for output in second:
        reused = output.metrics.device_tokens + restored(output)
        # Lazy offloading saves what it can reach in time in a pool that each conversation all but fills.
        assert reused > (0.6 if offload in {"eager", "multi(eager, lazy)"} else 0.3) * output.metrics.prompt_tokens


@pytest.mark.long  # a CPU takes long for half precision; a tiny model does the same in ``connector.test_with_models``
def test_in_half_precision_what_is_restored_is_what_was_there(smollm2: Callable[..., LLM]) -> None:
    # Recomputing would round differently; so compare with a pool that keeps everything.
    kept = visit(smollm2(dtype="bfloat16", num_device_blocks=256), 3)
    again = visit(smollm2(dtype="bfloat16", num_device_blocks=9, offload=EAGER), 3)
    assert tokens_of(again) == tokens_of(kept)
    for before, after in zip(kept[3:], again[3:], strict=True):
        assert before.metrics.device_tokens > 60 and not before.metrics.restored_tokens
        assert restored(after) > 45


@pytest.mark.parametrize("offload", [pytest.param(None, id="none"), pytest.param(EAGER, id="eager")])
@pytest.mark.long
def test_a_pool_so_small_that_requests_are_preempted(
    offload: Any, chosen: Callable[[Answers], Answers], smollm2: Callable[..., LLM]
) -> None:
    llm = smollm2(block_tokens=4, num_device_blocks=26, max_num_batched_tokens=64, offload=offload)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS))
    assert tokens_of(outputs) == chosen(tokens_of(outputs))
    assert sum(output.metrics.preemptions for output in outputs) > 0, "the pool was not small enough"


# --- sampling and text ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_with_a_seed_tokens_do_not_depend_on_the_batch(smollm2: Callable[..., LLM]) -> None:
    llm = smollm2()
    sampling = [SamplingParams(max_tokens=5, temperature=0.9, top_p=0.95, seed=seed) for seed in range(3)]
    prompts = ["My favourite colour is"] * 3
    together = [output.text for output in llm.generate(prompts, sampling)]
    alone = [llm.generate(prompt, params)[0].text for prompt, params in zip(prompts, sampling, strict=True)]
    assert together == alone
    assert len(set(together)) == 3


@pytest.mark.long
def test_a_stop_string_ends_the_text_before_it_and_is_never_streamed(smollm2: Callable[..., LLM]) -> None:
    llm = smollm2()
    (whole,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=12))
    stop = whole.text[30:37]
    expected = whole.text[: whole.text.index(stop)]
    pieces = list(llm.stream(PROMPTS[1], SamplingParams(max_tokens=12, stop=["never said", stop])))
    assert pieces[-1].text == "".join(piece.new_text for piece in pieces) == expected
    assert pieces[-1].finish_reason == "stop"
    assert len(pieces) > 5, "it came piece by piece"
    assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(pieces))
    assert not any(piece.finished for piece in pieces[:-1])


@pytest.mark.long
def test_text_that_takes_several_tokens_per_character_is_streamed_whole(smollm2: Callable[..., LLM]) -> None:
    llm = smollm2()
    sampling = SamplingParams(max_tokens=10)
    prompt = "Repeat after me: 🙂 🚢 ⚓ 日本語 🙂 🚢 ⚓ 日本語 🙂 🚢"
    pieces = [piece.new_text for piece in llm.stream(prompt, sampling)]
    assert "".join(pieces) == llm.generate(prompt, sampling)[0].text
    assert any(ord(char) > 0x2000 for piece in pieces for char in piece)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
