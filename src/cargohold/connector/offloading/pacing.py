"""Measures how fast the engine computes, by its steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from cargohold.offload.tiering import Pace
from cargohold.protocol import Clock, StepView

MAX_AGE_S: Final = 300.0
"""Age in seconds after which a measurement does not count: the machine does not change, but its use may."""
_KEEP: Final = 0.8
"""Weight that earlier measurements keep with each new one."""
REACH: Final = 4
"""Steps more than this many times larger than the largest measured one are not predicted."""
_MOST_STEPS: Final = 16
"""Maximum number of steps in flight: more than any engine has."""


@dataclass(slots=True)
class _Steps:
    """Measurements of steps of similar size.

    Attributes:
        num_tokens, seconds: averages over the steps, the latest counting most.
        noted_at: time at which the last one was measured.
    """

    num_tokens: float
    seconds: float
    noted_at: float


class StepPace:
    """Measures each step from handing out its work until its report arrives, and predicts compute times from that.

    A step may be handed out before the previous one has ended: then it is measured from the end of the previous one.

    Steps are averaged separately per size, in powers of two: a long answer is hundreds of steps of one token, which say
    nothing about how long a prompt takes, and must not displace what is known about prompts.

    Args:
        clock: monotonic time in seconds.
        max_step_tokens: maximum number of tokens that one step computes.
    """

    def __init__(self, clock: Clock, max_step_tokens: int) -> None:
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._measured: dict[int, _Steps] = {}
        # Tokens of each step in flight, and the time at which it was handed out; oldest first.
        self._begun: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)
        self._ended_at = clock()

    @property
    def num_sizes(self) -> int:
        """Number of sizes of which a step was measured so far; when it grows, more can be predicted."""
        return len(self._measured)

    def begin(self, step: StepView) -> None:
        """Note that a step is handed out to the workers now."""
        self._begun.append((sum(share.num_scheduled_tokens for share in step.scheduled), self._clock()))

    def end(self) -> None:
        """Note that the workers have reported the oldest step in flight, and measure it."""
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
        """Return the seconds that computing ``num_tokens`` tokens takes; ``None`` if that is not known."""
        now = self._clock()
        fresh = [steps for steps in self._measured.values() if now - steps.noted_at <= MAX_AGE_S]
        largest = max((steps.num_tokens for steps in fresh), default=0.0)
        if largest * REACH < min(num_tokens, self._max_step_tokens):
            return None
        pace = Pace(self._clock, MAX_AGE_S)
        for steps in sorted(fresh, key=lambda steps: steps.num_tokens):
            pace.note(steps.num_tokens, steps.seconds)
        return pace.predict(num_tokens, times=-(-num_tokens // self._max_step_tokens))
