"""The circuit breaker of a medium: failures in a row, cooldowns that grow, and what came too late to mean anything."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers.health import BreakerConfig, BreakerState, CircuitBreaker, TierHealth
from cargohold.tiers.port import Access


def breaker_and_clock() -> tuple[CircuitBreaker, VirtualClock]:
    clock = VirtualClock()
    return CircuitBreaker(clock, BreakerConfig(failures_to_open=3, cooldown_s=1.0, max_cooldown_s=4.0)), clock


def fail(breaker: CircuitBreaker, times: int) -> list[bool]:
    """Let jobs in at the same time and fail one after the other; which of them opened the breaker."""
    for _ in range(times):
        assert breaker.admit()
    return [breaker.note_failure() for _ in range(times)]


def test_only_failures_in_a_row_open_it() -> None:
    breaker, _ = breaker_and_clock()
    for _ in range(3):
        assert not any(fail(breaker, 2))
        assert breaker.admit()
        breaker.note_success()
    assert fail(breaker, 3) == [False, False, True]
    assert breaker.state is BreakerState.OPEN


def test_what_began_before_it_opened_neither_closes_it_nor_prolongs_its_cooldown() -> None:
    breaker, clock = breaker_and_clock()
    assert fail(breaker, 5) == [False, False, True, False, False], "it opens once"
    clock.advance(0.5)
    assert not breaker.note_failure()
    breaker.note_success()
    states = [breaker.state]
    clock.advance(0.5)
    states.append(breaker.state)
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN]


def test_a_medium_that_came_back_is_as_good_as_one_that_never_failed() -> None:
    breaker, clock = breaker_and_clock()
    fail(breaker, 3)
    for cooldown_s in (1.0, 2.0):
        clock.advance(cooldown_s)
        assert fail(breaker, 1) == [True]
    clock.advance(4.0)
    assert breaker.admit()
    breaker.note_success()
    assert not any(fail(breaker, 2)), "three failures in a row again, not one"
    assert fail(breaker, 1) == [True]
    clock.advance(1.0)
    assert breaker.state is BreakerState.HALF_OPEN, "after a short cooldown again"


def test_cooldowns_may_all_be_equally_long() -> None:
    clock = VirtualClock()
    breaker = CircuitBreaker(clock, BreakerConfig(failures_to_open=1, cooldown_s=2.0, max_cooldown_s=2.0))
    for _ in range(3):
        assert fail(breaker, 1) == [True]
        clock.advance(2.0)
        assert breaker.state is BreakerState.HALF_OPEN


STATES = st.sampled_from(list(BreakerState))
HEALTHS = st.builds(TierHealth, STATES, STATES, STATES, st.text(max_size=3), st.booleans())


@given(st.lists(HEALTHS, min_size=1, max_size=4))
def test_of_several_workers_the_worst_counts_for_each_access(healths: list[TierHealth]) -> None:
    merged = reduce(TierHealth.worse, healths)
    for access in Access:
        assert merged.of(access) is max(health.of(access) for health in healths)
    assert merged.is_off == any(health.is_off for health in healths)
    assert merged.reason in {health.reason for health in healths if health.worst is merged.worst}
