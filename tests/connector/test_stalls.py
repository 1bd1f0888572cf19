"""Time passes between two readings of the clock in one call: no connector may take both for the same time."""

from __future__ import annotations

import pytest

from cargohold.connector.config import RESTORE_ALWAYS, RESTORE_IF_FASTER
from cargohold.lab.simulation import SimulatedEngine, VirtualClock, simulated_layout
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import alone, prompt
from tests.held_tiers import SimulatedTiering

TIMEOUT_S = 0.5
TIERS = {
    "disk": [TierOptions(name="disk")],
    "bucket": [TierOptions(name="bucket", has_index=False, num_asked_at_once=2)],
    "both": [TierOptions(name="disk"), TierOptions(name="bucket", has_index=False)],
}
QUICK = {"disk": RESTORE_ALWAYS, "bucket": RESTORE_IF_FASTER}
"""How the quick tests restore from them; from both at once in the long tests."""


class Stall:
    """Lets time pass before one reading of a clock: the ``at``-th, counted from 0."""

    def __init__(self, at: int, seconds: float) -> None:
        self.num_readings = 0
        self._at = at
        self._seconds = seconds

    def __call__(self) -> float:
        self.num_readings += 1
        return self._seconds if self.num_readings == self._at + 1 else 0.0


def restore(tiering: SimulatedTiering, stall: Stall) -> SimulatedEngine:
    """Serve two requests, of which lower tiers have the prompts, in a new engine whose clock stalls once."""
    clock = VirtualClock()
    engine = SimulatedEngine(simulated_layout(60), tiering, clock=clock)
    clock.before_reading = stall
    for name, tokens in (("a", prompt(0, 33)), ("b", prompt(1, 17))):
        engine.add(name, tokens, 2)
    engine.run()
    return engine


@pytest.mark.parametrize(
    ("tiers", "restore_option"),
    [
        pytest.param(tiers, option, marks=() if option == QUICK.get(tiers) else pytest.mark.long)
        for tiers in TIERS
        for option in (RESTORE_ALWAYS, RESTORE_IF_FASTER)
    ],
)
def test_a_stall_past_the_deadline_before_any_reading_of_the_clock_costs_a_miss_at_most(
    tiers: str, restore_option: str
) -> None:
    tiering = SimulatedTiering(40, tiers=TIERS[tiers], restore=restore_option, restore_timeout_s=TIMEOUT_S)
    restore(tiering, Stall(-1, 0.0))  # writes the prompts down
    control = restore(tiering, count := Stall(-1, 0.0))
    assert control.outputs["a"].cache_report.restored_tokens, "else nothing is tried here"
    for at in range(count.num_readings):
        engine = restore(tiering, Stall(at, 2 * TIMEOUT_S))
        assert engine.scheduler.connector.broken is None, f"stalled before reading {at}"
        assert [engine.tokens(name) for name in "ab"] == [alone(prompt(0, 33), 2), alone(prompt(1, 17), 2)]
