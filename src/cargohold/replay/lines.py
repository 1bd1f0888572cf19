"""Reads large files line by line: plain, gzip or Zstandard ones, recognised by their first bytes, or standard input."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from cargohold.errors import TraceError, one_line

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


class _Decompressor(Protocol):
    """One compressed frame, as zlib and zstandard both offer it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


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


def _decompressed(pieces: Iterable[bytes], new_frame: Callable[[], _Decompressor]) -> Iterator[bytes]:
    frame = new_frame()
    parts = (piece[at : at + _COMPRESSED_BYTES] for piece in pieces for at in range(0, len(piece), _COMPRESSED_BYTES))
    for part in parts:
        data = part
        while data:
            if frame.eof:  # a file may consist of several compressed ones, one behind the other
                frame = new_frame()
            yield _decompress(frame, data)
            data = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the compressed file is cut off here")


def _decompressor_for(start: bytes) -> Callable[[], _Decompressor] | None:
    if start.startswith(_GZIP_MAGIC):
        return lambda: zlib.decompressobj(_GZIP_WBITS)
    if not start.startswith((_ZSTD_MAGIC, *_ZSTD_SKIPPED_MAGICS)):
        return None
    try:
        import zstandard  # noqa: PLC0415  # optional
    except ModuleNotFoundError as error:
        reason = "it is compressed with Zstandard: pip install 'cargohold[zstd]', or decompress it first"
        raise ValueError(reason) from error
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    return context.decompressobj


def _decompress(frame: _Decompressor, data: bytes) -> bytes:
    try:
        return frame.decompress(data)
    except zlib.error:
        raise
    except Exception as error:
        # zstandard's own error, which cannot be named here: the package is optional.
        raise ValueError(f"the compressed file is damaged: {one_line(error)}") from error
