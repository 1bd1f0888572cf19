"""Bugs that simulations have found, each with the shortest scene that shows it. What a seed plays changes whenever the code
that draws scenarios changes, so scenes are written out."""

from __future__ import annotations

from random import Random
from types import MappingProxyType

import numpy as np
import pytest

from cargohold.connector.config import RESTORE_IF_FASTER, HintConfig
from cargohold.engine.core.request_queues import LoadFailurePolicy, QueuePolicy
from cargohold.lab.simulation.connectors import ConnectorPlan, TierPlan
from cargohold.lab.simulation.faults import Fault, VirtualClock
from cargohold.lab.simulation.fingerprints import GroupPlan
from cargohold.lab.simulation.run import RunResult, ScenarioRun
from cargohold.lab.simulation.tiers import MediumPlan
from cargohold.lab.simulation.traffic import Action, Ask, Reset, Restart
from cargohold.lab.simulation.transfers import LinkProfile, LinkTransfers
from cargohold.lab.simulation.world import Scenario, Shape
from cargohold.protocol import AttentionKind, Hint, TransferOutcome
from cargohold.tiers.scheduler_side import TierOptions
from cargohold.transfer import CopyJob, Direction

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
    result = ScenarioRun(Scenario(1, "by hand", shape, connector, {}, 0.0, asks)).play()
    assert result.error is None
    assert result.num_steps < 200


def play_raising(actions: tuple[Action, ...], rate: float, until_s: float) -> list[RunResult]:
    """Play a scene with twenty seeds, over a tier that outlives processes, while its connector may raise."""
    shape = Shape((GroupPlan(),), 13, 1, SCHEDULER, LinkProfile())
    connector = ConnectorPlan("eager", (TierPlan(8, None, {"policy": "lru"}),))
    results = []
    for seed in range(20):
        results.append(
            ScenarioRun(Scenario(seed, "by hand", shape, connector, {Fault.RAISES: rate}, until_s, actions)).play()
        )
        assert results[-1].error is None, f"seed {seed}"
    return results


def test_a_tier_may_outlive_what_was_taken_back_of_it() -> None:
    # A bug of the simulator. A connector that is turned off takes back what it announced, but its tier keeps that, and the next
    # process evicts it.
    asks = [Ask(0.5 * at, f"r{at}", tuple(range(100 * at, 100 * at + 16)), 1) for at in range(8)]
    results = play_raising((*asks[:4], Restart(2.0), *asks[4:]), 0.005, until_s=2.0)
    assert sum(result.tallies["turned off"] for result in results)


def test_the_next_process_may_refuse_what_the_last_one_took() -> None:
    # A bug of the simulator (seed 1400346). A connector that is turned off refuses no wish; that of the next process does.
    first = Ask(0.0, "first", tuple(range(16)), 1)
    wishing = Ask(1.0, "wishing", tuple(range(100, 108)), 20, params={"max_load_tokens": -1})
    last = Ask(2.0, "last", tuple(range(200, 208)), 1)
    results = play_raising((first, wishing, Restart(1.05), last), 0.02, until_s=0.9)
    refused = {tuple(result.tallies[what] for what in ("turned off", "requests", "refused")) for result in results}
    assert refused == {(0, 2, 1), (1, 3, 1)}, "taken and refused later, or refused at once"


def test_the_next_process_finds_nothing_that_a_tier_kept_of_other_weights() -> None:
    # A bug of the simulator (seed 1010764). A connector that is turned off is not told of a reset, and needs not be: nobody
    # loads what it holds. The next process would, and starts with the new weights; so it finds nothing of it, as in a store
    # whose namespace names the weights.
    prompt = tuple(range(16))
    asks = [Ask(0.5 * at, f"r{at}", prompt, 1) for at in range(4)]
    results = play_raising((*asks, Reset(2.0), Restart(2.5), Ask(3.0, "again", prompt, 1)), 0.005, until_s=2.0)
    assert sum(result.tallies["turned off"] for result in results)


