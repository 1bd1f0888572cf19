"""Block traces: the blocks of recorded requests' prompts, and when the requests arrived.

The format is Mooncake's, as JSON lines::

    {"timestamp_ms": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48], "session_id": 7}

``hash_ids`` are the prompt's blocks in order. An id stands for a block *and its whole prefix*, so an id seen before is a block
that can be reused. Only ``hash_ids`` are required.

Our own engines record further fields, such as the blocks that the answer filled, and how many leading blocks the engine reused.

Logs of requests with texts or tokens are read, too: JSON lines with one of ``prompt`` (text), ``messages`` (a chat) or
``token_ids``, which are hashed into blocks as the engine does, and fields of block traces::

    {"timestamp_ms": 0, "messages": [{"role": "user", "content": "Good morning"}], "session_id": "a"}
    {"timestamp_ms": 9, "token_ids": [1, 15043, 3186], "output_token_ids": [29991]}

Files may be plain, gzip or Zstandard, recognised by their first bytes, or standard input.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeAlias

import msgspec

from cargohold.blocks import extend_hashes, root_hash
from cargohold.errors import CargoholdError, ConfigError, TraceError, one_line
from cargohold.protocol import TurnEnd

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of the decoder for lines that are not JSON, not text, or nested too deeply."""


class _Request(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What traces and logs say of a request besides its prompt.

    Attributes:
        timestamp_ms: time of arrival in milliseconds; ``None`` if the trace does not say.
        timestamp: the same, under the name that Mooncake's own files have for it.
        ended_ms: when the answer was complete, on the same clock.
        output_length: tokens generated.
        session_id: requests of one conversation have the same.
        step_tokens: most tokens of a prompt that the recording engine computed in a step.
        reused_blocks: leading blocks that the recording engine reused when this request ran.
        stop: how the turn ended, in a word that ``TurnEnd.named`` knows; logs may have something else under this name.
    """

    timestamp_ms: int | float | None = None
    timestamp: int | float | None = None
    ended_ms: int | float | None = None
    output_length: int | None = None
    session_id: int | str | None = None
    step_tokens: int | None = None
    reused_blocks: int | None = None
    stop: Any = None


class TraceRequest(_Request, frozen=True, gc=False, kw_only=True):
    """One request of a trace.

    Attributes:
        hash_ids: the prompt's blocks, in order.
        input_length: tokens of the prompt.
        output_hash_ids: blocks after the prompt's that the answer completed. The first may hold the end of the prompt.
        block_tokens: tokens per block.
    """

    hash_ids: list[int]
    input_length: int | None = None
    output_hash_ids: list[int] = []
    block_tokens: int | None = None

    @property
    def arrival_ms(self) -> float | None:
        """Time of arrival in milliseconds, whichever name the trace has for it."""
        return self.timestamp if self.timestamp_ms is None else self.timestamp_ms

    @property
    def turn_end(self) -> TurnEnd:
        """How the turn ended, as far as the trace says."""
        return TurnEnd.named(self.stop)


MAX_TOKENS: Final = 2**31 - 1
"""Largest number that a field may have, so that sums and products over a whole trace fit into 64 bits."""
_MAX_MS: Final = 2.0**63
_SHOWN_DIGITS: Final = 24
_LEAST: Final = {"input_length": 0, "output_length": 0, "block_tokens": 1, "step_tokens": 1, "reused_blocks": 0}


OnBadLine: TypeAlias = Callable[[TraceError], None]
"""Called with the error of a broken line: raises it to stop, or returns to skip the line."""

_DECODER = msgspec.json.Decoder(TraceRequest)


def stop(error: TraceError) -> None:
    """Stop at a broken line."""
    raise error


def read_trace(
    files: Iterable[str | Path],
    *,
    on_bad_line: OnBadLine = stop,
    on_progress: Callable[[int], None] | None = None,
    decode: Callable[[Line], TraceRequest] | None = None,
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, reading its files lazily.

    Args:
        files: paths of its parts, in order; plain, gzip or Zstandard; ``-`` is standard input.
        on_bad_line: called for a line that is not a request; see ``OnBadLine``.
        on_progress: called with the number of bytes, as they are in the files, that were read since the last call.
        decode: makes a request of a line; by default, lines must be in the format above.

    Raises:
        TraceError: a file cannot be read; or a line is broken, and ``on_bad_line`` raised it.
    """
    decode = decode or decode_request
    for file in files:
        for line in read_lines(file, on_progress):
            try:
                request = decode(line)
            except TraceError as error:
                on_bad_line(error)
            else:
                yield request


def decode_request(line: Line) -> TraceRequest:
    """The request that a line describes. Raises ``TraceError``, naming the line, if it describes none."""
    try:
        request = _DECODER.decode(line.text)
    except UNREADABLE as error:
        raise TraceError(line.file, line.number, one_line(error)) from error
    check_numbers(request, line)
    return request


def check_numbers(request: TraceRequest, line: Line) -> None:
    """Raise ``TraceError``, naming the line, for a number that is impossible or so large that sums would overflow."""
    for name, least in _LEAST.items():
        value = getattr(request, name)
        if value is not None and not least <= value <= MAX_TOKENS:
            reason = f"{name} is {_short(value)}; it must be an integer from {least} to {MAX_TOKENS}"
            raise TraceError(line.file, line.number, reason)
    for time_ms in (request.arrival_ms, request.ended_ms):
        if time_ms is not None and not -_MAX_MS <= time_ms <= _MAX_MS:
            reason = f"its time is {_short(time_ms)}; it must be a number of milliseconds"
            raise TraceError(line.file, line.number, reason)


def _short(number: float) -> str:
    text = str(number)
    return text if len(text) <= _SHOWN_DIGITS else f"{text[:_SHOWN_DIGITS]}..."


_ID_BYTES = 8


class LoggedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: str
    content: str


class LoggedRequest(_Request, frozen=True, kw_only=True):
    """One line of a log; see the module."""

    prompt: str | None = None
    messages: list[LoggedMessage] | None = None
    token_ids: list[int] | None = None
    output_token_ids: list[int] = []
    hash_ids: msgspec.Raw = msgspec.Raw(b"")
    salt: str | None = None


class TextTokenizer(Protocol):
    """Turns texts into tokens, as ``cargohold.engine.model.tokenizer.Tokenizer`` does."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation."""


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
            ended_ms=logged.ended_ms,
            input_length=len(token_ids),
            output_length=len(logged.output_token_ids) or logged.output_length,
            session_id=logged.session_id,
            block_tokens=self.block_tokens,
            step_tokens=logged.step_tokens,
            reused_blocks=logged.reused_blocks,
            stop=logged.stop,
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


STDIN: Final = "-"

_PIECE_BYTES: Final = 1 << 17
_COMPRESSED_BYTES: Final = 1 << 10
"""Compressed bytes that are decompressed at once: in Zstandard, four bytes may stand for 128 KiB."""
_MAX_LINE_BYTES: Final = 1 << 28
_ZSTD_WINDOW_BYTES: Final = 1 << 28
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# The 16 magic numbers of frames without contents, which are to be skipped. Files of pzstd begin with one.
_ZSTD_SKIPPED_MAGICS: Final = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_GZIP_WBITS: Final = 31


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank.

    Attributes:
        file: name of its file, as the user wrote it.
        number: number of the line, from 1.
        text: its bytes, without the newline.
    """

    file: str
    number: int
    text: bytes


def read_lines(file: str | Path, on_progress: Callable[[int], None] | None = None) -> Iterator[Line]:
    """Yield every line of a file that is not blank.

    Args:
        file: a path, or ``-`` for standard input.
        on_progress: called with the number of bytes of the file that were read since the last call.

    Raises:
        TraceError: the file cannot be read, is damaged, or needs a package that is not installed; names file and line.
    """
    name = str(file)
    number = 0
    try:
        with _opened(name) as stream:
            for number, text in enumerate(_split(_pieces(stream, on_progress)), start=1):
                contents = text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text
                if contents.strip():
                    yield Line(name, number, contents)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise TraceError(name, number + 1 if number else None, reason) from error


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split contents into lines; the last one need not end in a newline. Raises ``ValueError`` for a line that is too long."""
    begun: list[bytes] = []
    num_begun = 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        begun.append(first)
        num_begun += len(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun, num_begun = [others[-1]], len(others[-1])
        elif num_begun > _MAX_LINE_BYTES:
            raise ValueError(f"no end of the line within {_MAX_LINE_BYTES >> 20} MiB; this is not a trace")
    yield b"".join(begun)


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == STDIN:
        # The program that started this process may have closed standard input; then Python has none.
        if sys.stdin is None:
            raise ValueError("there is no standard input")
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as stream:
        yield stream


def _pieces(stream: BinaryIO, on_progress: Callable[[int], None] | None) -> Iterator[bytes]:
    """The file's contents, decompressed. Raises ``EOFError`` for a compressed file that ends too early."""
    pieces = _raw_pieces(stream, on_progress)
    start = next(pieces, b"")
    new_frame = _decompressor_for(start)
    pieces = chain([start], pieces)
    return pieces if new_frame is None else _decompressed(pieces, new_frame)


def _raw_pieces(stream: BinaryIO, on_progress: Callable[[int], None] | None) -> Iterator[bytes]:
    while piece := stream.read(_PIECE_BYTES):
        if on_progress is not None:
            on_progress(len(piece))
        yield piece


def _decompressed(pieces: Iterable[bytes], new_frame: Callable[[], Any]) -> Iterator[bytes]:
    frame = new_frame()
    parts = (piece[at : at + _COMPRESSED_BYTES] for piece in pieces for at in range(0, len(piece), _COMPRESSED_BYTES))
    for part in parts:
        data = part
        while data:
            if frame.eof:  # a file may consist of several compressed ones, one after the other
                frame = new_frame()
            yield _decompress(frame, data)
            data = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the compressed file is cut off here")


def _decompressor_for(start: bytes) -> Callable[[], Any] | None:
    """What makes a decompressor of one frame, which zlib and zstandard offer alike; ``None`` for plain files."""
    if start.startswith(_GZIP_MAGIC):
        return lambda: zlib.decompressobj(_GZIP_WBITS)
    if not start.startswith((_ZSTD_MAGIC, *_ZSTD_SKIPPED_MAGICS)):
        return None
    try:
        import zstandard  # noqa: PLC0415  # optional
    except ModuleNotFoundError as error:
        reason = "it is compressed with Zstandard: pip install 'cargohold[lab]', or decompress it first"
        raise ValueError(reason) from error
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    return context.decompressobj


def _decompress(frame: Any, data: bytes) -> bytes:
    try:
        return bytes(frame.decompress(data))
    except zlib.error:
        raise
    except Exception as error:
        # zstandard's own error, which cannot be named here: the package is optional.
        raise ValueError(f"the compressed file is damaged: {one_line(error)}") from error
