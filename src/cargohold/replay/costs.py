"""What hits are worth: a simple model of time. It is stated here, so that readers can judge it.

* Computing ``n`` tokens of a prompt takes ``n / prefill_tokens_per_s``. Attention makes long prompts slower than that, so for
  them the saving is underestimated.
* Loading a chunk from a tier takes its bytes over the tier's bandwidth, and overlaps with nothing: an overestimate.
* Storing costs nothing: it happens in the background.

Sizes of tiers are as people write them: ``5%`` of the different blocks, ``1000`` blocks, ``64GiB``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from cargohold.errors import ConfigError
from cargohold.replay.replaying import ReplayResult
from cargohold.replay.tiers import DISK, HOST
from cargohold.replay.workload import Workload
from cargohold.units import NUMBER, SIZE_UNITS, format_count, is_positive_int, is_positive_number, parse_bytes

DEFAULT_BYTES_PER_S: Final[Mapping[str, float]] = MappingProxyType({HOST: 20e9, DISK: 3e9})
"""About the bandwidth of a PCIe 4.0 link with 16 lanes, and of an NVMe drive."""
_MAX_BYTES_PER_TOKEN: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Bytes and times. Raises ``ConfigError`` for impossible values.

    Attributes:
        bytes_per_token: bytes of KV per token; ``None`` if not known.
        prefill_tokens_per_s: prompt tokens that the accelerator computes per second; ``None`` if not known.
        bytes_per_s: bandwidth of loads, by tier.
    """

    bytes_per_token: int | None = None
    prefill_tokens_per_s: float | None = None
    bytes_per_s: Mapping[str, float] = field(default_factory=lambda: DEFAULT_BYTES_PER_S)

    def __post_init__(self) -> None:
        per_token = self.bytes_per_token
        if per_token is not None and not (is_positive_int(per_token) and per_token <= _MAX_BYTES_PER_TOKEN):
            raise ConfigError("bytes_per_token", per_token, f"it must be an integer from 1 to {_MAX_BYTES_PER_TOKEN}")
        rate = self.prefill_tokens_per_s
        if rate is not None and not is_positive_number(rate):
            raise ConfigError("prefill_tokens_per_s", rate, "it must be a number above 0")
        for tier, bandwidth in self.bytes_per_s.items():
            if not is_positive_number(bandwidth):
                raise ConfigError(f"{tier}_bytes_per_s", bandwidth, "it must be a number above 0")

    def chunk_bytes(self, chunk_tokens: int | None) -> int | None:
        """Bytes of a chunk, ``None`` if not known."""
        return None if self.bytes_per_token is None or chunk_tokens is None else self.bytes_per_token * chunk_tokens

    def saved_s(self, result: ReplayResult, chunk_tokens: int | None) -> float | None:
        """Seconds of prefill that hits saved, less the time of loads; negative if computing would have been faster.

        ``None`` if bytes per token, tokens per chunk or the prefill rate are not known.
        """
        chunk_bytes = self.chunk_bytes(chunk_tokens)
        if self.prefill_tokens_per_s is None or chunk_bytes is None or result.num_hit_tokens is None:
            return None
        loaded = {tier.name: tier.loaded for tier in result.tiers} or {HOST: result.num_prefix_hits}
        load_s = sum(chunks * chunk_bytes / self.bytes_per_s[tier] for tier, chunks in loaded.items())
        return result.num_hit_tokens / self.prefill_tokens_per_s - load_s

    def break_even_tokens_per_s(self, tier: str) -> float | None:
        """The prefill rate above which computing a token is faster than loading it from a tier."""
        return None if self.bytes_per_token is None else self.bytes_per_s[tier] / self.bytes_per_token


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
