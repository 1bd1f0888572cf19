"""Oracle: a connector is turned off only if a fault broke a rule."""

from __future__ import annotations

from collections.abc import Callable

from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.simulation.inside import guards_of
from cargohold.simulation.oracles.base import Oracle
from cargohold.simulation.replica import Replica


class ContainmentOracle(Oracle):
    """Checks that no connector was turned off for breaking a rule, unless a fault may have made it do so.

    Args:
        engine: the replica.
        is_excused: whether a fault has struck that breaks a rule.
    """

    name = "containment"

    def __init__(self, engine: Replica, is_excused: Callable[[], bool]) -> None:
        self._guards = guards_of(engine.scheduler.connector)
        self._is_excused = is_excused

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """No connector was turned off."""
        for guard in self._guards:
            if guard.broken is not None and not self._is_excused():
                self.require(False, f"connector {guard.name} was turned off: {guard.broken.rule}")
