"""How fast the engine computes, judged by its steps."""

from __future__ import annotations

from collections import deque
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
_MOST_STEPS: Final = 16
"""Steps under way at most: more than any engine has."""


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

    A step may be handed out before the last one has ended: then it is measured from that end on.

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
        # Tokens of the steps that have not ended, and when they were handed out; oldest first.
        self._begun: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)
        self._ended_at = clock()

    def begin(self, step: StepView) -> None:
        """The workers are about to get a step."""
        self._begun.append((sum(share.num_scheduled_tokens for share in step.scheduled), self._clock()))

    def end(self) -> None:
        """They have reported the oldest step that has not ended."""
        if not self._begun:
            return
        (num_tokens, since), now = self._begun.popleft(), self._clock()
        since, self._ended_at = max(since, self._ended_at), now
        if not num_tokens:
            return
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
