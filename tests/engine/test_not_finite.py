"""Bytes in blocks that are no numbers, and models that compute such: they reach nobody but the request that made them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cargohold import LLM, DiskTierConfig, OffloadConfig, RequestOutput, SamplingParams
from cargohold.engine.core.request import GREEDY, SampleSpec
from cargohold.engine.model.hf_runner import sample_tokens
from cargohold.protocol import (
    BlockIds,
    ClassFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorTransferResults,
    KVConnectorWorker,
    NullConnectorScheduler,
    NullConnectorWorker,
    RequestView,
    StepView,
)
from tests.models import VOCAB_SIZE, greedy_reference, make_model

BAD_TOKEN = VOCAB_SIZE - 1
"""What the models of ``spoiled_model`` cannot compute with."""
GARBAGE = 0xFF
"""Any number of any width whose bytes are all like this is a NaN."""


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(BAD_TOKEN) for _ in range(length)]


@cache
def expected(kind: str, seed: int, length: int, max_tokens: int = 12) -> tuple[int, ...]:
    """The tokens of transformers itself."""
    return greedy_reference(make_model(kind), prompt(seed, length), max_tokens)


def generate(llm: LLM, *prompts: list[int], max_tokens: int = 12) -> list[RequestOutput]:
    return llm.generate(list(prompts), SamplingParams(max_tokens=max_tokens))


def is_refused(output: RequestOutput) -> bool:
    return output.finish_reason == "error" and "non-finite" in (output.error or "")


@pytest.fixture
def spoiled_model(tmp_path: Path) -> Callable[[str], str]:
    """Saves a model in float32 whose KV of ``BAD_TOKEN`` is not finite."""

    def save(kind: str) -> str:
        model = make_model(kind)
        with torch.no_grad():
            model.get_input_embeddings().weight[BAD_TOKEN] = torch.inf
        model.save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


# --- whatever bytes blocks hold ---------------------------------------------------------------------------------------


class GarbageWorker(NullConnectorWorker):
    """Fills all blocks with garbage before the first request, the null block too."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        for regions in kv_caches:
            for region in regions:
                region.fill_(GARBAGE)


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("max_num_batched_tokens", [7, pytest.param(512, marks=pytest.mark.long)])
def test_rows_that_no_token_was_written_to_have_no_influence(
    kind: str, max_num_batched_tokens: int, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    garbage = ClassFactory(lambda _: NullConnectorScheduler(), lambda _: GarbageWorker())
    llm = make_llm(tiny_model(kind), block_tokens=8, max_num_batched_tokens=max_num_batched_tokens, offload=garbage)
    lengths = (3, 20, 33, 60)  # padded to the longest while they are generated
    outputs = generate(llm, *(prompt(length, length) for length in lengths))
    assert [output.token_ids for output in outputs] == [expected(kind, length, length) for length in lengths]


@dataclass(frozen=True)
class Copies:
    """Blocks to save after a step, and blocks to fill before it with what was saved."""

    save: tuple[int, ...] = ()
    load: tuple[int, ...] = ()


class PartWorker(KVConnectorWorker):
    """Saves blocks, and loads them but for the rows behind ``num_tokens``: these are garbage."""

    name = "part"
    metadata_type = Copies

    def __init__(self, num_tokens: int, num_layers: int, block_tokens: int) -> None:
        self.num_tokens, self.num_layers, self.block_tokens = num_tokens, num_layers, block_tokens

    def register_kv_caches(self, kv_caches: Any) -> None:
        ((storage,),) = kv_caches
        self.rows = storage.view(len(storage), self.num_layers, 2, self.block_tokens, -1)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata

    def start_load_kv(self) -> None:
        if self.metadata.load:
            loaded = self.saved.clone()
            loaded[-1, :, :, self.num_tokens % self.block_tokens :] = GARBAGE
            self.rows[list(self.metadata.load)] = loaded

    def wait_for_save(self) -> None:
        if self.metadata.save:
            self.saved = self.rows[list(self.metadata.save)].clone()

    def clear_connector_metadata(self) -> None:
        self.metadata = Copies()


class PartScheduler(KVConnectorScheduler):
    """Has the blocks saved that hold the first request's first tokens, and loads these for every later request."""

    name = "part"

    def __init__(self, num_tokens: int, num_blocks: int) -> None:
        self.num_tokens, self.num_blocks = num_tokens, num_blocks
        self.is_saved = False
        self.load: tuple[int, ...] = ()
        self.num_loads = 0

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        return (self.num_tokens - num_computed_tokens if self.is_saved else 0), False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.load = tuple(blocks[0][: self.num_blocks])
            self.num_loads += 1

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        load, self.load = self.load, ()
        if self.is_saved or not step.scheduled:
            return Copies(load=load)
        self.is_saved = True
        return Copies(save=tuple(step.scheduled[0].block_ids[0][: self.num_blocks]))


@pytest.mark.parametrize("num_left", [0, 1, 3])
def test_rows_behind_a_load_of_a_part_of_a_block_have_no_influence(
    num_left: int, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    length = 21
    num_tokens = length - num_left
    scheduler = PartScheduler(num_tokens, num_blocks=-(-num_tokens // 8))
    worker = PartWorker(num_tokens, num_layers=2, block_tokens=8)
    llm = make_llm(
        tiny_model("llama"),
        block_tokens=8,
        prefix_caching=False,
        offload=ClassFactory(lambda _: scheduler, lambda _: worker),
    )
    outputs = [generate(llm, prompt(1, length))[0] for _ in range(2)]
    assert scheduler.num_loads == 1
    assert [output.token_ids for output in outputs] == [expected("llama", 1, length)] * 2


class HalfwayWorker(KVConnectorWorker):
    """Fills the blocks of every load with garbage, and reports that the load failed."""

    name = "halfway"
    metadata_type = Copies

    def __init__(self, scheduler: HalfwayScheduler) -> None:
        self.scheduler = scheduler

    def register_kv_caches(self, kv_caches: Any) -> None:
        ((self.storage,),) = kv_caches

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata

    def start_load_kv(self) -> None:
        self.storage[list(self.metadata.load)] = GARBAGE

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: Any) -> KVConnectorTransferResults:
        ended = frozenset(self.scheduler.take_loading())
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=ended)

    def clear_connector_metadata(self) -> None:
        self.metadata = Copies()


class HalfwayScheduler(KVConnectorScheduler):
    """Promises to load every prompt."""

    name = "halfway"

    def __init__(self) -> None:
        self.loading: list[str] = []
        self.load: tuple[int, ...] = ()

    def take_loading(self) -> list[str]:
        loading, self.loading = self.loading, []
        return loading

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading.append(request.request_id)
            self.load = tuple(blocks[0])

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        load, self.load = self.load, ()
        return Copies(load=load)


def test_garbage_that_a_failed_load_leaves_has_no_influence(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    scheduler = HalfwayScheduler()
    factory = ClassFactory(lambda _: scheduler, lambda _: HalfwayWorker(scheduler))
    llm = make_llm(tiny_model("llama"), block_tokens=16, num_device_blocks=5, offload=factory)
    for seed in (2, 3):
        assert generate(llm, prompt(seed, 40))[0].token_ids == expected("llama", seed, 40)


class HalfwayInStepScheduler(HalfwayScheduler):
    """Promises to load every prompt in the step that computes its last tokens."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        return request.num_tokens - num_computed_tokens - 3, False


class HalfwayInStepWorker(HalfwayWorker):
    """Reports blocks that it has filled with garbage after the step that read them."""

    def get_transfer_results(self, finished_req_ids: Any) -> KVConnectorTransferResults:
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return frozenset(self.metadata.load)


def test_a_request_that_read_garbage_starts_over_although_its_numbers_were_not_finite(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    scheduler = HalfwayInStepScheduler()
    factory = ClassFactory(lambda _: scheduler, lambda _: HalfwayInStepWorker(scheduler))
    llm = make_llm(tiny_model("llama"), block_tokens=8, offload=factory)
    output = generate(llm, prompt(2, 40))[0]
    assert output.token_ids == expected("llama", 2, 40) and output.metrics.preemptions == 1


# --- models that compute such -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3"])
def test_a_request_whose_numbers_are_not_finite_ends_and_harms_no_other_of_its_step(
    kind: str, spoiled_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(spoiled_model(kind), block_tokens=8)
    shared = prompt(5, 40)
    good, bad, other = generate(llm, shared, [*shared[:30], BAD_TOKEN, *shared[:5]], prompt(6, 22))
    assert is_refused(bad) and not bad.token_ids
    assert (good.token_ids, other.token_ids) == (expected(kind, 5, 40), expected(kind, 6, 22))


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3"])
def test_later_requests_in_the_same_blocks_are_not_harmed(
    kind: str, spoiled_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(spoiled_model(kind), block_tokens=8, num_device_blocks=14 * (4 if kind == "gemma3" else 1))
    assert is_refused(generate(llm, [*prompt(4, 70), *[BAD_TOKEN] * 10])[0])
    for _ in range(3):
        assert generate(llm, prompt(7, 20))[0].token_ids == expected(kind, 7, 20)


def test_a_request_ends_in_the_step_that_spoils_it_and_keeps_the_prefix_before(
    spoiled_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(spoiled_model("llama"), block_tokens=8, max_num_batched_tokens=16)
    shared = prompt(8, 40)
    bad = generate(llm, [*shared[:20], BAD_TOKEN, *shared])[0]
    assert is_refused(bad)
    after = generate(llm, shared)[0]
    assert after.token_ids == expected("llama", 8, 40)
    assert after.metrics.device_tokens == 16, "what was computed in earlier steps, and nothing of the last"


@pytest.fixture
def overflowing_model(tmp_path: Path) -> str:
    """A model in float16 whose weights are finite, and whose activations for ``BAD_TOKEN`` are not."""
    model = make_model("llama").half()
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = torch.finfo(torch.float16).max
        model.model.layers[0].mlp.down_proj.weight.mul_(20)
    model.save_pretrained(tmp_path / "float16")
    return str(tmp_path / "float16")


@pytest.fixture
def restarted(overflowing_model: str, tmp_path: Path) -> Callable[[], LLM]:
    """Starts an engine that finds on a disk what the one before has stored."""

    def start() -> LLM:
        tier = DiskTierConfig(directory=str(tmp_path / "disk"), max_bytes="16MiB")
        offload = OffloadConfig(host_bytes="4MiB", tiers=[tier], restore="always")
        return LLM(
            overflowing_model, num_device_blocks=64, block_tokens=16, offload=offload, load_failure_policy="fail"
        )

    return start


PATIENCE_S = 60.0


def test_a_spoiled_prefix_is_found_neither_on_the_device_nor_on_a_disk(restarted: Callable[[], LLM]) -> None:
    shared, rest, other = prompt(9, 64), prompt(3, 5), prompt(10, 70)
    with restarted() as llm:
        bad, good = generate(llm, [*shared, *[BAD_TOKEN] * 4], other, max_tokens=8)
        assert is_refused(bad) and good.finish_reason == "length"
        want = generate(llm, [*shared, *rest])[0]
        assert want.finish_reason == "length" and want.metrics.device_tokens == 0
        assert llm.settle(PATIENCE_S)
    with restarted() as llm:
        again, good_again = generate(llm, [*shared, *rest], other, max_tokens=8)
        assert again.token_ids == want.token_ids[:8] and good_again.token_ids == good.token_ids
        assert again.metrics.restored_tokens["disk"] == 64, "what was stored after that step is found"


def test_a_spoiled_prefix_alone_leaves_nothing_on_a_disk(restarted: Callable[[], LLM]) -> None:
    shared = prompt(9, 64)
    with restarted() as llm:
        assert is_refused(generate(llm, [*shared, *[BAD_TOKEN] * 4])[0])
    with restarted() as llm:
        output = generate(llm, [*shared, *prompt(3, 5)])[0]
        assert output.finish_reason == "length" and not output.metrics.restored_tokens.get("disk")


class Listening(NullConnectorScheduler):
    """Remembers what it is told of each step."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.told.append(connector_output.step_failed)


def test_connectors_are_told_that_the_step_failed(
    spoiled_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    listening = Listening()
    factory = ClassFactory(lambda _: listening, lambda _: NullConnectorWorker())
    llm = make_llm(spoiled_model("llama"), offload=factory)
    generate(llm, prompt(1, 20), max_tokens=1)  # of more, the model might choose the bad one itself
    assert not any(listening.told)
    generate(llm, [*prompt(1, 20), BAD_TOKEN])
    assert listening.told.count(True) == 1


# --- sampling ---------------------------------------------------------------------------------------------------------


SPECS = (GREEDY, SampleSpec(temperature=1.0, seed=3), SampleSpec(temperature=1.0, top_k=2, top_p=0.5, seed=3))


@pytest.mark.parametrize("spec", SPECS)
def test_no_token_is_chosen_from_logits_that_are_not_finite(spec: SampleSpec) -> None:
    logits = torch.tensor([[0.0, torch.nan, 2.0], [0.0, 50.0, 1.0], [0.0, 1.0, torch.inf]])
    assert sample_tokens(logits, [spec] * 3) == [None, 1, None]


def test_tokens_that_a_model_rules_out_are_not_chosen() -> None:
    assert sample_tokens(torch.tensor([[-torch.inf, 5.0, -torch.inf]]), [SampleSpec(temperature=2.0)]) == [1]
