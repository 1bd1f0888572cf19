"""Tiny random models, one per kind of attention, whose outputs really depend on the whole prompt."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from cargohold.engine.model import hf_runner
from cargohold.engine.model.info import ModelInfo
from cargohold.engine.model.weights import load_model

VOCAB_SIZE = 199
MAX_POSITIONS = 512
WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **changes: LlamaConfig(**_COMMON | changes, num_hidden_layers=2),
    "qwen2": lambda **changes: Qwen2Config(**_COMMON | changes, num_hidden_layers=2),
    "qwen3": lambda **changes: Qwen3Config(**_COMMON | changes, num_hidden_layers=2),
    "mistral-window": lambda **changes: MistralConfig(**_COMMON | changes, num_hidden_layers=2, sliding_window=WINDOW),
    "gemma3": lambda **changes: Gemma3TextConfig(
        **_COMMON | changes,
        num_hidden_layers=5,
        sliding_window=WINDOW,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=12,
    ),
}


def make_model(kind: str, **changes: int) -> PreTrainedModel:
    """A random model whose next token depends on tokens far back; with weights of ordinary size, it hardly would."""
    torch.manual_seed(sum(kind.encode()))
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**changes), dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                weights.normal_(0, 1.2 / weights.shape[1] ** 0.5 if "embed" not in name else 1.0)
    return model.eval()


def save_model(kind: str, directory: Path, **changes: int) -> str:
    """Write a random model to ``directory``; returns its path. ``changes`` are fields of its configuration."""
    path = directory / kind
    if not path.is_dir():
        make_model(kind, **changes).save_pretrained(path)
    return str(path)


@contextmanager
def read_once(directory: Path) -> Iterator[None]:
    """Within the block, engines in this process get copies of the models in a directory, each of which is read once.

    To read one takes longer than many a test needs it. The copies share the weights, which no engine changes.
    """
    read = functools.cache(load_model)

    def load(info: ModelInfo, device: torch.device, world_size: int = 1) -> PreTrainedModel:
        if world_size > 1 or Path(info.path).parent != directory:
            return load_model(info, device, world_size)
        model = read(info, device)
        return copy.deepcopy(model, {id(weights): weights for weights in model.parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_runner, "load_model", load)
        yield


def greedy_reference(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    """The tokens that transformers itself generates."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())
