"""Reads logs of requests with texts or tokens as block traces: hashes them into blocks as the engine does.

Logs are JSON lines, each with one of ``prompt`` (text), ``messages`` (a chat) or ``token_ids``, and fields of block traces::

    {"timestamp_ms": 0, "messages": [{"role": "user", "content": "Good morning"}], "session_id": "a"}
    {"timestamp_ms": 9, "token_ids": [1, 15043, 3186], "output_token_ids": [29991]}

Lines with ``hash_ids`` are read as lines of block traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from cargohold.blocks import extend_hashes, root_hash
from cargohold.errors import CargoholdError, ConfigError, TraceError, one_line
from cargohold.replay.lines import Line
from cargohold.replay.traces import UNREADABLE, TraceRequest, check_numbers, decode_request

_ID_BYTES = 8


class LoggedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: str
    content: str


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a log; see the module."""

    prompt: str | None = None
    messages: list[LoggedMessage] | None = None
    token_ids: list[int] | None = None
    output_token_ids: list[int] = []
    hash_ids: msgspec.Raw = msgspec.Raw(b"")
    salt: str | None = None
    timestamp_ms: int | float | None = None
    timestamp: int | float | None = None
    output_length: int | None = None
    step_tokens: int | None = None
    reused_blocks: int | None = None
    session_id: int | str | None = None


class TextTokenizer(Protocol):
    """Turns texts into tokens, as ``cargohold.engine.model.tokenizer.Tokenizer`` does."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation."""
        ...


class RequestLogDecoder:
    """Turns lines of a log into requests of a block trace.

    Args:
        block_tokens: tokens per block of the engine that is replayed.
        tokenizer: for texts; without it, only token ids are understood.

    Attributes:
        block_tokens: tokens per block.
        longest: tokens of the longest prompt that was hashed here; 0 if there was none.
        has_texts: whether there was a line that needs the tokenizer.
    """

    def __init__(self, block_tokens: int, tokenizer: TextTokenizer | None = None) -> None:
        self.block_tokens = block_tokens
        self.longest = 0
        self.has_texts = False
        self._tokenizer = tokenizer
        self._decoder = msgspec.json.Decoder(LoggedRequest)

    def __call__(self, line: Line) -> TraceRequest:
        """The request that a line describes.

        Raises:
            TraceError: it describes none.
            ConfigError: it is text, and there is no tokenizer.
        """
        if b'"hash_ids"' in line.text and b'"token_ids"' not in line.text:
            return decode_request(line)  # the fast way for block traces, which have many lines
        try:
            logged = self._decoder.decode(line.text)
        except UNREADABLE as error:
            raise TraceError(line.file, line.number, one_line(error)) from error
        if bytes(logged.hash_ids):
            return decode_request(line)
        try:
            token_ids = self._token_ids(logged)
            hashes: list[bytes] = []
            root = root_hash(salt=logged.salt)
            extend_hashes(hashes, token_ids, self.block_tokens, root)
            num_prompt_blocks = len(hashes)
            # The last token was generated, but its KV was not computed.
            extend_hashes(hashes, token_ids + logged.output_token_ids[:-1], self.block_tokens, root)
        except OverflowError as error:
            raise TraceError(line.file, line.number, "a token id is negative or too large") from error
        except ConfigError:
            raise
        except CargoholdError as error:
            raise TraceError(line.file, line.number, one_line(error)) from error
        ids = [int.from_bytes(block_hash[:_ID_BYTES], "little") for block_hash in hashes]
        self.longest = max(self.longest, len(token_ids))
        request = TraceRequest(
            hash_ids=ids[:num_prompt_blocks],
            output_hash_ids=ids[num_prompt_blocks:],
            timestamp_ms=logged.timestamp_ms,
            timestamp=logged.timestamp,
            input_length=len(token_ids),
            output_length=len(logged.output_token_ids) or logged.output_length,
            session_id=logged.session_id,
            block_tokens=self.block_tokens,
            step_tokens=logged.step_tokens,
            reused_blocks=logged.reused_blocks,
        )
        check_numbers(request, line)
        return request

    def _token_ids(self, logged: LoggedRequest) -> list[int]:
        given = [part for part in (logged.prompt, logged.messages, logged.token_ids) if part is not None]
        if len(given) != 1:
            raise CargoholdError("a request has one of prompt, messages, token_ids and hash_ids")
        if logged.token_ids is not None:
            return logged.token_ids
        self.has_texts = True
        if self._tokenizer is None:
            raise ConfigError("tokenizer", None, "the trace has texts: give the model whose tokenizer they are for")
        if logged.prompt is not None:
            return self._tokenizer.encode(logged.prompt)
        assert logged.messages is not None
        return self._tokenizer.apply_chat_template([msgspec.structs.asdict(message) for message in logged.messages])
