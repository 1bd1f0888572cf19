"""Patience: what does not end is told from what ended while nobody looked."""

from __future__ import annotations

from cargohold.deadlines import MAX_GRACE_S, MIN_LOOKS, Patience


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_patience_ends_when_the_same_is_overdue_for_several_looks_and_a_while() -> None:
    clock = Clock()
    patience = Patience(clock)
    assert not any(patience.has_run_out("job", 120) for _ in range(100)), "no time has passed"
    clock.now += MAX_GRACE_S
    assert patience.has_run_out("job", 120)
    assert patience.has_run_out("job", 120)


def test_who_was_away_looks_several_times() -> None:
    clock = Clock()
    patience = Patience(clock)
    looks = []
    for _ in range(MIN_LOOKS):
        clock.now += 1000
        looks.append(patience.has_run_out("job", 120))
    assert looks == [False] * (MIN_LOOKS - 1) + [True]


def test_something_else_that_is_overdue_has_patience_of_its_own() -> None:
    clock = Clock()
    patience = Patience(clock)
    for what in ("job", None, "job", "other", "job", "other"):
        clock.now += 1000
        assert not patience.has_run_out(what, 120)


def test_a_short_limit_has_a_short_while() -> None:
    clock = Clock()
    patience = Patience(clock)
    looks = []
    for _ in range(MIN_LOOKS):
        looks.append(patience.has_run_out("job", 1.0))
        clock.now += 0.04
    assert looks[-1]
