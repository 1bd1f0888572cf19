"""What hits are worth: a simple model of time. It is stated here, so that readers can judge it.

* Computing ``n`` tokens of a prompt takes ``n / prefill_tokens_per_s``. Attention makes long prompts slower than that, so for
  them the saving is underestimated.
* Loading a chunk from a tier takes its bytes over the tier's bandwidth, and overlaps with nothing: an overestimate.
* Storing costs nothing: it happens in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from cargohold.errors import ConfigError
from cargohold.replay.replaying import ReplayResult
from cargohold.replay.tiers import DISK, HOST
from cargohold.units import is_positive_int, is_positive_number

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
