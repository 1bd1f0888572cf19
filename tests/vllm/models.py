"""Tiny random models for vLLM's CPU build, with head sizes that its kernels have and weights that make prompts matter.

The weights that vLLM itself makes with ``load_format="dummy"`` are so small that outputs do not depend on the KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Blip2Config,
    DeepseekV2Config,
    Ernie4_5_MoeConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

VOCAB_SIZE = 512
END = 2
"""The token that ends a text that follows a grammar."""
WINDOW = 64
PICTURE_TOKENS = 200
PICTURE_SIZE = 28

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

_PICTURE = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
_SEEING = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

_QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")

_MTP: Mapping[str, tuple[str, str, Sequence[str], str]] = {
    "ernie4_5_moe": (
        "model.layers.0.",
        "model.layers.{}.mtp_block.",
        ("model.layers.{}.mtp_emb_norm.weight", "model.layers.{}.mtp_hidden_norm.weight"),
        "model.layers.{}.mtp_linear_proj.weight",
    ),
    "qwen3_next": (
        "model.layers.1.",
        "mtp.layers.0.",
        ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        "mtp.fc.weight",
    ),
}
"""By type of model: prefix of the layer that drafting layers are like, their own prefix, their norms, and their projection.

In these, a layer's number stands for the braces.
"""

PLAIN = ("llama", "llama-retrained", "ernie", "blip2")
"""Models with one KV-cache group of full attention, which can be offloaded in every version of vLLM."""

CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_COMMON, num_hidden_layers=3),
    "llama-retrained": lambda: LlamaConfig(**_COMMON, num_hidden_layers=3),
    "llama-one-head": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 1}, num_hidden_layers=3),
    # The simplest type of model with a drafting layer behind the others; none of its layers has experts here.
    "ernie": lambda: Ernie4_5_MoeConfig(
        **_COMMON, num_hidden_layers=3, moe_layer_start_index=3, moe_layer_end_index=3, moe_num_shared_experts=0
    ),
    "mistral-window": lambda: MistralConfig(**_COMMON, num_hidden_layers=3, sliding_window=WINDOW),
    # Latent attention, in the one shape that vLLM's kernel for CPUs has.
    "deepseek": lambda: DeepseekV2Config(
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        num_hidden_layers=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=3,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=7,
        sliding_window=WINDOW,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32,
    ),
    # Its experts work, and its sinks; every other layer has a window.
    "gpt-oss": lambda: GptOssConfig(
        **_COMMON, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    # Windows with narrower heads than full attention, as published.
    "gemma4": lambda: Gemma4TextConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=[*["sliding_attention"] * 5, "full_attention"],
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=32,
        global_head_dim=64,
    ),
    # Groups of 2, 2 and 1 layers.
    "gemma3-uneven": lambda: Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=5,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
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
    "qwen3-next": lambda: Qwen3NextConfig(**_COMMON, **_QWEN3_NEXT),
    # Keys and values of 96 tokens are as large as a state, so its blocks have no more tokens than that.
    "qwen3-next-many-heads": lambda: Qwen3NextConfig(
        **(_COMMON | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}), **_QWEN3_NEXT
    ),
    # It sees pictures. Most other such models need torchvision, which the environment of these tests lacks.
    "blip2": lambda: Blip2Config(
        text_config={
            "model_type": "opt",
            "vocab_size": VOCAB_SIZE + 1,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        vision_config=_SEEING | {"image_size": PICTURE_SIZE, "patch_size": 14},
        qformer_config=_SEEING | {"vocab_size": VOCAB_SIZE + 1, "encoder_hidden_size": 64},
        num_query_tokens=PICTURE_TOKENS,
        image_token_index=VOCAB_SIZE,
        tie_word_embeddings=False,
    ),
}


def save_model(kind: str, directory: Path) -> str:
    """Write a random model whose next token depends on tokens far back; returns its path."""
    path = directory / kind
    if path.is_dir():
        return str(path)
    torch.manual_seed(sum(kind.encode()))
    dtype = torch.bfloat16 if kind.startswith("qwen3-next") else torch.float32
    model_class = AutoModelForImageTextToText if kind == "blip2" else AutoModelForCausalLM
    model = model_class.from_config(CONFIGS[kind](), dtype=dtype)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() >= 2:
                weights.normal_(0, 1.0 if "embed" in name else 1.2 / weights[0].numel() ** 0.5)
    model.save_pretrained(path)
    if kind == "blip2":
        save_tokenizer(str(path))
        _write(path / "preprocessor_config.json", image_processor_type="BlipImageProcessor", size=_PICTURE)
        _write(path / "processor_config.json", processor_class="Blip2Processor", num_query_tokens=PICTURE_TOKENS)
    return str(path)


def save_tokenizer(path: str) -> None:
    """Write a tokenizer of letters and made-up words to a model's directory, for features of vLLM that need one."""
    names = [f"w{at}" for at in range(VOCAB_SIZE)] + ["<image>"]
    names[3:98] = map(chr, range(32, 127))  # letters, for grammars
    words = WordLevel({name: at for at, name in enumerate(names)}, unk_token="w0")
    backend = Tokenizer(words)
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token=names[END])
    tokenizer.save_pretrained(path)


