"""The lazy connector: copies down only what is about to be lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold import ConfigError, OffloadConfig
from cargohold.blocks import BlockPool
from cargohold.cache.chunk_table import ChunkTable
from cargohold.connector.kernel.jobs import OffloadingMetadata
from cargohold.connector.offloading.lazy import FreeQueueScout, LazyOffloadingFactory
from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request import SchedulerStep
from cargohold.engine.core.request_queues import QueuePolicy, WaitingQueue
from cargohold.engine.core.scheduler import EngineContext
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.lab.simulation.transfers import HeldTransfers
from cargohold.protocol import (
    NULL_CONNECTOR,
    BlockStored,
    Clock,
    KVConnectorFactory,
    KVConnectorOutput,
    SchedulerEnvironment,
    TransferOutcome,
)
from cargohold.transfer import CopyResult, Direction
from examples.own_policy.oldest_ends import OldestEnds
from tests.connector.common import alone, evict_everything, finish, play_any_schedule, prompt
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
    head = [block.block_id for block in engine.scheduler.kv.pool.iter_free_blocks()][:4]
    assert head == copied, "what was saved is evicted first, ends of prefixes before their beginnings"


def test_the_tier_gives_up_ends_of_prefixes_before_their_beginnings() -> None:
    """They reach it in the order in which the device would evict them; but what comes last must not go first."""
    tier = SimulatedOffloading(20, lookahead=20)
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
    free = {block.block_id for block in engine.scheduler.kv.pool.iter_free_blocks()}
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


def test_without_a_view_of_the_pool_it_turns_itself_off() -> None:
    tier = SimulatedOffloading(100, lookahead=8)
    engine = SimulatedEngine(simulated_layout(21), tier, with_context=False)
    engine.add("r", prompt(0, 40), 3)
    finish(engine, tier)
    assert engine.tokens("r") == alone(prompt(0, 40), 3)
    assert engine.scheduler.connector.broken is not None
    assert "no view of its block pool" in engine.scheduler.connector.broken.rule


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
    LazyOffloadingFactory(config).make_scheduler_side(SchedulerEnvironment(simulated_layout(20), lambda: 0.0))
    assert len(made) == 1


def test_it_needs_a_prefix_cache_to_keep_what_that_evicts() -> None:
    factory = LazyOffloadingFactory(OffloadConfig(mode="lazy", host_bytes="1MiB"))
    with pytest.raises(ConfigError, match="prefix_caching=False"):
        factory.make_scheduler_side(SchedulerEnvironment(simulated_layout(20), lambda: 0.0, prefix_caching=False))


def test_blocks_that_another_connector_has_loaded_are_announced_when_stored() -> None:
    """Also if their request was preempted before any step."""
    kv = KVCacheManager(simulated_layout(9))
    side = LazyOffloadingFactory(OffloadConfig(mode="lazy", host_bytes="4KiB")).make_scheduler_side(
        SchedulerEnvironment(kv.layout, lambda: 0.0, emits_events=True)
    )
    side.bind_scheduler_context(EngineContext(kv, WaitingQueue(QueuePolicy.FCFS)))
    tokens = prompt(0, 9)
    engine = SimulatedEngine(kv.layout, SimulatedOffloading(9))
    engine.add("r", tokens, 1)
    request = engine.requests["r"]
    side.on_new_request(request)
    blocks = kv.pool.allocate(2)
    side.update_state_after_alloc(request, (tuple(block.block_id for block in blocks),), 0)
    for block, block_hash in zip(blocks, request.block_hashes, strict=True):
        kv.pool.cache_block(block, block_hash, 0)
    kv.pool.free_blocks(blocks)
    metadata = side.build_connector_meta(SchedulerStep(preempted_req_ids=frozenset({"r"})))
    assert isinstance(metadata, OffloadingMetadata)
    done = {job.job_id: TransferOutcome.DONE for job in metadata.stores}
    side.update_connector_output(KVConnectorOutput(jobs=done))
    stored = [event for event in side.take_events() if isinstance(event, BlockStored)]
    assert sorted(token for event in stored for token in event.token_ids) == sorted(tokens[:8])


class TestScout:
    """The walk ahead of eviction."""

    def setup_method(self) -> None:
        self.kv = KVCacheManager(simulated_layout(9))
        self.pool: BlockPool = self.kv.pool
        blocks = self.pool.allocate(8)
        for block in blocks:
            self.pool.cache_block(block, bytes([block.block_id]), 0)
        self.pool.free_blocks(blocks)
        self.kept: set[bytes] = set()
        self.asked: list[int] = []
        context = EngineContext(self.kv, WaitingQueue(QueuePolicy.FCFS))
        self.scout = FreeQueueScout(context, self.is_kept, 4)

    def is_kept(self, block: Any) -> bool:
        self.asked.append(block.block_id)
        return block.block_hash in self.kept

    def found(self, limit: int = 99) -> list[int]:
        return [block.block_id for block in self.scout.find_unsafe(limit)]

    def save(self, ids: list[int]) -> None:
        blocks = [self.pool.get_block(block_id) for block_id in ids]
        self.pool.touch(blocks)
        self.kept |= {bytes([block_id]) for block_id in ids}
        self.pool.free_blocks(blocks, evict_first=True)
        for block in reversed(blocks):
            self.scout.note_saved(block)

    def test_finds_what_would_be_evicted_next(self) -> None:
        assert self.found() == [1, 2, 3, 4]

    def test_keeps_to_its_limit(self) -> None:
        assert self.found(limit=2) == [1, 2]
        assert self.found(limit=0) == []

    def test_is_content_once_its_lookahead_is_safe(self) -> None:
        self.save(self.found())
        self.asked.clear()
        assert self.found() == []
        assert self.asked == [], "and does not walk again"

    def test_walks_on_from_its_cursor_when_blocks_were_taken(self) -> None:
        self.save(self.found())
        self.pool.allocate(2)
        self.asked.clear()
        assert self.found() == [5, 6]
        assert self.asked == [5, 6], "those before the cursor are not asked about again"

    def test_starts_over_when_its_cursor_has_left_the_queue(self) -> None:
        self.save(self.found())
        self.pool.allocate(1)
        self.pool.touch([self.pool.get_block(4)])  # a prefix hit on the cursor's block
        assert self.found() == [5, 6]

    def test_skips_what_is_empty_or_kept(self) -> None:
        self.kept = {bytes([2])}
        self.pool.uncache_block(self.pool.get_block(1))
        assert self.found() == [3, 4]

    def test_blocks_hit_again_do_not_count_as_safe_ahead_of_eviction(self) -> None:
        """Found by reading: they return to the end of the queue, and what was evicted meanwhile had not been saved."""
        self.save(self.found())
        hit = [self.pool.get_block(block_id) for block_id in (2, 3, 4)]
        self.pool.touch(hit)
        assert self.found() == [5, 6, 7]
        self.save([5, 6, 7])
        self.pool.free_blocks(hit)
        assert [block.block_id for block in self.pool.iter_free_blocks()][-3:] == [2, 3, 4]
        assert self.found() == [], "1 and those saved now are the next to go"
        self.pool.allocate(4)
        assert self.found() == [8]
