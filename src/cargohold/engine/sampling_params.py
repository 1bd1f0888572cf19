"""How a request's tokens are chosen, and when generation stops."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.errors import ConfigError
from cargohold.option_values import is_int, is_number, is_positive_int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when to stop. Checked when made; raises ``ConfigError`` naming the field.

    Attributes:
        max_tokens: stop after so many generated tokens.
        temperature: 0 takes the likeliest token (greedy); higher is more random.
        top_k: sample among the ``top_k`` likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens that together have this probability; 1 for all. In ``(0, 1]``.
        seed: makes sampling repeatable: the same request with the same seed gives the same tokens, whatever it is batched
            with and whether or not it was preempted. ``None`` draws a seed.
        stop: stop when the text contains one of these strings; the text ends before it. One that is a special token of the
            model, such as ``<|im_end|>``, stops at that token.
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
        self._freeze_stops()
        self._require("max_tokens", is_positive_int(self.max_tokens), "an integer from 1")
        # At most the largest float, for temperatures reach workers as floats: an integer may be larger.
        is_temperature = is_number(self.temperature) and 0 <= self.temperature <= sys.float_info.max
        self._require("temperature", is_temperature, "a number from 0 (greedy)")
        is_count = is_int(self.top_k) and 0 <= self.top_k < 2**63
        self._require("top_k", is_count, "an integer from 1, or 0 for all tokens")
        self._require("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        self._require(
            "seed",
            self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**63),
            "an integer from 0 to 2**63 - 1, or None",
        )
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        if self.temperature == 0:
            # Greedy decoding ignores top_k and top_p: a user who sets them with temperature 0 has misunderstood something.
            self._require("top_k", self.top_k in (0, 1), "left out of greedy decoding; or set temperature above 0")
            self._require("top_p", self.top_p == 1, "left out of greedy decoding; or set temperature above 0")
        self._make_plain()

    def _freeze_stops(self) -> None:
        """Turn ``stop`` and ``stop_token_ids`` into tuples: users may give one string, lists or sets."""
        stop = (self.stop,) if isinstance(self.stop, str) else _items(self.stop)
        self._require("stop", stop is not None and all(isinstance(text, str) and text for text in stop), _STRINGS)
        token_ids = _items(self.stop_token_ids)
        self._require(
            "stop_token_ids",
            token_ids is not None and all(is_int(token_id) and token_id >= 0 for token_id in token_ids),
            "a list of integers from 0",
        )
        assert stop is not None and token_ids is not None
        object.__setattr__(self, "stop", tuple(str.__str__(text) for text in stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, token_ids)))

    def _make_plain(self) -> None:
        """Make all numbers plain ones: subclasses, such as numpy's, cannot be sent to workers, nor temperatures of 2**64."""
        for field, kind in (("max_tokens", int), ("temperature", float), ("top_k", int), ("top_p", float)):
            object.__setattr__(self, field, kind(getattr(self, field)))
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(field, getattr(self, field), f"it must be {expected}")


_STRINGS = "a string or a list of strings, none of them empty"


def _items(value: object) -> tuple[Any, ...] | None:
    """The items of a list, tuple or set; ``None`` for anything else, also for strings and ``bytes``."""
    return (
        tuple(value) if isinstance(value, Sequence | frozenset | set) and not isinstance(value, str | bytes) else None
    )
