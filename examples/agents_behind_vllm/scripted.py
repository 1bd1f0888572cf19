"""A model that computes as much as another one, with fixed answers: small models seldom call tools when they should."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

QUESTION, ANSWER = "How high is the tide at noon?", "It is high."
_CALL = '<tool_call>\n{"name": "tide", "arguments": {"at": "noon"}}\n</tool_call>'
_ASKED, _TOLD, _END = "<|asked|>", "<|told|>", "<|end|>"
_FOLLOWING = {_ASKED: _CALL, _CALL: _END, _TOLD: ANSWER, ANSWER: _END}
_TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}{% endfor -%}
{%- for message in messages %}{{ message.role + ': ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{{ '<|end|>' }}{% endfor -%}
{{- '<|told|>' if messages[-1].role == 'tool' else '<|asked|>' }}"""
_SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


def sizes(model: str) -> dict[str, Any]:
    """The sizes of a model, from its directory; by default those of SmolLM2-135M."""
    file = Path(model, "config.json")
    given = json.loads(file.read_text(encoding="utf-8")) if file.exists() else _SMOLLM2
    return {name: given[name] for name in _SMOLLM2}


def save_scripted(directory: Path, model: str) -> str:
    """Write the model; returns its path. A character is a token, and the next token follows from the last one alone."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([_END, _ASKED, _TOLD])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (_CALL, ANSWER)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END, chat_template=_TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes(model),
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config)
    ids = backend.get_vocab()
    with torch.no_grad():
        for layer in made.model.layers:  # all of it is computed, and none of it changes what is said
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        spoken, said = made.get_input_embeddings().weight, made.get_output_embeddings().weight
        spoken.normal_()
        said.zero_()
        for one, other in _FOLLOWING.items():
            said[ids[other]] = spoken[ids[one]]
    made.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
