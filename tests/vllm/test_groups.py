"""Which KV-cache groups are served, on the real groups that vLLM's planner makes of published models."""

from __future__ import annotations

import ast
import random
import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout as Order
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import cargohold.integrations.vllm.layout as layout_module
from cargohold.cache.rows import plan_rows
from cargohold.connector.config import OffloadConfig
from cargohold.connector.held import held_levels, held_per_gib, tokens_per_gib
from cargohold.connector.kernel.offers import blocks_to_store
from cargohold.integrations.vllm.groups import Groups, groups_of, layer_specs
from cargohold.integrations.vllm.settings import VllmSettings
from cargohold.integrations.vllm.start import remarks
from cargohold.integrations.vllm.worker import as_regions
from cargohold.protocol import AttentionKind, KVCacheLayout, TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, Direction, TransferWorker
from cargohold.transfer.cpu import make_grouped_transfers
from tests.vllm.layouts import NUM_BLOCKS, Published, planner, planner_config, published

MODELS = {model.name: model for model in published()}
SERVED = [name for name in MODELS if "R-SWA" not in name]
PAGE = Path(__file__).parents[2] / "docs" / "vllm-reference.md"


def served(name: str) -> Groups:
    groups = groups_of(MODELS[name].kv_cache_config())
    assert isinstance(groups, Groups), groups
    return groups


def configured(*specs: Any, **values: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, **values)


SETTINGS = VllmSettings.parse(
    {"host_bytes": "1GiB", "tiers": [{"kind": "disk", "directory": "/nvme/kv", "max_bytes": "200GiB"}]}
)
LATENT: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def summary(model: Published) -> str:
    """A model's row in the page's table."""
    if model.starts_with:
        return f"| {model.name} | not served: vLLM 0.33 starts it only with {model.starts_with} | | | |"
    found = groups_of(model.kv_cache_config())
    if not isinstance(found, Groups):
        return f"| {model.name} | not served: {found[0].partition(': ')[2]} | | | |"
    out = sorted({_kind(spec) for spec, group in zip(_specs(model), found.by_number, strict=True) if group is None})
    kinds = " and ".join(
        f"{sum(group.kind is kind for group in found.served)} of {_NAMES[kind]}"
        for kind in AttentionKind
        if any(group.kind is kind for group in found.served)
    )
    layout = layout_of(model.name)
    possible, page = possible_per_gib(model.name), 4096
    # Its rows are as large as blocks, in whole pages: CPUOffloadingSpec of vLLM 0.32.
    of_vllm = tokens_per_gib(layout, [-(-layout.block_bytes // page) * page] * len(layout.groups))
    held = held_per_gib(layout, SETTINGS.offload)
    parts = f"{held['host'] / possible:.0%}, {held['disk'] / possible:.0%} | {of_vllm / possible:.0%}"
    return f"| {model.name} | {kinds} | {', '.join(out)} | {parts} |"


def layout_of(name: str) -> KVCacheLayout:
    """What adapter and connector agree on."""
    asked = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "served_model", lambda *_: None)
        patch.setattr(layout_module, "replicas", lambda *_: (1, ""))
        return layout_module.make_layout(served(name).served, asked, MODELS[name].kv_cache_config(), 4)


def possible_per_gib(name: str) -> int:
    """Tokens that a GiB would hold if nothing of it were lost."""
    layout = layout_of(name)
    return tokens_per_gib(layout, layout_module.group_sizes(MODELS[name].kv_cache_config(), layout.groups))


_NAMES = {
    AttentionKind.FULL: "full attention",
    AttentionKind.SLIDING_WINDOW: "windows",
    AttentionKind.CHUNKED_LOCAL: "chunked local attention",
    AttentionKind.RECURRENT: "recurrent state",
}


def _specs(model: Published) -> list[Any]:
    return [layer_specs(group)[0] for group in model.kv_cache_config().kv_cache_groups]


def _kind(spec: Any) -> str:
    return "replayed windows" if isinstance(spec, SlidingWindowMLASpec) else "rings"


def test_the_page_says_of_each_published_model_what_is_kept() -> None:
    page = PAGE.read_text()
    rows = [summary(model) for model in MODELS.values()]
    assert all(row in page for row in rows), "in docs/vllm-reference.md must stand:\n" + "\n".join(rows)


def test_vllm_starts_a_model_with_no_connector_but_those_that_the_page_names() -> None:
    # The module itself needs packages for GPUs.
    file = Path(vllm.__file__).parent / "models" / "step5" / "nvidia" / "model.py"
    if not file.exists():
        pytest.skip("Step 5 is new in vLLM 0.33")
    (check,) = (
        one
        for one in ast.parse(file.read_text()).body
        if isinstance(one, ast.FunctionDef) and one.name == "_verify_step5_dsa_kv_transfer_compatibility"
    )
    check.args.args[0].annotation = None
    names: dict[str, Any] = {"KVTransferConfig": KVTransferConfig}
    exec(compile(ast.Module([check], []), str(file), "exec"), names)
    allowed = {"MooncakeStoreConnector": True, "NixlConnector": True, "CargoholdConnector": False}
    assert MODELS["Step 5 Preview"].starts_with == " and ".join(name for name in allowed if allowed[name])
    for name, starts in allowed.items():
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_buffer_device="cuda")
        with nullcontext() if starts else pytest.raises(ValueError, match="Step5 DSA"):
            names[check.name](SimpleNamespace(kv_transfer_config=config))


@pytest.mark.parametrize("name", SERVED)
def test_a_gib_holds_nearly_as_many_tokens_as_the_sizes_of_their_kv_allow(name: str) -> None:
    """Found on DeepSeek V4, Qwen4-Exp and Gemma-3: a row was as large as the largest group's blocks, 71 to 89 % of it KV.

    And so was a disk's slot.
    """
    layout = layout_of(name)
    held = held_per_gib(layout, SETTINGS.offload)
    assert min(held.values()) >= 0.95 * possible_per_gib(name)
    asked = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1), model_config=SimpleNamespace())
    said = [
        line for line in remarks(asked, MODELS[name].kv_cache_config(), layout, SETTINGS) if line.startswith("a GiB of")
    ]
    assert [line.partition(" holds")[0] for line in said] == ["a GiB of host memory", "a GiB of disk"]
    for line, of_tier in zip(said, (held["host"], held["disk"]), strict=True):
        told = [int(number.replace(",", "")) for number in re.findall(r"([\d,]*\d)", line)]
        assert told[0] == of_tier >= 0.95 * told[-1]


