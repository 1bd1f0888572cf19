"""Sizes of tiers as people write them: ``5%`` of the different blocks, ``1000`` blocks, ``64GiB``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from cargohold.errors import ConfigError
from cargohold.replay.workload import Workload
from cargohold.units import NUMBER, SIZE_UNITS, format_count, parse_bytes

_EXPECTED = (
    "it must be a share of the different blocks such as 5%, a number of blocks such as 1000, or bytes such as 64GiB; "
    f"{SIZE_UNITS}"
)
_PERCENT = re.compile(rf"({NUMBER})\s*%")
_BLOCKS = re.compile(r"[0-9]{1,40}")


class _Unit(Enum):
    PERCENT = "per cent of the different blocks"
    BLOCKS = "blocks"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Size:
    """How large a tier is.

    Attributes:
        key: the option's name.
        text: the size as the user wrote it.
        amount: the number, in ``unit``.
        unit: unit of ``amount``.
    """

    key: str
    text: str
    amount: Fraction
    unit: _Unit

    @property
    def is_bytes(self) -> bool:
        """Whether the size is in bytes, so that the bytes per token must be known to convert it to chunks."""
        return self.unit is _Unit.BYTES

    def chunks_for(self, workload: Workload, chunk_bytes: int | None) -> int:
        """Slots of a tier of this size, at least one. Raises ``ConfigError`` if the trace and its model do not tell."""
        if self.unit is _Unit.PERCENT:
            return max(1, round(self.amount * workload.num_unique / 100))
        if self.unit is _Unit.BLOCKS:
            size = int(self.amount) // workload.blocks_per_chunk
            least = format_count(workload.blocks_per_chunk, "block")
        elif chunk_bytes is None:
            raise ConfigError(self.key, self.text, "bytes need --bytes-per-token or --model, and --block-tokens")
        else:
            size = int(self.amount) // chunk_bytes
            least = format_count(chunk_bytes, "byte")
        if not size:
            raise ConfigError(self.key, self.text, f"it must hold at least one chunk, which is {least}")
        return size


def parse_size(key: str, text: str) -> Size:
    """Parse a size. Raises ``ConfigError`` naming ``key`` if the text is not a size, or is zero."""
    text = text.strip()
    percent = _PERCENT.fullmatch(text)
    if percent:
        size = Size(key, text, Fraction(percent[1]), _Unit.PERCENT)
    elif _BLOCKS.fullmatch(text):
        size = Size(key, text, Fraction(text), _Unit.BLOCKS)
    else:
        try:
            size = Size(key, text, Fraction(parse_bytes(key, text)), _Unit.BYTES)
        except ConfigError as error:
            raise ConfigError(key, text, _EXPECTED) from error
    if not size.amount:
        raise ConfigError(key, text, "a tier of size zero keeps nothing")
    return size


def parse_sizes(key: str, text: str) -> list[Size]:
    """Parse several sizes, separated by commas. Raises like ``parse_size``."""
    return [parse_size(key, part) for part in text.split(",")]
