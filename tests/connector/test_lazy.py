"""The lazy connector: copies down only what is about to be lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold import ConfigError, OffloadConfig
from cargohold.cache.chunk_table import ChunkTable
from cargohold.connector.offloading import OffloadingFactory
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.lab.simulation.transfers import HeldTransfers
from cargohold.protocol import (
    NULL_CONNECTOR,
    Clock,
    KVConnectorFactory,
    SchedulerEnvironment,
)
from cargohold.transfer import CopyResult, Direction
from examples.own_policy.oldest_ends import OldestEnds
from tests.connector.common import evict_everything, finish, play_any_schedule, prompt
from tests.effort import examples


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@examples(16)
@given(data=st.data())
def test_tokens_are_those_without_offloading_under_any_schedule_of_copies(
    windows: tuple[int | None, ...], data: st.DataObject
) -> None:
    tier = SimulatedOffloading(
        data.draw(st.integers(1, 60)),
        lookahead=data.draw(st.integers(1, 40)),
        max_inflight_fraction=data.draw(st.sampled_from([0.1, 0.5, 1.0])),
    )
    engine = SimulatedEngine(
        simulated_layout(1 + data.draw(st.integers(14, 30)) * len(windows), windows=windows),
        tier,
        max_num_batched_tokens=data.draw(st.integers(4, 64)),
        max_num_seqs=data.draw(st.integers(1, 4)),
    )
    play_any_schedule(data, engine, tier)


def test_what_is_evicted_is_found_in_the_tier() -> None:
    tier = SimulatedOffloading(100, lookahead=16)
    engine = SimulatedEngine(simulated_layout(30), tier, max_num_batched_tokens=16)
    for at in range(5):
        engine.add(f"r{at}", prompt(at, 60), 1)
        finish(engine, tier)
    engine.add("again", prompt(0, 60), 1)
    finish(engine, tier)
    assert engine.outputs["again"].cache_report.restored_tokens == {"host": 60}


def test_nothing_is_copied_that_is_not_about_to_be_lost() -> None:
    tier = SimulatedOffloading(100, lookahead=4)
    engine = SimulatedEngine(simulated_layout(60), tier)
    copied: list[int] = []
    tier.transfers[0].on_copy = lambda job: copied.extend(job.block_ids)
    for at in range(20):
        engine.add(f"r{at}", prompt(at % 2, 61), 1)  # both fit: every later visit hits on the device
        finish(engine, tier)
    assert copied == []


def test_an_idle_engine_copies_its_lookahead_and_no_more() -> None:
    tier = SimulatedOffloading(100, lookahead=4)
    engine = SimulatedEngine(simulated_layout(21), tier)
    copied: list[int] = []
    tier.transfers[0].on_copy = lambda job: copied.extend(job.block_ids)
    engine.add("fills the pool", prompt(0, 80), 1)
    finish(engine, tier)
    for _ in range(20):
        engine.step()
    assert len(copied) == 4
    head = engine.scheduler.kv.pool.next_victims(4)
    assert head == copied, "what was saved is evicted first, ends of prefixes before their beginnings"


def test_the_tier_gives_up_ends_of_prefixes_before_their_beginnings() -> None:
    """They reach it in the order in which the device would evict them; but what comes last must not go first."""
    tier = SimulatedOffloading(20, lookahead=20, policy="lru")
    engine = SimulatedEngine(simulated_layout(21), tier)
    for request_id, tokens in (("fills the tier", prompt(0, 80)), ("takes a part of it", prompt(1, 16))):
        engine.add(request_id, tokens, 1)
        finish(engine, tier)
        engine.step()
        finish(engine, tier)
    evict_everything(engine)
    engine.add("again", prompt(0, 80), 1)
    finish(engine, tier)
    assert engine.outputs["again"].cache_report.restored_tokens == {"host": 64}


def test_blocks_being_saved_cannot_be_reused() -> None:
    tier = SimulatedOffloading(100, lookahead=8)
    engine = SimulatedEngine(simulated_layout(21), tier, max_num_batched_tokens=80)
    transfers = tier.transfers[0]
    transfers.auto = False
    engine.add("first", prompt(0, 79), 1)
    engine.step()
    engine.step()
    (job,) = transfers.pending
    assert job.direction is Direction.STORE
    free = set(engine.scheduler.kv.pool.next_victims(10**6))
    assert not free & set(job.block_ids)
    engine.add("second", prompt(1, 30), 4)
    while engine.scheduler.num_unfinished:
        engine.step()
    transfers.auto = True
    finish(engine, tier)
    evict_everything(engine)
    engine.add("third", prompt(0, 79), 1)
    finish(engine, tier)
    assert engine.tokens("third") == engine.tokens("first")


class SlowTransfers(HeldTransfers):
    """Copies that take four steps."""

    def __init__(self, region: Any, rows: Any, clock: Clock) -> None:
        super().__init__(region, rows, clock, auto=False)
        self._polls: Counter[int] = Counter()

    def poll(self) -> list[CopyResult]:
        for job in list(self.pending):
            self._polls[job.job_id] += 1
            if self._polls[job.job_id] > 4:
                self.complete(job)
        return super().poll()


def test_running_requests_keep_their_blocks_while_others_are_copied() -> None:
    """Found by reading: copies held all free blocks of a tight pool, so that requests were preempted in every fourth step."""
    num_preempted = {}
    factories: dict[str, KVConnectorFactory] = {
        "alone": NULL_CONNECTOR,
        "lazy": SimulatedOffloading(
            5000, lookahead=32, make_transfers=lambda region, rows, env: SlowTransfers(region, rows, env.clock)
        ),
    }
    for name, offloading in factories.items():
        engine = SimulatedEngine(simulated_layout(64), offloading, max_num_seqs=4, max_num_batched_tokens=64)
        waiting = [(str(at), prompt(at, 4 + 17 * at % 57), 4 + 11 * at % 37) for at in range(100)]
        while waiting or engine.scheduler.num_unfinished:
            while waiting and engine.scheduler.num_unfinished < 4:
                engine.add(*waiting.pop())
            engine.step()
        num_preempted[name] = sum(request.num_preemptions for request in engine.requests.values())
    assert num_preempted["alone"] > 0 and num_preempted["lazy"] <= 1.5 * num_preempted["alone"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"host_bytes": "lots"}, "host_bytes='lots'"),
        ({"host_bytes": "1GiB", "lookahead_blocks": 0}, "lookahead_blocks=0"),
        ({"host_bytes": "1GiB", "policy": "best"}, "policy='best'"),
        ({"host_bytes": "1GiB", "max_inflight_fraction": 2}, "max_inflight_fraction=2"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OffloadConfig(mode="lazy", **options)


def test_host_memory_has_the_policy_that_the_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OldestEnds] = []

    class Noted(OldestEnds):
        def __init__(self, table: ChunkTable) -> None:
            super().__init__(table)
            made.append(self)

    monkeypatch.setattr("examples.own_policy.oldest_ends.OldestEnds", Noted)
    config = OffloadConfig(mode="lazy", host_bytes="1MiB", policy="examples.own_policy.oldest_ends:OldestEnds")
    OffloadingFactory(config).make_scheduler_side(SchedulerEnvironment(simulated_layout(20), lambda: 0.0))
    assert len(made) == 1
