"""How many tokens a text has at least, known from its length alone: what cannot fit is refused before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

USUAL_MAX_BYTES: Final = 64
"""Bytes per token that texts do not exceed on average where a tokenizer drops or fuses text, such as white space, unless they
are made for that."""

_MAX_SHRINKING: Final = {"NFC": 4, "NFKC": 4, "NFD": 4, "NFKD": 4}
"""By how much a normal form of Unicode shortens a text at most, in UTF-8."""
_KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Pre-tokenizers that drop no text."""


@dataclass(frozen=True, slots=True)
class TextBounds:
    """How much text tokens stand for.

    Attributes:
        max_token_bytes: bytes in UTF-8 that one token stands for at most; the usual maximum where that is not known.
        dropped: bytes that no token stands for.
    """

    max_token_bytes: int
    dropped: bytes = b""

    @classmethod
    def of(cls, tokenizer: RustTokenizer) -> Self:
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder().values()
        normalizer, pre_tokenizer = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
        is_byte_level = '"ByteLevel"' in json.dumps([normalizer, pre_tokenizer])
        longest_added = max((len(token.content.encode()) for token in added), default=1)
        longest = max((len(token) if is_byte_level else len(token.encode()) for token in vocabulary), default=1)
        longest = max(longest, longest_added) * max(1, _shrinking(normalizer))
        is_bounded = (
            _shrinking(normalizer) and _keeps(pre_tokenizer) and not any(one.lstrip or one.rstrip for one in added)
        )
        if is_bounded and is_byte_level and type(tokenizer.model).__name__ == "BPE":
            return cls(longest, bytes(byte for byte, letter in _byte_letters() if letter not in vocabulary))
        if is_bounded and _falls_back_to_bytes(tokenizer.model, vocabulary):
            return cls(longest)
        return cls(max(longest, USUAL_MAX_BYTES))

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least."""
        return -(-len(text.encode(errors="replace").translate(None, self.dropped)) // self.max_token_bytes)


def _state(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer is made of; empty if there is no such part."""
    return {} if part is None else json.loads(part.__getstate__())


def _shrinking(normalizer: Mapping[str, Any]) -> int:
    """By what factor a normalizer shortens text at most; 0 if that is not known."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(parts)}:
            product = 1
            for part in parts:
                product *= _shrinking(part)
            return product
        case {"type": str(kind)} if kind in _MAX_SHRINKING:
            return _MAX_SHRINKING[kind]
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return int(len(new.encode()) >= len(old.encode()))
        case {"type": "Prepend" | "ByteLevel"}:
            return 1
    return int(not normalizer)


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer is known to drop no text."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return all(map(_keeps, parts))
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in _KEEPING
    return True


def _falls_back_to_bytes(model: Any, vocabulary: Mapping[str, int]) -> bool:
    """Whether text without a token is written byte by byte."""
    return bool(getattr(model, "byte_fallback", False)) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _byte_letters() -> Iterator[tuple[int, str]]:
    """The letter that stands for each byte in the vocabulary of a byte-level tokenizer: printable ones for themselves."""
    is_shown = [33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255 for byte in range(256)]
    num_hidden = count()
    for byte in range(256):
        yield byte, chr(byte if is_shown[byte] else 256 + next(num_hidden))
