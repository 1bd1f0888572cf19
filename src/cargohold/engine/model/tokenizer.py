"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cargohold.engine.model.info import ModelInfo
from cargohold.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


class PieceDecoder:
    """Decodes a growing sequence of tokens, special ones left out.

    Args:
        backend: the tokenizer under transformers' one.
    """

    def __init__(self, backend: RustTokenizer) -> None:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415  # the engine runs without it on token ids

        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        return self._stream.step(self._backend, token_id) or ""


class Tokenizer:
    """A model's tokenizer.

    Args:
        inner: a fast tokenizer of transformers.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def load(cls, info: ModelInfo) -> Tokenizer | None:
        """The model's tokenizer, or ``None`` if it has none that is usable: then prompts must be token ids."""
        from transformers import AutoTokenizer  # noqa: PLC0415  # slow to import

        try:
            inner = AutoTokenizer.from_pretrained(info.path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # the ways in which transformers says that there is none
        return cls(inner) if getattr(inner, "is_fast", False) else None

    def piece_decoder(self) -> PieceDecoder:
        """Something that turns one request's tokens into text, one by one."""
        return PieceDecoder(self._inner.backend_tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with what the model wants around it."""
        return list(self._inner(text).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        text: str = self._inner.decode(list(token_ids), skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, ending where the assistant is to speak.

        Raises:
            RequestError: the model has no chat template, or the conversation does not fit it.
        """
        from jinja2 import TemplateError  # noqa: PLC0415  # only needed here

        if not self._inner.chat_template:
            raise RequestError("this model has no chat template; use generate with a prompt instead")
        try:
            text = self._inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise RequestError(f"the conversation does not fit the model's chat template: {error}") from error
        return list(self._inner(text, add_special_tokens=False).input_ids)
