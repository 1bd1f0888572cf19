"""Block traces: the blocks of recorded requests' prompts, and when the requests arrived.

The format is Mooncake's, as JSON lines::

    {"timestamp_ms": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48], "session_id": 7}

``hash_ids`` are the prompt's blocks in order. An id stands for a block *and its whole prefix*, so an id seen before is a block
that can be reused. Only ``hash_ids`` are required.

Our own engines record further fields, such as the blocks that the answer filled, and how many leading blocks the engine reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from cargohold.errors import TraceError, one_line
from cargohold.replay.lines import Line, read_lines

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of the decoder for lines that are not JSON, not text, or nested too deeply."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One request of a trace.

    Attributes:
        hash_ids: the prompt's blocks, in order.
        timestamp_ms: time of arrival in milliseconds; ``None`` if the trace does not say.
        timestamp: the same, under the name that Mooncake's own files have for it.
        input_length: tokens of the prompt.
        output_length: tokens generated.
        session_id: requests of one conversation have the same.
        output_hash_ids: blocks behind the prompt's that the answer completed. The first may hold the end of the prompt.
        block_tokens: tokens per block.
        step_tokens: most tokens of a prompt that the recording engine computed in a step.
        reused_blocks: leading blocks that the recording engine reused when this request ran.
    """

    hash_ids: list[int]
    timestamp_ms: int | float | None = None
    timestamp: int | float | None = None
    input_length: int | None = None
    output_length: int | None = None
    session_id: int | str | None = None
    output_hash_ids: list[int] = []
    block_tokens: int | None = None
    step_tokens: int | None = None
    reused_blocks: int | None = None

    @property
    def arrival_ms(self) -> float | None:
        """Time of arrival in milliseconds, whichever name the trace has for it."""
        return self.timestamp if self.timestamp_ms is None else self.timestamp_ms


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
    arrival_ms = request.arrival_ms
    if arrival_ms is not None and not -_MAX_MS <= arrival_ms <= _MAX_MS:
        raise TraceError(
            line.file, line.number, f"its time is {_short(arrival_ms)}; it must be a number of milliseconds"
        )


def _short(number: float) -> str:
    text = str(number)
    return text if len(text) <= _SHOWN_DIGITS else f"{text[:_SHOWN_DIGITS]}..."
