"""Bugs that simulations have found, each with the seed that found it. What a seed plays changes when the code that draws
scenarios changes; where that matters, the scene is also written out."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from cargohold.engine.core.config import LoadFailurePolicy
from cargohold.engine.core.waiting_queue import QueuePolicy
from cargohold.simulation.connectors import ConnectorPlan, TierPlan
from cargohold.simulation.layouts import GroupPlan
from cargohold.simulation.links import LinkProfile
from cargohold.simulation.run import Run
from cargohold.simulation.scenario import Scenario, Shape, draw_scenario
from cargohold.simulation.traffic import Ask

FOUND = {
    137: "events of a tier that had been turned off were missed after a restart of the process (harness)",
    608: "two requests loaded and lost their blocks in turns for ever",
    645: "locks asked for in the step in which a worker's connector raised were lost, before all copies had stopped (harness)",
}

SCHEDULER = MappingProxyType(
    {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 5,
        "policy": QueuePolicy.FCFS,
        "prefix_caching": False,
        "load_failure_policy": LoadFailurePolicy.RECOMPUTE,
        "emit_events": True,
    }
)


@pytest.mark.parametrize("seed", FOUND)
def test_found_bugs_stay_away(seed: int) -> None:
    result = Run(draw_scenario(seed), inspect_every=1).play()
    assert result.error is None, FOUND[seed]


@pytest.mark.parametrize("gap_s", [0.0, 0.02, 0.04, 0.06])
def test_requests_do_not_take_turns_in_loading_and_losing_their_blocks(gap_s: float) -> None:
    # Either request fits alone into 12 blocks, not both. The tier has 4 chunks of their stem, and a load of those takes
    # longer than computing up to the end of what fits beside the other's.
    stem = tuple(range(32))
    asks = (
        Ask(0.0, "first", stem[:17], 1),
        Ask(0.3, "a", (*stem, *[500] * 8), 1),
        Ask(0.3 + gap_s, "b", (*stem, 600, 600), 11),
    )
    shape = Shape((GroupPlan(),), 13, 1, SCHEDULER, LinkProfile(latency_s=0.03, block_s=0.01))
    connector = ConnectorPlan("eager", (TierPlan(4, None, {"policy": "fifo"}),))
    result = Run(Scenario(1, "by hand", shape, connector, {}, 0.0, asks)).play()
    assert result.error is None
    assert result.num_steps < 200
