"""A tiny random model that reads and writes English: it has a tokenizer and a chat template, like the real ones."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 800
MAX_POSITIONS = 8192
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_chat_model(directory: Path) -> str:
    """Write the model to ``directory``, unless it is there; returns its path."""
    path = directory / "chat"
    if not path.is_dir():
        tokenizer = _train_tokenizer()
        _make_model(tokenizer).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-pair encoding on the demo's texts, so that answers are made of words."""
    texts = sorted((files("cargohold.cli") / "texts").iterdir(), key=lambda file: file.name)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((file.read_text(encoding="utf-8") for file in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=CHAT_TEMPLATE)


def _make_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    scores = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                weights.normal_(0, 1.2 / weights.shape[1] ** 0.5 if "embed" not in name else 1.0)
        for token_id in range(len(tokenizer)):
            text = tokenizer.decode([token_id])
            if token_id == tokenizer.eos_token_id or not (text.isascii() and text.isprintable()):
                scores[token_id] = 0  # never the likeliest token, so that answers are long and readable
    return model
