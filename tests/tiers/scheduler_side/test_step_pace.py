"""How long computing would take, from steps that were measured."""

from __future__ import annotations

import pytest

from cargohold.engine.core.request import ScheduledTokens, SchedulerStep
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.pace import MAX_AGE_S, StepPace
from cargohold.protocol import Tally

STEP_TOKENS = 512


class Engine:
    """Takes 50 ms a step and 1 ms a token."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pace = StepPace(self.clock, STEP_TOKENS)

    def begin(self, num_tokens: int) -> None:
        share = ScheduledTokens("r", (0,) * num_tokens, 0, 0, ((),), None)
        self.pace.begin(SchedulerStep(scheduled=(share,) if num_tokens else ()))

    def end(self, num_tokens: int) -> None:
        self.clock.advance(0.05 + 0.001 * num_tokens)
        self.pace.end(Tally())

    def compute(self, num_tokens: int) -> None:
        self.begin(num_tokens)
        self.end(num_tokens)


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


@pytest.mark.parametrize("sizes", [(), (100, 400)])
def test_a_step_without_tokens_is_not_measured(sizes: tuple[int, ...]) -> None:
    engine = Engine()
    for num_tokens in sizes:
        engine.compute(num_tokens)
    known = engine.pace.predict(200)
    assert (known is None) is (not sizes)
    engine.pace.begin(SchedulerStep())
    engine.clock.advance(1)
    engine.pace.end(Tally())
    assert engine.pace.predict(200) == known


def test_nothing_is_said_of_steps_much_larger_than_those_that_were_measured() -> None:
    engine = Engine()
    engine.compute(100)
    assert engine.pace.predict(400) is not None
    assert engine.pace.predict(401) is None
    engine.compute(128)
    assert engine.pace.predict(100 * STEP_TOKENS) is not None, "of many of the largest, as of one"


def test_steps_of_about_one_size_count_as_what_they_are_on_the_average() -> None:
    engine = Engine()
    engine.compute(100)
    for _ in range(30):
        engine.compute(300)
        engine.compute(500)
    assert engine.pace.predict(400) == pytest.approx(0.45, rel=0.02)


def test_it_does_not_matter_which_size_was_measured_first() -> None:
    def prediction(*sizes: int) -> float | None:
        engine = Engine()
        for num_tokens in sizes:
            engine.begin(num_tokens)
            engine.clock.advance(0.3 if num_tokens == 100 else 0.0)  # so that they are on no line
            engine.end(num_tokens)
        return engine.pace.predict(300)

    assert prediction(400, 100, 200) == pytest.approx(prediction(100, 200, 400))


def test_a_step_that_is_planned_before_the_last_one_ended_is_measured_from_there() -> None:
    """Found by reading: under asynchronous scheduling a long prompt's time was taken for that of the step behind it."""
    engine = Engine()
    for at in range(20):
        engine.begin(400 if at % 10 == 0 else 1)
        if at:
            engine.end(400 if (at - 1) % 10 == 0 else 1)
    engine.end(1)
    assert engine.pace.predict(400) == pytest.approx(0.45, rel=0.01)
    assert engine.pace.predict(1) == pytest.approx(0.051, rel=0.01)


def test_time_in_which_nothing_was_planned_is_not_measured() -> None:
    engine = Engine()
    for num_tokens in (1, 0, 1):
        engine.compute(num_tokens)
        engine.pace.end(Tally())  # there is nothing that could have ended
        engine.clock.advance(60)
    assert engine.pace.predict(1) == pytest.approx(0.051, rel=0.01)


def test_what_was_measured_lately_counts_most_and_one_step_alone_not_much() -> None:
    engine = Engine()
    engine.clock.advance(2 * MAX_AGE_S)
    engine.compute(400)
    engine.begin(400)
    engine.clock.advance(0.45)
    engine.end(400)
    assert engine.pace.predict(400) == pytest.approx(0.54, rel=0.01), "it took 0.9 s this time"
    for _ in range(30):
        engine.begin(300)
        engine.clock.advance(0.35)
        engine.end(300)
    assert engine.pace.predict(300) == pytest.approx(0.7, rel=0.01)


def test_what_is_measured_again_and_again_stays_known_and_what_is_old_is_replaced() -> None:
    engine = Engine()
    for _ in range(4):
        engine.compute(400)
        engine.clock.advance(MAX_AGE_S / 2)
    assert engine.pace.predict(400) == pytest.approx(0.45, rel=0.01)
    engine.clock.advance(MAX_AGE_S)
    engine.begin(400)
    engine.clock.advance(0.45)
    engine.end(400)
    assert engine.pace.predict(400) == pytest.approx(0.9, rel=0.01)
