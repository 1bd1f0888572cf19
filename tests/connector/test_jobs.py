"""Transfers in flight, against a plain list of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache import OffloadManager, make_manager
from cargohold.cache.manager import ChunkKeys
from cargohold.connector.kernel.jobs import JobTable, Load, Store
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import AttentionKind, Clock, KVCacheGroup

KEYS = [bytes([at]) * 36 for at in range(6)]
OF_REQUEST = ChunkKeys(KVCacheGroup(0, AttentionKind.FULL, 8, ("layer",)), 1, 8)
"""A request whose tokens have these chunks."""
OF_REQUEST.keys += KEYS


class Jobs:
    """A table, and a tier that has every chunk."""

    def __init__(self, clock: Clock) -> None:
        self.table = JobTable(clock, 10**6)
        self.manager: OffloadManager = make_manager("lru", len(KEYS))
        self.manager.prepare_store(KEYS, None).commit()
        self.loads: dict[int, Load] = {}
        self.stores: dict[int, Store] = {}

    def load(self, keys: list[bytes]) -> int:
        handle = self.manager.prepare_load(keys)
        blocks = tuple(range(1, 1 + 2 * len(keys)))  # two of each chunk
        block_keys = [key for key in keys for _ in range(2)]
        job_id = self.table.new_id()
        origins = bytes(8 * len(keys))
        load = Load(job_id, "r", handle, 8, blocks, block_keys, range(len(blocks)), origins, is_first=True)
        self.table.add_load(load)
        self.loads[job_id] = load
        return job_id

    def store(self, request_ids: set[str], num_blocks: int) -> int:
        job_id = self.table.new_id()
        store = Store(job_id, request_ids, self.manager.prepare_stores([]), tuple(range(1, 1 + num_blocks)))
        self.table.add_store(store)
        self.stores[job_id] = store
        return job_id

    def is_loading(self) -> list[bool]:
        return [any(key in load.handle.keys for load in self.loads.values()) for key in KEYS]


@given(st.data())
def test_the_table_knows_what_is_in_flight(data: st.DataObject) -> None:
    jobs, ids = Jobs(VirtualClock()), set[int]()
    table = jobs.table
    for move in data.draw(st.lists(st.sampled_from(["load", "store", "end"]), max_size=20)):
        before, version, num_begun = jobs.is_loading(), table.version, len(ids)
        if move == "load":
            ids.add(jobs.load(data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))))
        elif move == "store":
            ids.add(jobs.store(data.draw(st.sets(st.sampled_from("abc"), max_size=2)), data.draw(st.integers(1, 4))))
        else:
            job_id = data.draw(st.sampled_from([0, *jobs.loads, *jobs.stores]))
            ended = jobs.loads.pop(job_id, None) or jobs.stores.pop(job_id, None)
            assert table.end(job_id)[0] is ended
            assert table.end(job_id) == (None, None), "it ends once"
        assert len(ids) == num_begun + (move != "end"), "an id is used once"
        for keys in ([], KEYS, *([key] for key in KEYS)):
            loads = {at for at, load in jobs.loads.items() if not set(keys).isdisjoint(load.handle.keys)}
            found = table.load_of_any(keys)
            assert not loads if found is None else found in loads
        for first, num_tokens in ((0, 16), (8, 24), (16, 40)):
            ends = {at: 8 + 8 * len(load.handle.keys) for at, load in jobs.loads.items()}
            ending = {
                at
                for at, end in ends.items()
                if first < end <= num_tokens and OF_REQUEST.keys[end // 8 - 1] in jobs.loads[at].handle.keys
            }
            found = table.load_up_to([OF_REQUEST], first, num_tokens)
            assert not ending if found is None else ends[found] == max(ends[at] for at in ending)
        assert [at for at in [0, *ids] if table.is_loading(at)] == [at for at in ids if at in jobs.loads]
        assert before == jobs.is_loading() or table.version != version
        assert (len(table), bool(table)) == (len(jobs.loads) + len(jobs.stores), bool(jobs.loads or jobs.stores))
        assert (table.num_loads, list(table.loads())) == (len(jobs.loads), list(jobs.loads.values()))
        assert list(table.stores()) == list(jobs.stores.values())
        assert table.num_store_blocks == sum(len(store.block_ids) for store in jobs.stores.values())
        for request_id in "abc":
            assert table.is_storing(request_id) == any(request_id in one.request_ids for one in jobs.stores.values())


def counts_of(table: JobTable) -> tuple[int, int, int, int]:
    return table.num_stuck, table.num_awaited, table.num_stuck_blocks, len(table)


@pytest.mark.parametrize("lost_is_load", [True, False])
def test_a_job_that_does_not_end_in_time_is_overdue_once_while_others_begin_and_end(lost_is_load: bool) -> None:
    clock = VirtualClock()
    clock.advance(1000)
    jobs = Jobs(clock)
    assert not jobs.table.take_overdue(10.0)
    lost = jobs.load(KEYS[:2]) if lost_is_load else jobs.store({"a"}, 2)
    began = clock()
    overdue: list[Load | Store] = []
    while not overdue:
        others = [jobs.load(KEYS[1:3]), jobs.store({"b"}, 1)]
        clock.advance(0.1)
        overdue = jobs.table.take_overdue(10.0)
        for job_id in others:
            jobs.table.end(job_id)
        assert clock() - began < 12
    assert clock() - began > 10 and [job.job_id for job in overdue] == [lost]
    table = jobs.table
    assert counts_of(table) == (1, 0, len(overdue[0].block_ids), 1)
    assert table.load_of_any(KEYS) is None and not table.is_loading(lost), "nobody waits for it"
    assert table.load_up_to([OF_REQUEST], 0, 40) is None
    clock.advance(100)
    assert not table.take_overdue(10.0)
    assert table.end(lost) == (overdue[0], None)
    assert counts_of(table) == (0, 0, 0, 0)


def test_jobs_that_are_overdue_together_are_found_together() -> None:
    clock = VirtualClock()
    jobs = Jobs(clock)
    ids = [jobs.load(KEYS[:2]), jobs.store({"a"}, 2), jobs.load(KEYS[2:])]
    overdue: list[Load | Store] = []
    while not overdue:
        clock.advance(0.5)
        overdue = jobs.table.take_overdue(10.0)
    assert [job.job_id for job in overdue] == ids


def test_what_may_have_ended_while_nobody_looked_is_not_overdue_at_once() -> None:
    clock = VirtualClock()
    jobs = Jobs(clock)
    job_id = jobs.store({"a"}, 1)
    clock.advance(3600)
    assert not jobs.table.take_overdue(10.0)
    jobs.table.end(job_id)
    assert not jobs.table.take_overdue(10.0)


def test_tokens_are_counted_by_the_tier_that_they_came_from() -> None:
    jobs, tiers = Jobs(VirtualClock()), ("host", "disk", "store")
    load = replace(jobs.loads[jobs.load(KEYS[:1])], origins=bytes([0, 0, 1, 1, 1, 0]))
    assert load.count(tiers, 6) == {"host": 3, "disk": 3}
    assert load.count(tiers, 3) == {"host": 2, "disk": 1}
    assert dict(load.count(tiers, 2)) == {"host": 2}, "of the others nothing is said"
    assert dict(load.count(tiers, 0)) == {}
