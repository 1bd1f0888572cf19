"""Text to tokens and back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cargohold.engine.model.info import ModelInfo
from cargohold.errors import PromptTooLongError, RequestError, one_line
from cargohold.protocol import ToolTokens, TurnEnd, end_of_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

logger = logging.getLogger(__name__)

NUM_CONTEXT_TOKENS = 5
"""Tokens of the prompt that the first piece is decoded with."""

_MAX_CHARACTER_TOKENS = 4
"""Most tokens of one character: it has no more bytes in UTF-8."""
_MAX_PENDING_TOKENS = 4 * _MAX_CHARACTER_TOKENS
"""Most tokens to hold back as an incomplete character: a model may write bytes that are not UTF-8 for as long as it likes."""

_OWN_TEMPLATE_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of transformers' own method, which are no variables of the template."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_USUAL_MAX_BYTES = 64
"""Bytes per token that texts do not exceed on average, even where a tokenizer drops or fuses white space. What is longer than
that, and than the longest token, is refused without tokenizing it, which takes seconds."""


class PieceDecoder:
    """Decodes a growing sequence of tokens, special ones left out.

    The text of a token depends on its neighbours: spaces at the start of a text are dropped, and a character may take several
    tokens. So each piece is what the text grows by when new tokens are decoded together with those before them::

        tokens    ... context | pending
        decoded   "like this"   "like this one"   ->   " one"

    The context begins and ends between characters. A prompt that ends within one, as an answer that was cut does, leaves its
    beginning pending: the character is part of the text that completes it.

    Args:
        backend: the tokenizer under transformers' one.
        prompt_token_ids: what comes before the first token.
    """

    def __init__(self, backend: RustTokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._backend = backend
        context, self._pending = self._cut_between_characters(prompt_token_ids)
        self._set_context(context)
        # The text of the prompt's pending end if nothing completes it; it is not part of the answer then.
        self._prompt_end = self._decode(context + self._pending)[len(self._context_text) :]

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        piece = self._decode(self._context + self._pending)[len(self._context_text) :]
        if not piece:
            self._pending.pop()  # a special token
            return ""
        if piece.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        self._set_context(self._pending)
        self._pending = []
        piece, self._prompt_end = piece.removeprefix(self._prompt_end), ""
        return piece

    def _cut_between_characters(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prompt's last tokens that end between characters, and the tokens of an incomplete character after them."""
        last = list(prompt_token_ids[-(NUM_CONTEXT_TOKENS + 2 * (_MAX_CHARACTER_TOKENS - 1)) :])
        for num_behind in range(_MAX_CHARACTER_TOKENS):
            end = max(0, len(last) - num_behind)
            for start in range(min(_MAX_CHARACTER_TOKENS, max(1, end))):
                text = self._decode(last[start:end])
                if not text.startswith(_REPLACEMENT) and not text.endswith(_REPLACEMENT):
                    return last[start:end], last[end:]
        return last, []  # no text at all

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text


class Tokenizer:
    """A model's tokenizer.

    Args:
        inner: a fast tokenizer of transformers.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        backend = self._backend = inner.backend_tokenizer
        # What a file of a tokenizer may say otherwise, and transformers sets back before each text.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = inner.split_special_tokens
        longest = max((len(token.encode()) for token in backend.get_vocab()), default=1)
        self._max_token_bytes = max(longest, _USUAL_MAX_BYTES)
        self._tool_tokens = ToolTokens({token_id: str(token) for token_id, token in inner.added_tokens_decoder.items()})

    @classmethod
    def load(cls, info: ModelInfo) -> Tokenizer | None:
        """The model's tokenizer, or ``None`` if it has none that is usable: then prompts must be token ids."""
        from transformers import AutoTokenizer  # noqa: PLC0415  # slow to import

        try:
            inner = AutoTokenizer.from_pretrained(info.path, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001  # it says in many ways that there is none, or that a package is missing
            logger.info("model %s has no tokenizer: %s", info.name, one_line(error))
            return None
        if not getattr(inner, "is_fast", False):
            logger.warning("the tokenizer of model %s is not a fast one, so it is not used", info.name)
            return None
        return cls(inner)

    def piece_decoder(self, prompt_token_ids: Sequence[int] = ()) -> PieceDecoder:
        """A decoder that turns the tokens that follow a prompt into text, one by one."""
        return PieceDecoder(self._backend, prompt_token_ids)

    def special_token_ids(self, texts: Collection[str]) -> frozenset[int]:
        """Ids of the special tokens whose text is one of ``texts``. Decoded text leaves them out."""
        tokens = self._inner.added_tokens_decoder.items() if texts else ()
        return frozenset(token_id for token_id, token in tokens if token.special and str(token) in texts)

    def end_of_answer(self, token_ids: Sequence[int]) -> TurnEnd:
        """How an answer ended that the model itself has ended. Models without a token for calls of tools write them as text."""
        end = self._tool_tokens.end_of(token_ids)
        return end_of_text(self.decode(token_ids)) if end is TurnEnd.UNKNOWN else end

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a text, with special tokens as the model expects.

        Raises:
            RequestError: it is not valid Unicode.
            PromptTooLongError: it is so long that it has more than ``most`` tokens; it was not tokenized.
        """
        return self._encode(text, most, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        text: str = self._inner.decode(list(token_ids), skip_special_tokens=True)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Tokens of a conversation, ending where the assistant is to speak.

        Raises:
            PromptTooLongError: it is so long that it has more than ``most`` tokens; it was not tokenized.
            RequestError: the model has no chat template, or the conversation does not fit it or is no valid Unicode, or the
                template has no place for tools.
        """
        from jinja2 import TemplateError  # noqa: PLC0415  # only needed here

        if not self._inner.chat_template:
            raise RequestError("this model has no chat template; use generate with a prompt instead")
        _check_messages(messages)
        options = dict(template_options or {})
        for name in _OWN_TEMPLATE_OPTIONS & options.keys():
            raise RequestError(f"{name} is not a variable of chat templates that clients may set")
        tools = list(tools) if tools else None
        if tools and "tools" not in self._inner.get_chat_template(tools=tools):
            raise RequestError("the chat template of this model does not support tools; remove them")
        try:
            text = self._inner.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            # A template may compute with what it is given, and then raises Python's own errors.
            raise RequestError(f"the conversation does not fit the model's chat template: {one_line(error)}") from error
        return self._encode(text, most, add_special_tokens=False)  # the template wrote them

    def _encode(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        _check_unicode(text)
        fewest = len(text.encode()) // self._max_token_bytes
        if most is not None and fewest > most:
            raise PromptTooLongError(fewest, most, is_counted=False)
        # Not by transformers, which makes lists of masks and of types, too: those of a long text take most of the memory.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


def _check_unicode(text: str) -> None:
    """Raise ``RequestError`` for half a surrogate pair, which Python puts where bytes that it reads are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start + 1} of the text, {text[error.start]!r}, is no valid Unicode: it stands for a byte that "
            f"is not UTF-8, or for half a character; convert the text to UTF-8 first"
        ) from error


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("a conversation is a list of messages, at least one")
    for at, message in enumerate(messages, start=1):
        # A template would silently write nothing for a key that is missing.
        wrong = _what_is_wrong_with(message)
        if wrong is not None:
            needed = "each message needs role and content, both text"
            raise RequestError(f"message {at} of {len(messages)} {wrong}: {needed}")


def _what_is_wrong_with(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return f"is not a mapping but {message!r:.40}"
    for key in ("role", "content"):
        if message.get(key) is None:
            return f"has no {key}"
        if not isinstance(message[key], str):
            return f"has a {key} that is no text"
    return None
