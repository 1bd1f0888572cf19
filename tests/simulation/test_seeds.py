"""Runs of many seeds: real scheduler, connectors, managers and policies under faults, with every oracle watching."""

from __future__ import annotations

import pytest

from cargohold.simulation.run import Run
from cargohold.simulation.scenario import draw_scenario
from cargohold.simulation.workloads import WORKLOADS


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_goes_wrong_whatever_goes_wrong(workload: str) -> None:
    for seed in range(6):
        result = Run(draw_scenario(seed, workload=workload)).play()
        assert result.error is None, f"seed {seed}: {result.error}"
        assert result.num_steps > 0


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = (Run(draw_scenario(7)).play() for _ in range(2))
    assert first == second
