"""How to choose tokens, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cargohold.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of generation. Checked when it is made; raises ``ConfigError`` naming the field.

    Attributes:
        max_tokens: stop after so many generated tokens.
        temperature: 0 takes the likeliest token (greedy); higher is more random.
        top_k: sample among the ``top_k`` likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens that together have this probability; 1 for all. In ``(0, 1]``.
        seed: makes sampling repeatable: the same request with the same seed gives the same tokens, whatever it is batched
            with and whether or not it was preempted. ``None`` draws a seed.
        stop: stop when the text contains one of these strings; the text ends before it.
        stop_token_ids: stop when one of these tokens is generated; it is not part of the text.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # What people write is made immutable: one string, a list of them.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._require("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer from 1")
        self._require(
            "temperature",
            _is_number(self.temperature) and 0 <= self.temperature < math.inf,
            "a number from 0 (greedy)",
        )
        self._require("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer from 1, or 0 for all tokens")
        self._require("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        self._require(
            "seed",
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
            "an integer from 0 to 2**63 - 1",
        )
        self._require("stop", all(map(_is_text, self.stop)), "strings that are not empty")
        self._require(
            "stop_token_ids",
            all(_is_int(token_id) and token_id >= 0 for token_id in self.stop_token_ids),
            "integers from 0",
        )
        if self.temperature == 0:
            # Greedy decoding ignores these; being asked for both is a misunderstanding worth telling.
            greedy = "greedy decoding (temperature=0) makes no choice: leave it out, or set temperature above 0"
            self._require("top_k", self.top_k in (0, 1), greedy)
            self._require("top_p", self.top_p == 1, greedy)

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(field, getattr(self, field), f"it must be {expected}" if " " in expected else expected)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)
