"""Packing of chunks without losing a bit: the bytes with the exponents of their numbers are compressed, the others stay.

Numbers of one layer and head are about as large, so signs and exponents repeat; the other bits are as good as random, and what
looks at them finds nothing. Of ``n`` numbers of ``w`` bytes, little-endian::

    plain    |m0 e0|m1 e1|m2 e2| ... |rest|      m: the first w - 1 bytes, e: the last one
    packed   |m0 m1 m2 ... |rest|  e0 e1 e2 ... through Zstandard, level 1  |zeros, if need be|

Of four bytes, the first ones of all numbers come first, then the second and the third ones.

A packed chunk has at least half of the plain bytes, however well it could be compressed: so a tier knows how many can lie in a
place. Whatever the bytes are, they come back as they were; those of another type than is said merely become no smaller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from cargohold.errors import ConfigError, TierError
from cargohold.tiers.memory import bounce_buffer


@dataclass(frozen=True, slots=True)
class NumberType:
    """A type of numbers.

    Attributes:
        width: bytes of a number.
        part: about which part of a chunk's bytes is left of it, as measured; see ``make bench NAME=packed``.
    """

    width: int
    part: float


NUMBER_TYPES: Final[Mapping[str, NumberType]] = {
    "bfloat16": NumberType(2, 0.70),
    "float16": NumberType(2, 0.88),
    "float32": NumberType(4, 0.85),
    "float8_e4m3fn": NumberType(1, 0.88),
    "float8_e5m2": NumberType(1, 0.80),
    "int8": NumberType(1, 0.92),
    "uint8": NumberType(1, 0.92),
}
"""The types whose chunks are packed, by the name that a layout gives them. Others are kept as they are."""
MAX_WIDTH: Final = 8
_WINDOW_LOG: Final = 14
"""A code of its own for each 16 KiB of exponents, as layers differ: that leaves 1 % less."""
_NEEDED: Final = "packing needs the extra: pip install 'cargohold[packing]'"
_threads: Final = threading.local()
_at_work: Final = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0)) // 2))
"""Threads that pack or unpack at the same time: half of the processors are left to the engine."""


def packed_sizes(sizes: Sequence[int], number_types: Sequence[str]) -> list[int]:
    """Return about how many bytes are left of so many bytes of numbers of each type."""
    return [
        int(size * NUMBER_TYPES[name].part) if name in NUMBER_TYPES else size
        for size, name in zip(sizes, number_types, strict=True)
    ]


def least_part(num_bytes: int) -> int:
    """Return the fewest bytes that a packed chunk of ``num_bytes`` has."""
    return -(-num_bytes // 2)


def is_possible() -> bool:
    """Whether the package for packing is installed."""
    return find_spec("zstandard") is not None


def require_package() -> None:
    """Raise ``ConfigError`` if the package for packing is not installed."""
    if not is_possible():
        raise ConfigError("pack", "exponent", _NEEDED)


def pack(plain: memoryview, width: int) -> memoryview | None:
    """Pack the bytes of numbers of ``width`` bytes.

    Returns memory of this thread that is valid until its next call; ``None`` if packing makes nothing smaller.
    """
    data, count = np.frombuffer(plain, np.uint8), len(plain) // width
    table, num_others = data[: count * width].reshape(count, width), len(plain) - count
    with _at_work:
        exponents = _zstandard()[0].compress(np.ascontiguousarray(table[:, -1]).data)
        num_bytes = max(num_others + len(exponents), least_part(len(plain)))
        if num_bytes >= len(plain):
            return None
        packed = bounce_buffer(num_bytes, "packed")[:num_bytes]
        into, at = np.frombuffer(packed, np.uint8), count * (width - 1)
        for plane in range(width - 1):
            into[plane * count : (plane + 1) * count] = table[:, plane]
        into[at:num_others] = data[count * width :]
        into[num_others : num_others + len(exponents)] = np.frombuffer(exponents, np.uint8)
        into[num_others + len(exponents) :] = 0
    return packed


def unpack(packed: memoryview, width: int, into: memoryview) -> bool:
    """Unpack what ``pack`` has returned, whose checksum the caller has verified. The two may lie over each other.

    Returns ``False`` if it cannot be that of a chunk as long as ``into``. However much it claims to be, no more memory is used
    than for the exponents of ``into``. Raises ``TierError`` if the package is not installed: the chunk may be good.
    """
    if not is_possible():
        raise TierError("packed", _NEEDED)
    count = len(into) // width if 0 < width <= MAX_WIDTH else 0
    num_others = len(into) - count
    if not count or num_others > len(packed):
        return False
    data, others = np.frombuffer(into, np.uint8), np.frombuffer(packed[:num_others], np.uint8)
    table, at = data[: count * width].reshape(count, width), count * (width - 1)
    with _at_work:
        exponents = _decompressed(packed[num_others:], count)
        if exponents is None:
            return False
        planes = others if not np.may_share_memory(data, others) else others.copy()
        for plane in range(width - 1):
            table[:, plane] = planes[plane * count : (plane + 1) * count]
        table[:, -1] = np.frombuffer(exponents, np.uint8)
        data[count * width :] = planes[at:]
    return True


def _decompressed(frame: memoryview, num_bytes: int) -> bytes | None:
    """Return what a frame holds if it says that this is ``num_bytes``, and is right; else ``None``."""
    import zstandard  # noqa: PLC0415  # an optional package

    try:
        # The package makes room for as much as a frame says that it holds.
        if zstandard.frame_content_size(frame) != num_bytes:
            return None
        data: bytes = _zstandard()[1].decompress(frame)
    except zstandard.ZstdError:
        return None
    return data if len(data) == num_bytes else None


def _zstandard() -> tuple[Any, Any]:
    """Return what compresses and what decompresses in this thread."""
    import zstandard  # noqa: PLC0415  # an optional package

    if not hasattr(_threads, "both"):
        level = zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG)
        _threads.both = zstandard.ZstdCompressor(compression_params=level), zstandard.ZstdDecompressor()
    both: tuple[Any, Any] = _threads.both
    return both
