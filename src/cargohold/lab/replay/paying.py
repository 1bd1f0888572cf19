"""Does it pay? What restoring tokens saves over computing them, by three numbers: prefill, bytes per token, a link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cargohold.option_values import format_bytes

TOKENS: Final = 1000
"""Tokens that people compare times of."""


@dataclass(frozen=True, slots=True)
class Paying:
    """A model on a machine, and a tier.

    Attributes:
        prefill_tokens_per_s: prompt tokens that are computed per second.
        bytes_per_token: bytes of KV per token.
        bytes_per_s: what the way from the tier to the device carries.
    """

    prefill_tokens_per_s: float
    bytes_per_token: int
    bytes_per_s: float

    @property
    def compute_s(self) -> float:
        return TOKENS / self.prefill_tokens_per_s

    @property
    def load_s(self) -> float:
        return TOKENS * self.bytes_per_token / self.bytes_per_s

    @property
    def saved_s(self) -> float:
        """Seconds that loading saves; negative if computing is faster."""
        return self.compute_s - self.load_s

    @property
    def break_even_tokens_per_s(self) -> float:
        """The prefill rate above which loading no longer pays."""
        return self.bytes_per_s / self.bytes_per_token

    def describe(self, tier: str) -> str:
        """What it means, in a sentence."""
        times = f"loading {TOKENS:,} tokens from {tier} takes {format_s(self.load_s)}"
        if self.saved_s <= 0:
            return f"{times}, longer than computing them: it does not pay"
        limit = f"it pays up to a prefill of {self.break_even_tokens_per_s:,.0f} tokens/s"
        return f"{times} and saves {format_s(self.saved_s)}; {limit}"


def tokens_per_gib(bytes_per_token: int) -> int:
    """Tokens whose KV a GiB holds."""
    return (1 << 30) // bytes_per_token


def describe_size(bytes_per_token: int) -> str:
    """The size of KV, for people."""
    return f"{format_bytes(bytes_per_token)} per token: a GiB holds {tokens_per_gib(bytes_per_token):,} tokens"


def format_s(seconds: float) -> str:
    """A time for people: ``2.3 s``, ``13 ms``, ``0.4 ms``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
