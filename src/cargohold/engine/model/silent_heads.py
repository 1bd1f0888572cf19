"""Gives a model more heads without changing what it computes, so that its heads can be split over more workers.

A group of query heads with their KV head is added whose output is multiplied by zeros. It costs memory and time like any other,
so this is for trying out how a model behaves when it is split, such as in the demo, not for serving.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from cargohold.engine.model.info import ModelInfo

if TYPE_CHECKING:
    import torch

_WEIGHTS = (".safetensors", ".bin")


def write_with_silent_heads(info: ModelInfo, num_shards: int, target: Path) -> None:
    """Write the same model to a directory, with as many silent heads as it takes to split it over ``num_shards`` workers.

    In float32, with its tokenizer. The model must be in a directory.
    """
    import torch  # noqa: PLC0415  # slow to import
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # slow to import

    old = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32)
    geometry = info.geometry
    num_kv_heads = -(-geometry.num_kv_heads // num_shards) * num_shards
    config = AutoConfig.from_pretrained(info.path)
    config.num_key_value_heads = num_kv_heads
    config.num_attention_heads = geometry.num_query_heads // geometry.num_kv_heads * num_kv_heads
    config.head_dim = geometry.head_dim
    new = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: weights.shape for name, weights in new.state_dict().items()}
    # New heads come behind the old ones: as rows of weights that make heads, and as columns of weights that read heads.
    new.load_state_dict({name: _padded(weights, shapes[name]) for name, weights in old.state_dict().items()})
    new.generation_config = old.generation_config
    new.save_pretrained(target)
    for file in Path(info.path).iterdir():
        if file.suffix not in _WEIGHTS and not (target / file.name).exists():
            shutil.copy(file, target)  # a file of the tokenizer


def _padded(weights: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The weights in the first rows and columns of a tensor of the given shape, which is zero elsewhere."""
    padded = weights.new_zeros(shape)
    padded[tuple(slice(size) for size in weights.shape)] = weights
    return padded
