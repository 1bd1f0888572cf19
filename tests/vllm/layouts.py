"""Published models as vLLM's own planner lays out their KV; layouts.json has their layers, heads, windows and ratios."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_layout import KVCacheLayout as Order

from cargohold.lab.vllm.configuration import model_config

# Since 0.33, the planner is a module of its own.
_PLANNER = "vllm.v1.core.kv_cache_planning"
planner = import_module(_PLANNER if find_spec(_PLANNER) else "vllm.v1.core.kv_cache_utils")
NUM_BLOCKS = 4
_BLOCKS_FIRST = Order.BLNHC.name


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A published model.

    Attributes:
        name: its name.
        source: where its numbers are from.
        block_tokens: vLLM's block size.
        layers: per kind of layer, how many there are and the values of vLLM's spec.
        starts_with: names of the only connectors with which vLLM starts it; empty if it does not care.
    """

    name: str
    source: str
    block_tokens: int
    layers: tuple[Mapping[str, Any], ...]
    starts_with: str = ""

    def specs(self) -> dict[str, Any]:
        """vLLM's spec of each layer."""
        return {
            f"model.layers.{at}.{number}": _spec(layer, self.block_tokens)
            for number, layer in enumerate(self.layers)
            for at in range(layer["count"])
        }

    def kv_cache_config(self) -> Any:
        """The groups and tensors that vLLM's planner makes of it, as workers get them."""
        return _planned(self)


@cache
def _planned(model: Published) -> Any:
    config = planner_config(model.block_tokens)
    groups = planner.get_kv_cache_groups(config, model.specs())
    planned = planner.get_kv_cache_config_from_groups(config, groups, 1 << 50)
    of_scheduler = generate_scheduler_kv_cache_config([planned])
    sizes = resolve_kv_cache_block_sizes(of_scheduler, config)
    planned.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(of_scheduler, config, *sizes)
    return planned


@cache
def published() -> list[Published]:
    """All of them."""
    told = json.loads((Path(__file__).parent / "layouts.json").read_text())
    return [
        Published(one["model"], one["source"], one["block_tokens"], tuple(one["layers"]), one.get("starts_with", ""))
        for one in told
    ]


def planner_config(block_tokens: int, num_blocks: int = NUM_BLOCKS) -> Any:
    """VLLM's configuration for a pool of so many blocks, of which each holds all layers side by side."""
    model = model_config()
    cache = CacheConfig(block_size=block_tokens, enable_prefix_caching=True)
    cache.kv_cache_layout = _BLOCKS_FIRST
    cache.mamba_cache_mode = "align"
    cache.num_gpu_blocks_override = num_blocks
    scheduler = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    return VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduler, parallel_config=ParallelConfig()
    )


def _spec(layer: Mapping[str, Any], block_tokens: int) -> Any:
    values = {name: value for name, value in layer.items() if name not in ("count", "spec")}
    values.setdefault("block_size", block_tokens)
    if "dtype" in values:
        values["dtype"] = getattr(torch, values["dtype"])
    if "dtypes" in values:
        values["dtypes"] = tuple(getattr(torch, name) for name in values["dtypes"])
        values["shapes"] = tuple(map(tuple, values["shapes"]))
    return getattr(kv_cache_interface, layer["spec"])(**values)
