"""How fast the engine computes, judged by its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cargohold.offload.tiering import Pace
from cargohold.protocol import Clock, StepView

MAX_AGE_S: Final = 300.0
"""The machine does not change; what it is used for may."""
_KEEP: Final = 0.8
"""Weight that the past keeps with each new measurement."""
_REACH: Final = 4
"""Nothing is said of steps so many times larger than any that was measured."""


@dataclass(slots=True)
class _Steps:
    """Steps of similar size.

    Attributes:
        num_tokens, seconds: averages, the latest counting most.
        noted_at: when the last one was measured.
    """

    num_tokens: float
    seconds: float
    noted_at: float


class StepPace:
    """Measures steps from the moment their work is handed out to the moment their report is in.

    Sizes are told apart by powers of two: a long answer is hundreds of steps of one token, which say nothing of how long a
    prompt takes, and must not make what was known of that forgotten.

    Args:
        clock: monotonic time in seconds.
        max_step_tokens: tokens that one step computes at most.
    """

    def __init__(self, clock: Clock, max_step_tokens: int) -> None:
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._measured: dict[int, _Steps] = {}
        self._begun: tuple[int, float] | None = None

    def begin(self, step: StepView) -> None:
        """The workers are about to get a step."""
        num_tokens = sum(share.num_scheduled_tokens for share in step.scheduled)
        self._begun = (num_tokens, self._clock()) if num_tokens else None

    def end(self) -> None:
        """They have reported."""
        if self._begun is None:
            return
        (num_tokens, since), now = self._begun, self._clock()
        self._begun = None
        steps = self._measured.get(num_tokens.bit_length())
        if steps is None or now - steps.noted_at > MAX_AGE_S:
            self._measured[num_tokens.bit_length()] = _Steps(num_tokens, now - since, now)
            return
        steps.num_tokens += (1 - _KEEP) * (num_tokens - steps.num_tokens)
        steps.seconds += (1 - _KEEP) * (now - since - steps.seconds)
        steps.noted_at = now

    def predict(self, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens; ``None`` if that is not known."""
        now = self._clock()
        fresh = [steps for steps in self._measured.values() if now - steps.noted_at <= MAX_AGE_S]
        largest = max((steps.num_tokens for steps in fresh), default=0.0)
        if largest * _REACH < min(num_tokens, self._max_step_tokens):
            return None
        pace = Pace(self._clock, MAX_AGE_S)
        for steps in sorted(fresh, key=lambda steps: steps.num_tokens):
            pace.note(steps.num_tokens, steps.seconds)
        return pace.predict(num_tokens, times=-(-num_tokens // self._max_step_tokens))
