"""How fast the engine computes, judged by its steps."""

from __future__ import annotations

from cargohold.offload.tiering import Pace
from cargohold.protocol import Clock, StepView

MAX_AGE_S = 300.0
"""The machine does not change; what it is used for may."""


class StepPace:
    """Measures steps from the moment their work is handed out to the moment their report is in.

    Args:
        clock: monotonic time in seconds.
        max_step_tokens: tokens that one step computes at most.
    """

    def __init__(self, clock: Clock, max_step_tokens: int) -> None:
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._pace = Pace(clock, MAX_AGE_S)
        self._begun: tuple[int, float] | None = None

    def begin(self, step: StepView) -> None:
        """The workers are about to get a step."""
        num_tokens = sum(share.num_scheduled_tokens for share in step.scheduled)
        self._begun = (num_tokens, self._clock()) if num_tokens else None

    def end(self) -> None:
        """They have reported."""
        if self._begun is not None:
            num_tokens, since = self._begun
            self._begun = None
            self._pace.note(num_tokens, self._clock() - since)

    def predict(self, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens; ``None`` if that is not known."""
        return self._pace.predict(num_tokens, times=-(-num_tokens // self._max_step_tokens))
