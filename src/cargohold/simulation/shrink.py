"""Shortens a run that fails to one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cargohold.simulation.run import Run
from cargohold.simulation.scenario import Scenario

MAX_RUNS = 300
"""Most runs to spend: a run that does not settle takes seconds."""


def fails(scenario: Scenario) -> bool:
    """Whether a run of ``scenario`` fails."""
    return Run(scenario).play().error is not None


class Shrinker:
    """Makes a failing scenario smaller: takes its shortest failing beginning, and leaves out whatever it fails without.

    The smaller scenario may fail for another reason than the whole: that is a failure as well.

    Args:
        is_failing: tells whether a scenario fails; by default, by playing it.
        max_runs: most runs to spend.
        on_run: called after each run, for progress.
    """

    def __init__(
        self,
        is_failing: Callable[[Scenario], bool] = fails,
        max_runs: int = MAX_RUNS,
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_failing = is_failing
        self._num_left = max_runs
        self._on_run = on_run

    def shrink(self, scenario: Scenario) -> Scenario:
        """The smallest failing scenario found; ``scenario`` itself, which must fail, if there is none."""
        for length in range(1, len(scenario.actions)):
            beginning = scenario.truncated(length)
            if self._fails(beginning):
                scenario = beginning
                break
        smaller: Scenario | None = scenario
        while smaller is not None:
            scenario = smaller
            smaller = next((less for less in _one_thing_less(scenario) if self._fails(less)), None)
        return scenario

    def _fails(self, scenario: Scenario) -> bool:
        if self._num_left <= 0:
            return False
        self._num_left -= 1
        self._on_run()
        return self._is_failing(scenario)


def _one_thing_less(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one fault, one action or one worker less."""
    for fault in scenario.rates:
        yield replace(scenario, rates={other: rate for other, rate in scenario.rates.items() if other is not fault})
    if len(scenario.actions) > 1:
        for at in range(len(scenario.actions)):
            yield scenario.without(at)
    if scenario.shape.world_size > 1:
        yield replace(scenario, shape=replace(scenario.shape, world_size=scenario.shape.world_size - 1))
