"""How long computing would take, from steps that were measured."""

from __future__ import annotations

import pytest

from cargohold.connector.offloading.pacing import MAX_AGE_S, StepPace
from cargohold.engine.core.step import ScheduledTokens, SchedulerStep
from cargohold.simulation.clock import VirtualClock

STEP_TOKENS = 512


class Engine:
    """Takes 50 ms a step and 1 ms a token."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pace = StepPace(self.clock, STEP_TOKENS)

    def compute(self, num_tokens: int) -> None:
        share = ScheduledTokens("r", (0,) * num_tokens, 0, 0, ((),), None)
        self.pace.begin(SchedulerStep(scheduled=(share,)))
        self.clock.advance(0.05 + 0.001 * num_tokens)
        self.pace.end()


def test_nothing_is_known_of_prompts_from_steps_of_one_token() -> None:
    """Found with the demo, whose second run computed what the disk had: a prompt was taken for one step of 56 ms."""
    engine = Engine()
    engine.compute(1)
    assert engine.pace.predict(1_800) is None
    assert engine.pace.predict(2) == pytest.approx(0.05, rel=0.1)


def test_a_long_answer_does_not_make_forgotten_how_long_prompts_take() -> None:
    engine = Engine()
    engine.compute(400)
    for _ in range(1_000):
        engine.compute(1)
    assert engine.pace.predict(1_800) == pytest.approx(4 * 0.05 + 1.8, rel=0.01)


def test_what_was_measured_long_ago_says_nothing() -> None:
    engine = Engine()
    engine.compute(400)
    assert engine.pace.predict(1_800) is not None
    engine.clock.advance(MAX_AGE_S + 1)
    assert engine.pace.predict(1_800) is None
    engine.compute(300)
    assert engine.pace.predict(100) is not None, "of smaller ones, at least that they do not take longer"


def test_a_step_without_tokens_is_not_measured() -> None:
    engine = Engine()
    engine.pace.begin(SchedulerStep())
    engine.clock.advance(1)
    engine.pace.end()
    assert engine.pace.predict(1) is None
