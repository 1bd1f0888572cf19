"""Tiny random models as vLLM's CPU build takes them: head sizes of its kernels, and weights that make prompts matter.

What vLLM itself makes of ``load_format="dummy"`` is so small that outputs do not depend on the KV cache at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

VOCAB_SIZE = 512
WINDOW = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

PLAIN = ("llama", "llama-retrained")
"""One KV-cache group of full attention: what every version of vLLM lets us offload."""

CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_COMMON, num_hidden_layers=3),
    "llama-retrained": lambda: LlamaConfig(**_COMMON, num_hidden_layers=3),
    "mistral-window": lambda: MistralConfig(**_COMMON, num_hidden_layers=3, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=7,
        sliding_window=WINDOW,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32,
    ),
    "lfm2": lambda: Lfm2Config(
        **{**_COMMON, "pad_token_id": 0, "eos_token_id": 2},
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_dim=64,
        conv_dim_out=64,
        block_dim=64,
        block_ff_dim=128,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
}


def save_model(kind: str, directory: Path) -> str:
    """Write a random model whose next token depends on tokens far back; returns its path."""
    path = directory / kind
    if path.is_dir():
        return str(path)
    torch.manual_seed(sum(kind.encode()))
    dtype = torch.bfloat16 if kind == "qwen3-next" else torch.float32
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() >= 2:
                weights.normal_(0, 1.0 if "embed" in name else 1.2 / weights[0].numel() ** 0.5)
    model.save_pretrained(path)
    return str(path)


def save_tokenizer(path: str) -> None:
    """Write a tokenizer of made-up words to a model's directory, for what vLLM does not do without one."""
    words = WordLevel({f"w{at}": at for at in range(VOCAB_SIZE)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(path)