@pytest.mark.parametrize(
    "offload",
    [
        OffloadConfig(host_bytes="1GiB", manager="json:loads"),
        OffloadConfig(host_bytes="1GiB", transfer="json:loads"),
    ],
)
def test_with_a_manager_or_transfer_of_ones_own_what_is_told_is_what_its_rows_hold(offload: OffloadConfig) -> None:
    """Found by reading: the log and the gauge said what our own manager would hold."""
    name = "DeepSeek V4 Flash"
    layout = layout_of(name)
    told = held_per_gib(layout, offload)
    assert told == {"host": tokens_per_gib(layout, [layout.block_bytes] * len(layout.groups))}
    assert told["host"] < 0.9 * possible_per_gib(name)
    assert held_per_gib(layout, [offload, OffloadConfig(host_bytes="1GiB")]) == {}, "two say different things"
    assert held_levels(layout, []) == {}


@pytest.mark.parametrize("name", SERVED)
def test_copies_of_a_published_layout_move_exactly_the_bytes_of_their_blocks(name: str) -> None:
    """Into what was full of other bytes: what a group's layers read of a block comes back, and no other block is touched."""
    config = MODELS[name].kv_cache_config()
    layout = layout_of(name)
    memory = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    views = _views(config, memory)
    left_out = served(name).left_out_layers
    own, kv_caches = as_regions({layer: view for layer, view in views.items() if layer not in left_out}, layout)
    plan, num_rows = plan_rows(own), 40
    host = HostMemory(num_rows, plan.row_bytes)
    transfers = make_grouped_transfers(kv_caches, plan.per_block, host, time.monotonic)
    rng, noise = random.Random(name), torch.randint(-128, 127, memory.shape, dtype=torch.int8)
    try:
        for group in layout.groups:
            memory.copy_(noise)
            source, target = rng.sample(range(1, NUM_BLOCKS), 2)
            rows = tuple(rng.sample(range(num_rows), plan.per_block[group.index]))
            before = {layer: views[layer][source].clone() for layer in group.layer_names}
            copy(transfers, CopyJob(1, Direction.STORE, (source,), rows, 60.0, (group.index,)))
            torch.bitwise_not(memory, out=memory)
            others, untouched = {layer: views[layer].clone() for layer in group.layer_names}, memory.clone()
            copy(transfers, CopyJob(2, Direction.LOAD, (target,), rows, 60.0, (group.index,)))
            for layer, expected in others.items():
                expected[target] = before[layer]
                assert torch.equal(views[layer].view(torch.uint8), expected.view(torch.uint8)), layer
            size = layout.block_bytes if plan.is_even else layout.group_bytes[group.index]
            assert int((memory != untouched).sum()) <= size, "more was written than the group's layers have"
    finally:
        transfers.shutdown()


