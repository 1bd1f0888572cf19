"""How long things take, from recent measurements: anything whose amount can be counted, and steps of the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from cargohold.protocol import Clock, StepView, Tally, metrics

_KEEP: Final = 0.8
"""Weight that earlier measurements keep with each new one."""


class Pace:
    """Fits ``seconds = fixed + each * amount`` to recent measurements, the latest counting most.

    While only one amount was measured, all of the time counts as fixed. The estimate for larger amounts is then too low, so
    that larger amounts are tried, and measured.

    Args:
        clock: monotonic time in seconds.
        max_age_s: time without a measurement after which nothing is predicted any more.
        least_weight: the least that a measurement counts, from 0 to 1, if it took longer than expected. Below 1, one that took
            twice as long counts half: other work on the machine only ever adds time.
    """

    def __init__(self, clock: Clock, max_age_s: float, least_weight: float = 1.0) -> None:
        self._clock = clock
        self._max_age_s = max_age_s
        self._least_weight = least_weight
        self._noted_at = 0.0
        # Weighted sums over measurements: of 1, amount, seconds, amount², amount·seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement: ``amount`` took ``seconds``."""
        expected_s = self.predict(amount) or seconds
        counts = 1.0 if seconds <= expected_s else max(self._least_weight, expected_s / seconds)
        fresh = (counts, counts * amount, counts * seconds, counts * amount * amount, counts * amount * seconds)
        keep = _KEEP if self._is_known() else 0.0
        weight, x, y, xx, xy = (keep * old + new for old, new in zip(self._sums, fresh, strict=True))
        self._sums = (weight, x, y, xx, xy)
        self._noted_at = self._clock()

    def predict(self, amount: float, times: int = 1) -> float | None:
        """Return the seconds that ``amount`` in all takes, done in ``times`` parts; ``None`` if nothing is known."""
        if not self._is_known():
            return None
        fixed, each = self._fit()
        return fixed * times + each * amount

    def amount_in(self, seconds: float) -> float | None:
        """Return the largest amount that takes no longer than ``seconds``, which may be infinite; ``None`` if not known."""
        if not self._is_known():
            return None
        fixed, each = self._fit()
        if fixed > seconds:
            return 0.0
        return (seconds - fixed) / each if each else float("inf")

    def _is_known(self) -> bool:
        return self._sums[0] > 0 and self._clock() - self._noted_at <= self._max_age_s

    def _fit(self) -> tuple[float, float]:
        weight, x, y, xx, xy = self._sums
        spread = xx - x * x / weight
        each = max(0.0, (xy - x * y / weight) / spread) if spread > 1e-9 * xx else 0.0
        fixed = (y - each * x) / weight
        if fixed < 0:
            # The time is proportional to the amount, with some noise.
            return 0.0, xy / xx
        return fixed, each


# --- steps of the engine ----------------------------------------------------------------------------------------------

MAX_AGE_S: Final = 300.0
"""Age in seconds after which a measurement does not count: the machine does not change, but its use may."""
REACH: Final = 4
"""Steps more than this many times larger than the largest measured one are not predicted."""
_MOST_STEPS: Final = 16
"""Maximum number of steps in flight: more than any engine has."""
_PROMPT_TOKENS: Final = 32
"""A request that computes so many tokens in a step computes its prompt: generating takes one, or some with speculation."""


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
        self.max_step_tokens = max_step_tokens
        self._measured: dict[int, _Steps] = {}
        # Tokens of each step in flight, of them those of prompts, and the time at which it was handed out; oldest first.
        self._begun: deque[tuple[int, int, float]] = deque(maxlen=_MOST_STEPS)
        self._ended_at = clock()

    @property
    def num_sizes(self) -> int:
        """Number of sizes of which a step was measured so far; when it grows, more can be predicted."""
        return len(self._measured)

    def begin(self, step: StepView) -> None:
        """Note that a step is handed out to the workers now."""
        shares = step.num_scheduled_tokens.values()
        num_tokens, num_prompt_tokens = sum(shares), 0
        # While all requests only generate, there is nothing to count.
        if num_tokens >= len(shares) + _PROMPT_TOKENS - 1:
            num_prompt_tokens = sum([count for count in shares if count >= _PROMPT_TOKENS])
        self._begun.append((num_tokens, num_prompt_tokens, self._clock()))

    def end(self, stats: Tally) -> None:
        """Note that the workers have reported the oldest step in flight, and measure it.

        Counts in ``stats`` the steps that mostly compute prompts: their tokens of prompts, and how long they took.
        """
        if not self._begun:
            return
        (num_tokens, num_prompt_tokens, since), now = self._begun.popleft(), self._clock()
        since, self._ended_at = max(since, self._ended_at), now
        if 2 * num_prompt_tokens > num_tokens:
            stats[metrics.PREFILL_TOKENS.of()] += num_prompt_tokens
            stats[metrics.PREFILL_SECONDS.of()] += now - since
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
        if largest * REACH < min(num_tokens, self.max_step_tokens):
            return None
        pace = Pace(self._clock, MAX_AGE_S)
        for steps in sorted(fresh, key=lambda steps: steps.num_tokens):
            pace.note(steps.num_tokens, steps.seconds)
        return pace.predict(num_tokens, times=-(-num_tokens // self.max_step_tokens))
