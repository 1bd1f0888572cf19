"""What is computed from times holds for any of them: zero, tiny, huge, infinite, past, and not known."""

from __future__ import annotations

from math import isfinite

from hypothesis import given
from hypothesis import strategies as st

from cargohold.deadlines import Patience
from cargohold.engine.core.request import ScheduledTokens, SchedulerStep
from cargohold.lab.simulation import VirtualClock
from cargohold.pace import Pace, StepPace
from cargohold.protocol import Tally
from cargohold.tiers.health import BreakerConfig, BreakerState, CircuitBreaker
from cargohold.tiers.scheduler_side import TieringConfig, TierOptions
from cargohold.tiers.scheduler_side.tier_state import TierState
from cargohold.tiers.scheduler_side.writing import Allowance

SECONDS = st.one_of(st.sampled_from([0.0, 5e-324, 1e-9, 1e9]), st.floats(0, 1e9))
"""Durations."""
LIMITS = st.one_of(SECONDS, SECONDS.map(lambda seconds: -seconds), st.just(float("inf")))
"""Times left, which may have passed."""
AMOUNTS = st.integers(0, 2**40)
MEASUREMENTS = st.lists(st.tuples(AMOUNTS, SECONDS, SECONDS), max_size=8)
"""Amounts, what they took, and the pause after each."""


def measured(measurements: list[tuple[int, float, float]]) -> Pace:
    clock = VirtualClock()
    pace = Pace(clock, max_age_s=300.0)
    for amount, seconds, pause_s in measurements:
        pace.note(amount, seconds)
        clock.advance(pause_s)
    return pace


@given(MEASUREMENTS, AMOUNTS, st.integers(0, 100))
def test_a_predicted_time_is_finite_and_never_negative(
    measurements: list[tuple[int, float, float]], amount: int, times: int
) -> None:
    predicted = measured(measurements).predict(amount, times)
    assert predicted is None or (isfinite(predicted) and predicted >= 0)


@given(MEASUREMENTS, LIMITS)
def test_the_amount_that_comes_within_a_time_is_never_negative(
    measurements: list[tuple[int, float, float]], limit_s: float
) -> None:
    amount = measured(measurements).amount_in(limit_s)
    assert amount is None or amount >= 0
    if amount is not None and limit_s < 0:
        assert amount == 0


@given(MEASUREMENTS, AMOUNTS, AMOUNTS, LIMITS, st.floats(0, 1))
def test_a_look_up_asks_for_no_more_than_it_wants_and_is_expected_to_take_a_time(
    measurements: list[tuple[int, float, float]], num_chunks: int, num_found: int, within_s: float, part: float
) -> None:
    clock = VirtualClock()
    tier = TierState(TierOptions(name="bucket", num_asked_at_once=4), 100, clock, TieringConfig())
    for amount, seconds, pause_s in measurements:
        tier.look_up_pace.note(amount, seconds)
        clock.advance(min(pause_s, 1.0))
    assert 0 <= tier.num_to_ask(num_chunks, num_found, within_s) <= num_chunks
    expected_s = tier.look_up_s(num_chunks, num_found, part)
    assert expected_s is None or (isfinite(expected_s) and expected_s >= 0)


@given(st.lists(st.tuples(st.integers(0, 600), SECONDS, SECONDS), max_size=8), st.integers(0, 10**6))
def test_the_time_that_computing_takes_is_finite_and_never_negative(
    steps: list[tuple[int, float, float]], num_tokens: int
) -> None:
    clock = VirtualClock()
    pace = StepPace(clock, max_step_tokens=512)
    for num_scheduled, seconds, pause_s in steps:
        share = ScheduledTokens("r", (0,) * num_scheduled, 0, 0, ((),), None)
        pace.begin(SchedulerStep(scheduled=(share,) if num_scheduled else ()))
        clock.advance(seconds)
        pace.end(Tally())
        clock.advance(pause_s)
    predicted = pace.predict(num_tokens)
    assert predicted is None or (isfinite(predicted) and predicted >= 0)


@given(st.integers(0, 10**12), st.lists(st.tuples(SECONDS, st.integers(0, 1000)), max_size=8))
def test_an_allowance_is_never_exceeded_by_what_is_spent_of_it(per_day: int, uses: list[tuple[float, int]]) -> None:
    clock = VirtualClock()
    allowance = Allowance(per_day, clock)
    num_spent = 0
    for pause_s, wanted in uses:
        clock.advance(pause_s)
        available = allowance.available
        assert available >= 0
        num = min(wanted, available)
        allowance.spend(num)
        num_spent += num
    accrued = per_day * (clock.now + 60) / 86_400
    assert num_spent <= max(1.0, accrued) + 1 + 1e-6 * accrued


@given(st.lists(st.tuples(st.sampled_from(["admit", "fail", "succeed", "cancel"]), SECONDS), max_size=30))
def test_a_breaker_lets_jobs_through_only_as_its_state_says_though_time_passes_before_every_reading(
    moves: list[tuple[str, float]],
) -> None:
    clock = VirtualClock()
    breaker = CircuitBreaker(clock, BreakerConfig())
    pauses = iter([seconds for _, seconds in moves] * 9)
    clock.before_reading = lambda: min(next(pauses, 0.0), 100.0)
    for move, _ in moves:
        match move:
            case "admit":
                assert breaker.admit() <= (breaker.state is not BreakerState.OPEN)
            case "fail":
                breaker.note_failure()
            case "succeed":
                breaker.note_success()
            case "cancel":
                breaker.note_cancelled()
    clock.advance(BreakerConfig().max_cooldown_s)
    breaker.note_cancelled()
    assert breaker.admit(), "it lets a trial through once it has cooled down"


@given(st.lists(SECONDS, max_size=12), SECONDS)
def test_patience_runs_out_at_several_looks_only(pauses: list[float], limit_s: float) -> None:
    clock = VirtualClock()
    patience = Patience(clock)
    for at, pause_s in enumerate(pauses):
        assert not patience.has_run_out("job", limit_s) or at >= 3
        clock.advance(pause_s)
