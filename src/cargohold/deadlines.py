"""Deadlines of what is held for somebody: in seconds, and in steps of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

HOLD_STEPS: Final = 8
"""Steps for which something is held at least: what one step begins is reported one or two steps later."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a wait: ``at`` seconds of the engine's clock, but not before so many ``steps`` of the engine."""

    at: float
    steps: int


class HoldTime:
    """How long something is held.

    Args:
        clock: monotonic time in seconds.
        hold_s: seconds for which things are held, unless that is less than ``HOLD_STEPS`` steps.
    """

    def __init__(self, clock: Callable[[], float], hold_s: float) -> None:
        self._clock = clock
        self._hold_s = hold_s
        self._num_steps = 0

    def note_step(self) -> None:
        """Count a step. Call it once in every step."""
        self._num_steps += 1

    def deadline(self) -> Deadline:
        """Return until when something that begins now is held."""
        return Deadline(self._clock() + self._hold_s, self._num_steps + HOLD_STEPS)

    def has_passed(self, deadline: Deadline) -> bool:
        """Whether a deadline is over."""
        return self._num_steps >= deadline.steps and self._clock() >= deadline.at