def test_who_arrives_when_only_short_prompts_were_computed_may_wait_for_a_tier_that_hangs() -> None:
    # A mistake of an oracle (seed 1981191). One request of two tokens had ended, which does not say how long the next one's 41
    # take; so that one waited for as long as it may, and was blamed for it.
    asks = (Ask(0.81, "short", (786, 930), 7), Ask(1.0, "long", tuple(range(41)), 7))
    scheduler = SCHEDULER | {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefix_caching": True}
    shape = Shape((GroupPlan(),), 14, 1, scheduler, LinkProfile(block_s=0.001))
    slow = MediumPlan(TierOptions(name="disk"), 1000, latency_s=0.1, chunk_s=0.02)
    options = {"policy": "arc", "restore": RESTORE_IF_FASTER, "restore_timeout_s": 5.0}
    connector = ConnectorPlan("tiered", (TierPlan(8, None, options, (slow,)),))
    result = ScenarioRun(Scenario(1, "by hand", shape, connector, {Fault.HANGS: 1.0}, 2.4, asks)).play()
    assert result.error is None
    assert result.struck.keys() == {Fault.HANGS}


def test_what_hints_asked_of_a_process_that_has_died_is_not_asked_of_the_next_one() -> None:
    # A bug of the simulator (seeds 770294 and 780036): the tier outlives the process there, and its chunks kept their levels.
    pinned = Ask(0.0, "pinned", tuple(range(16)), 1, hints=(Hint.pin(ttl_s=50.0),))
    shape = Shape((GroupPlan(),), 13, 1, SCHEDULER, LinkProfile())
    connector = ConnectorPlan("eager", (TierPlan(8, None, {"policy": "lru", "hints": HintConfig(allow="all")}),))
    actions = (pinned, Restart(1.0), Ask(2.0, "next", tuple(range(100, 116)), 1))
    result = ScenarioRun(Scenario(1, "by hand", shape, connector, {}, 0.0, actions)).play()
    assert result.error is None


def test_a_request_whose_step_waits_for_its_load_may_grow_before_the_load_is_reported() -> None:
    # Both load all of their tokens but the last, within the step that computes that; a worker reports it later. The oracle took
    # the prefix, of which neither can share the last block, for one that was loaded twice.
    earlier = (Ask(0.0, "first", tuple(range(28)), 2), Ask(0.05, "other", tuple(range(50, 78)), 2))
    asks = (*earlier, *(Ask(0.15, name, tuple(range(28)), 6) for name in ("a", "b")))
    scheduler = {**SCHEDULER, "max_num_seqs": 3, "max_num_batched_tokens": 64, "prefix_caching": True}
    window = GroupPlan(AttentionKind.SLIDING_WINDOW, 4, 13)
    shape = Shape((window,), 10, 1, scheduler, LinkProfile(latency_s=0.005, block_s=0.01), loads_in_step=True)
    connector = ConnectorPlan("lazy", (TierPlan(14, 4, {"max_inflight_fraction": 1.0}),), with_context=True)
    result = ScenarioRun(Scenario(1, "by hand", shape, connector, {Fault.LATE_WORKER: 0.25}, 2.0, asks)).play()
    assert result.error is None
    assert result.found["a"] == result.found["b"] == result.tallies["restored tokens"] / 2 == 28


def test_loads_that_steps_have_waited_for_do_not_queue_up() -> None:
    # A mistake of the simulator. A load that ends in no time, as its step waits for it, kept its place on the link; a dozen
    # of them made requests wait for a second.
    clock = VirtualClock()
    region, rows = np.zeros((4, 8), np.uint8), np.ones((4, 8), np.uint8)
    link = LinkTransfers(region, rows, lambda: clock.now, LinkProfile(block_s=0.3), Random(1))
    for job_id in range(20):
        link.submit(CopyJob(job_id, Direction.LOAD, (1, 2), (1, 2), 30.0))
        assert link.finish_loads()
        assert [result.outcome for result in link.poll()] == [TransferOutcome.DONE]


def test_what_another_connector_gives_back_right_before_it_is_allocated_is_not_held_against_ours() -> None:
    # A mistake of the oracle, found in a composition (seed 71000010): no connector can look at a block that another one holds
    # for a copy until it is free, and then it is allocated at once.
    pooled = {
        "policy": "fifo",
        "mode": "exclusive",
        "max_inflight_fraction": 0.5,
        "transfer_timeout_s": 0.5,
        "store_within_steps": 8,
    }
    tiers = (TierPlan(9, None, pooled), TierPlan(4, None, pooled | {"policy": "reuse-index", "blocks_per_chunk": 3}))
    lazy = TierPlan(200, 1, {"max_inflight_fraction": 1.0, "transfer_timeout_s": 3.0})
    scheduler = SCHEDULER | {"max_num_seqs": 1, "max_num_batched_tokens": 64, "prefix_caching": True}
    shape = Shape((GroupPlan(),), 9, 1, scheduler, LinkProfile(latency_s=0.2, block_s=0.001, lanes=4))
    connector = ConnectorPlan("nested", (*tiers, lazy), (2, 2))
    lengths = ((0.0, 18, 7), (0.261, 27, 3), (0.381, 19, 11))
    asks = tuple(
        Ask(at, f"r{number}", tuple(range(100 * number, 100 * number + length)), most)
        for number, (at, length, most) in enumerate(lengths)
    )
    result = ScenarioRun(Scenario(1, "by hand", shape, connector, {}, 0.0, asks)).play()
    assert result.error is None