def copy(transfers: TransferWorker, job: CopyJob) -> None:
    transfers.submit(job)
    while not (ended := transfers.poll()):
        continue
    assert ended[0].job == job and ended[0].outcome is TransferOutcome.DONE


def _views(config: Any, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """The layers' tensors as vLLM makes them."""
    specs: dict[str, Any] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        of_group = (
            spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
        )
        specs |= of_group
    return {
        layer: view.view(torch.int8) if view.dtype.itemsize == 1 else view
        for tensor in config.kv_cache_tensors
        for layer, view in zip(
            tensor.layers,
            create_kv_cache_views(memory, specs[tensor.layers[0]], NUM_BLOCKS, Order.BLNHC, tensor),
            strict=True,
        )
    }


def test_of_several_block_sizes_only_what_a_hit_can_reach_is_stored() -> None:
    """Found by reading: of DeepSeek V4, whole blocks were stored for every four tokens that no request could go on behind."""
    stored = {}
    for group in served("DeepSeek V4 Flash").served:
        num_blocks = 1024 // group.block_tokens
        chunks, _ = blocks_to_store(group, range(1, num_blocks + 1), 1, 0, num_blocks)
        stored[group.block_tokens, group.window_tokens] = chunks
    assert list(stored[256, None]) == [0, 1, 2, 3]
    assert list(stored[64, 128]) == [at for end in (4, 8, 12, 16) for at in (end - 2, end - 1)]
    assert list(stored[4, 8]) == [at for end in (64, 128, 192, 256) for at in (end - 2, end - 1)]
    assert len(stored[8, 128]) == 4 * 16


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SlidingWindowMLASpec(**LATENT, sliding_window=128), AttentionKind.SLIDING_WINDOW),
        (SlidingWindowMLASpec(**LATENT, sliding_window=128, bounded_replay=True), None),
        (CircularBufferSpec(**LATENT | {"block_size": 8}), None),
    ],
)
def test_a_group_is_kept_if_a_prefix_of_it_can_be_found(spec: Any, expected: AttentionKind | None) -> None:
    groups = groups_of(configured(spec, MLAAttentionSpec(**LATENT)))
    assert isinstance(groups, Groups)
    first, second = groups.by_number
    assert (None if first is None else first.kind) is expected
    assert second is not None
    assert groups.numbers[second.index] == 1
    assert groups.select(("first", "second")) == (("first", "second") if expected else ("second",))
    assert groups.bear_full_hits is (expected is not None)


@pytest.mark.parametrize("name", SERVED)
def test_what_is_left_out_is_what_vllm_loads_from_no_cache(name: str) -> None:
    config = MODELS[name].kv_cache_config()
    groups = groups_of(config)
    assert isinstance(groups, Groups)
    assert groups.numbers == config.prefix_cacheable_group_ids
    layers = [layer for spec in config.kv_cache_groups for layer in layer_specs(spec)]
    ratios = {int(layer.tokens_per_state) for layer in layers if getattr(layer, "tokens_per_state", 1) > 1}
    for group in groups.served:
        assert not any(group.hit_tokens % ratio for ratio in ratios), (
            "a hit leaves a ring without keys that are still needed"
        )


def test_vllm_computes_windows_that_are_left_out_anew_behind_a_hit_of_its_own() -> None:
    specs = {
        "latent": MLAAttentionSpec(**LATENT),
        "replayed": SlidingWindowMLASpec(**LATENT, sliding_window=128, bounded_replay=True),
    }
    init_none_hash(sha256)
    scheduler = scheduler_over(specs)
    for number in range(2):
        scheduler.add_request(request(str(number), 700))
        output = scheduler.schedule()
        (new,) = output.scheduled_new_reqs
        if number:
            assert (new.num_computed_tokens, output.num_scheduled_tokens["1"]) == (640 - 128, 700 - 640 + 128)
        scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)
        scheduler.schedule()


