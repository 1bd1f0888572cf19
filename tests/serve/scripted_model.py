"""A model that says what it was built to say, for tests of what the server makes of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

END = "<|end|>"
CHAT_TEMPLATE = """
{%- for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor -%}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.at }}){% endfor %}
{{- '<|end|>' }}{% endfor -%}
{{- '<|' + ('told' if messages[-1].role == 'tool' else messages[-1].content) + '|>' if add_generation_prompt }}"""
"""The last token of a prompt decides what is said: the last message names a script, or a tool has answered."""


def save_scripted_model(directory: Path, scripts: Mapping[str, Sequence[str]], **config: Any) -> str:
    """Write a model to ``directory``; returns its path.

    Args:
        directory: where.
        scripts: pieces of what it says behind ``<|name|>``, by name. A piece is one token, so it may be in one script only.
        config: other values of its configuration, for engines that take no layers so small, or to compute as much as another.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])
    trainer = trainers.BpeTrainer(
        vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([], trainer)
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    backend.add_special_tokens([END, *roles, *(f"<|{name}|>" for name in scripts)])
    backend.add_tokens([AddedToken(piece, normalized=False) for script in scripts.values() for piece in script])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=CHAT_TEMPLATE)
    ids = backend.get_vocab()
    following = {
        ids[one]: ids[other]
        for name, script in scripts.items()
        for one, other in pairwise([f"<|{name}|>", *script, END])
    }
    _save_chain(directory, len(tokenizer), following, tokenizer.eos_token_id, config)
    tokenizer.save_pretrained(directory)
    return str(directory)


def _save_chain(
    directory: Path, vocab_size: int, following: Mapping[int, int], end: int, changes: Mapping[str, Any]
) -> None:
    """A model whose next token follows from the last one alone; behind all others, it ends."""
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": vocab_size + vocab_size % 2,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**options | dict(changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_() if weights.dim() == 2 else weights.fill_(1)
        for token_id in range(vocab_size):
            model.get_input_embeddings().weight[token_id, token_id] = 1
            model.get_output_embeddings().weight[following.get(token_id, end), token_id] = 1
    model.save_pretrained(directory)
