"""Texts are tokenized as transformers tokenizes them, and what cannot fit is not tokenized."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.errors import PromptTooLongError

WORDS = (
    "market ",
    "ship",
    "    ",
    "\n",
    "e\u0301",
    "\u1112\u1161\u11ab",
    "\u212a",
    "\u1f82",
    "\x04",
    "\0",
    "日本",
    "🙂",
    "é",
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["market market ship ship      日本 🙂 "] * 9, trainer)
    return tokenizer


def with_normal_form() -> RustTokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def without_some_bytes() -> RustTokenizer:
    """As SmolLM2's: control characters are dropped."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ą", "Ā"})
    tokenizer = RustTokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def with_fallback_to_bytes() -> RustTokenizer:
    """As Llama 2's."""
    vocabulary = {token: at for at, token in enumerate(["<unk>", *BYTES, "▁", "m", "a", "ma"])}
    model = models.BPE(vocabulary, [("m", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = RustTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_words() -> RustTokenizer:
    """White space is dropped, and each unknown word is one token."""
    tokenizer = RustTokenizer(models.WordLevel({"[UNK]": 0, "market": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def without_fallback() -> RustTokenizer:
    """Characters that it does not know are dropped."""
    return RustTokenizer(models.BPE({"m": 0, "a": 1, "ma": 2}, [("m", "a")]))


def texts(tokenizer: RustTokenizer) -> list[str]:
    chance = random.Random(7)
    mixed = ["".join(chance.choices(WORDS, k=chance.randrange(1, 60))) for _ in range(200)]
    alone = [
        tokenizer.decode([token_id], skip_special_tokens=False) * 50 for token_id in tokenizer.get_vocab().values()
    ]
    return [*mixed, *alone, *(word * 300 for word in WORDS)]


@pytest.mark.parametrize(
    "make", [byte_level, with_normal_form, without_some_bytes, with_fallback_to_bytes, with_words, without_fallback]
)
def test_texts_have_the_tokens_that_transformers_makes(make: Callable[[], RustTokenizer]) -> None:
    inner = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<s>")
    inner.backend_tokenizer.enable_truncation(5)
    tokenizer = Tokenizer(inner)
    for text in texts(inner.backend_tokenizer)[:250]:
        assert tokenizer.encode(text) == list(inner(text).input_ids)


def test_what_cannot_fit_is_not_tokenized() -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    with pytest.raises(PromptTooLongError) as raised:
        tokenizer.encode("market " * 1000, most=100)
    assert (raised.value.num_tokens, raised.value.is_counted) == (109, False), "7 kB, of 64 bytes per token at most"
    assert len(tokenizer.encode("market " * 1000, most=1000)) == 1001, "it is refused by whoever counts"