def save_mtp(model: str, num_layers: int = 1, **changes: Any) -> str:
    """Write ``model`` with further random layers that draft the tokens after the next one; returns its path.

    ``changes`` are other values of its configuration.
    """
    path = Path("-".join([model, f"mtp{num_layers}", *(f"{name}-{value}" for name, value in changes.items())]))
    if path.is_dir():
        return str(path)
    path.mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    _write(path / "config.json", **config | changes, num_nextn_predict_layers=num_layers)
    weights = load_file(Path(model) / "model.safetensors")
    like, layer, norms, projection = _MTP[config["model_type"]]
    size = config["hidden_size"]
    drafting = {name.replace(like, layer): tuple(tensor.shape) for name, tensor in weights.items() if like in name}
    drafting |= dict.fromkeys(norms, (size,)) | {projection: (size, 2 * size)}
    numbers = range(config["num_hidden_layers"], config["num_hidden_layers"] + num_layers)
    shapes = {name.format(number): shape for number in numbers for name, shape in drafting.items()}
    torch.manual_seed(3)
    dtype = weights["lm_head.weight"].dtype
    weights |= {name: _random(shape).to(dtype) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def save_guesser(model: str, noise: float) -> str:
    """Write a draft model that often guesses the tokens of ``model``, less often with more ``noise``; returns its path."""
    path = Path(f"{model}-guesser-{noise}")
    if not path.is_dir():
        torch.manual_seed(1)
        guesser = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            for weights in guesser.parameters():
                weights.add_(torch.randn_like(weights) * weights.std(correction=0) * noise)
        guesser.save_pretrained(path)
    return str(path)


def save_eagle3(model: str) -> str:
    """Write a random EAGLE-3 head, one layer on the hidden states of ``model``; returns its path."""
    path = Path(f"{model}-eagle3")
    if path.is_dir():
        return str(path)
    path.mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": vocabulary}
    _write(path / "config.json", **config)
    first = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        name.removeprefix(first): tuple(weights.shape)
        for name, weights in load_file(Path(model) / "model.safetensors").items()
        if name.startswith(first)
    }
    # The head's attention reads a token's embedding beside the hidden states.
    shapes |= {name: (shape[0], 2 * size) for name, shape in shapes.items() if name[10:] in _QKV}
    shapes = {f"midlayer.{name}": shape for name, shape in shapes.items()}
    shapes |= {"midlayer.hidden_norm.weight": (size,), "norm.weight": (size,)}
    shapes |= {"fc.weight": (size, 3 * size), "lm_head.weight": (vocabulary, size)}
    torch.manual_seed(2)
    save_file({name: _random(shape) for name, shape in shapes.items()}, path / "model.safetensors")
    return str(path)


def save_adapter(model: str, name: str) -> str:
    """Write a random LoRA adapter that changes keys and values; returns its path."""
    path = Path(f"{model}-{name}")
    if path.is_dir():
        return str(path)
    path.mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    size, rank, projections = config["hidden_size"], 8, ["k_proj", "v_proj"]
    torch.manual_seed(sum(name.encode()))
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for projection in projections:
            target = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{target}.lora_A.weight"] = torch.randn(rank, size) * 0.2
            weights[f"{target}.lora_B.weight"] = torch.randn(size, rank) * 0.2
    save_file(weights, path / "adapter_model.safetensors")
    description = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": projections, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**description, "task_type": "CAUSAL_LM"}))
    return str(path)


def _random(shape: Sequence[int]) -> torch.Tensor:
    """Random weights of a layer that keep the size of what it reads; ones for a norm, which then changes nothing."""
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 1.2 / shape[1] ** 0.5


def _write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))
