"""Hand-offs between two simulated engines over one shared tier, under faults; and mutants that the oracles must find."""

from __future__ import annotations

from collections import Counter

import pytest

from cargohold.lab.simulation.faults import parse_faults
from cargohold.lab.simulation.world import draw_scenario
from cargohold.tiers.scheduler_side import Promises
from cargohold.tiers.scheduler_side.prefetch import Prefetcher
from cargohold.tiers.scheduler_side.waiting import Phase, Waiting
from tests.simulation.pair import PairRun, draw_restarts


def play(seed: int, faults: str, *, dies: bool) -> Counter[str]:
    scenario = draw_scenario(seed, "remote-decode", "tiered", parse_faults(faults))
    result = PairRun(scenario, draw_restarts(seed, scenario) if dies else ()).play()
    if result.error is not None:
        raise AssertionError(f"seed {seed}, {faults}") from result.error
    return result.tallies


@pytest.mark.parametrize(
    "seeds", [range(5, 8), pytest.param(range(8, 28), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.parametrize("faults", ["none", "all"])
def test_tokens_are_those_of_one_engine_and_what_is_announced_is_there(faults: str, seeds: range) -> None:
    tallies: Counter[str] = Counter()
    for seed in seeds:
        tallies += play(seed, faults, dies=faults == "all")
    assert tallies["restored tokens"] and tallies["announced tokens"] > tallies["announced when readable"] > 0


def fails(seeds: range) -> bool:
    for seed in seeds:
        try:
            play(seed, "none", dies=False)
        except AssertionError:
            return True
    return False


def test_an_engine_that_announces_as_readable_what_is_on_its_way_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    states = Promises.states
    monkeypatch.setattr(Promises, "states", lambda self, keys: states(self, keys).replace(b"\2", b"\1"))
    assert fails(range(40))


def test_an_engine_that_forgets_what_it_has_promised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(self: Promises, keys: object) -> None:
        """Pin nothing and write nothing ahead of other chunks."""

    monkeypatch.setattr(Promises, "note_ready", ready)
    assert fails(range(32, 92)), "with seed 32 soonest"


@pytest.mark.long  # it plays thousands of steps before it is found out
def test_an_engine_that_waits_for_announced_chunks_without_a_deadline_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def for_ever(self: Prefetcher, waiting: Waiting, num_tokens: int) -> bool:
        waiting.waited_s = 0.0
        return waiting.num_announced > 0 and waiting.phase is Phase.ASK

    monkeypatch.setattr(Prefetcher, "_is_to_come", for_ever)
    assert fails(range(10))
