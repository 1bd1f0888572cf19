"""Runs of some hundred seeds: real scheduler, connectors, managers and policies under faults, with every oracle watching."""

from __future__ import annotations

from zlib import crc32

import pytest

from cargohold.simulation.connectors import CONNECTORS
from cargohold.simulation.faults import Fault
from cargohold.simulation.run import Run
from cargohold.simulation.scenario import draw_scenario
from cargohold.simulation.traffic import Ask
from cargohold.simulation.workloads import WORKLOADS


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_goes_wrong_whatever_goes_wrong(workload: str, connector: str) -> None:
    first = crc32(f"{workload} {connector}".encode()) % 100_000
    for seed in range(first, first + 2):
        result = Run(draw_scenario(seed, workload, connector)).play()
        assert result.error is None, f"--replay {seed} --workload {workload} --connector {connector}: {result.error}"
        assert result.num_steps > 0


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_strikes_and_does_no_harm(fault: Fault) -> None:
    connector = "tiered" if fault is Fault.HANGS else "eager"
    num_struck = num_restarts = 0
    for seed in range(1000):
        result = Run(draw_scenario(seed, "shared-prefix", connector, [fault])).play()
        assert result.error is None, f"--replay {seed} --workload shared-prefix --connector {connector}: {result.error}"
        num_struck += result.struck[fault]
        num_restarts += result.tallies["restarts"]
        if num_struck or num_restarts:
            return
    raise AssertionError("it never strikes")


def test_requests_that_are_asked_again_after_a_restart_are_counted_once() -> None:
    num_restarts = 0
    for seed in range(30):
        scenario = draw_scenario(seed, "shared-prefix", "eager", [Fault.RESTART])
        tallies = Run(scenario).play().tallies
        assert tallies["requests"] == sum(isinstance(action, Ask) for action in scenario.actions)
        num_restarts += tallies["restarts"]
    assert num_restarts > 0


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = (Run(draw_scenario(7)).play() for _ in range(2))
    assert first == second