@pytest.mark.parametrize(
    "beside",
    [
        CircularBufferSpec(**LATENT | {"block_size": 8}),
        SlidingWindowMLASpec(**LATENT, sliding_window=128, bounded_replay=True),
        SlidingWindowMLASpec(**LATENT, sliding_window=128),
    ],
    ids=lambda spec: f"{type(spec).__name__} {spec.prefix_cacheable}",
)
def test_what_is_left_out_vllm_itself_finds_in_no_cache(beside: Any) -> None:
    init_none_hash(sha256)
    scheduler = scheduler_over({"latent": MLAAttentionSpec(**LATENT, tokens_per_state=4), "beside": beside})
    for number in range(2):
        scheduler.add_request(request(str(number), 700))
        (new,) = scheduler.schedule().scheduled_new_reqs
        assert not new.num_computed_tokens % 4, "a ring that is empty lacks keys"
        assert bool(new.num_computed_tokens) == bool(number)
        scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)
        scheduler.schedule()
    found = groups_of(scheduler.kv_cache_config)
    assert isinstance(found, Groups)
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    assert {get_group_id(block.block_hash) for block in blocks if block.block_hash} == set(found.numbers)


def scheduler_over(specs: dict[str, Any]) -> Any:
    """VLLM's scheduler over groups of one layer each."""
    config = planner_config(64, 60)
    groups = planner.get_kv_cache_groups(config, specs)
    of_worker = planner.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    caches = generate_scheduler_kv_cache_config([of_worker])
    sizes = resolve_kv_cache_block_sizes(caches, config)
    config.cache_config.num_gpu_blocks = caches.num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=StructuredOutputManager(config),
        block_size=sizes[0],
        hash_block_size=sizes[1],
    )


def request(request_id: str, num_tokens: int) -> Any:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(64, sha256),
    )


def test_windows_keep_what_vllm_retains_behind_them() -> None:
    groups = groups_of(configured(SlidingWindowMLASpec(**LATENT, sliding_window=128, extra_retained_tokens=2)))
    assert isinstance(groups, Groups)
    assert [group.window_tokens for group in groups.served] == [130]


def test_rows_of_several_tokens_bear_no_full_hit() -> None:
    """Found by review: its last token is computed once more, and would be compressed with what the ring does not hold."""
    groups = groups_of(configured(MLAAttentionSpec(**LATENT, tokens_per_state=4)))
    assert isinstance(groups, Groups)
    assert not groups.bear_full_hits


@pytest.mark.parametrize(
    "name", ["RSWASpec", "HiddenStateCacheSpec", "HiSparseHotSpec", "HiSparseResidentSpec", "EncoderOnlyAttentionSpec"]
)
def test_a_kind_that_cannot_be_kept_is_refused_with_its_own_reason(name: str) -> None:
    assert hasattr(kv_cache_interface, name)
    (reason,) = _refused(type(name, (), {"block_size": 16, "prefix_cacheable": True})())
    assert reason.startswith(f"group 0 has layers of kind {name}: it ")


@pytest.mark.parametrize("name", ["BetterMLAAttentionSpec", "MLAAttentionSpec"])
def test_a_kind_made_of_a_known_one_is_not_taken_for_it(name: str) -> None:
    unknown = type(name, (MLAAttentionSpec,), {"__module__": "a_plugin"})(**LATENT)
    assert _refused(unknown) == [f"group 0 has layers of kind {name}, which is not supported"]


def test_a_group_that_cannot_be_found_is_left_out_only_if_vllm_computes_it_anew() -> None:
    values = {"block_size": 16, "sliding_window": 32, "prefix_cacheable": False}
    unknown = type("SlidingWindowSpec", (), {**values, "__module__": kv_cache_interface.__name__})()
    assert _refused(unknown) == ["group 0 has layers of kind SlidingWindowSpec, which is not supported"]


def test_a_model_with_a_group_on_the_host_is_refused() -> None:
    config = configured(MLAAttentionSpec(**LATENT), MLAAttentionSpec(**LATENT))
    config.kv_cache_groups[1].host_resident = True
    assert groups_of(config) == ["group 1 lives outside the block pool"]


def test_hits_end_where_vllm_goes_on_also_for_groups_that_are_left_out() -> None:
    ring = CircularBufferSpec(**LATENT | {"block_size": 24})
    groups = groups_of(configured(MLAAttentionSpec(**LATENT), ring, cache_hit_alignment_tokens=192))
    assert isinstance(groups, Groups)
    assert [group.hit_tokens for group in groups.served] == [192]


def _refused(spec: Any) -> list[str]:
    found = groups_of(configured(spec))
    assert isinstance(found, list)
    return found
