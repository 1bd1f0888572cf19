"""The table of chunks against something plainer, and keys."""

from __future__ import annotations

from itertools import takewhile
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache import chunk_table, make_manager
from cargohold.cache.chunk_table import NO_SLOT, READY, ChunkTable
from cargohold.cache.manager import ChunkKeys, offload_key, split_key
from cargohold.protocol import AttentionKind, KVCacheGroup
from tests.cache import common
from tests.cache.common import EVERY_PATH, chain, numbered
from tests.effort import examples


@pytest.mark.parametrize("most_in_one_dict", [0, 600])
@examples(25)
@given(data=st.data())
def test_a_table_finds_every_chunk_whatever_is_removed(most_in_one_dict: int, data: st.DataObject) -> None:
    """Prefixes that share beginnings, in neighbouring slots and scattered over the table."""
    with patch.object(chunk_table, "_MAX_ONE_DICT", most_in_one_dict):
        table = ChunkTable(600)
    where: dict[bytes, int] = {}
    behind: dict[bytes, bytes] = {}
    written: list[bytes] = []
    trunk = numbered(*range(300))
    for at in range(data.draw(st.integers(1, 8))):
        length = data.draw(st.sampled_from([0, 1, 5, 127, 128, 129, 300]))
        keys = [*trunk[:length], *numbered(*range(1_000 * (at + 1), 1_000 * (at + 1) + data.draw(st.integers(0, 150))))]
        first = next((place for place, key in enumerate(keys) if key not in where), len(keys))
        new = list(takewhile(lambda key: key not in where, keys[first:]))[: table.num_free]
        if new:
            slots = table.take(len(new))
            table.place(new, slots, where[keys[first - 1]] if first else NO_SLOT)
            where.update(zip(new, slots, strict=True))
            behind.update(zip(new[1:], new, strict=False))
            if first:
                behind[new[0]] = keys[first - 1]
            if data.draw(st.booleans()):
                table.publish(slots)
            else:
                written += new
        drawn = data.draw(st.lists(st.sampled_from([*where, b"?"]), unique=True, max_size=3))
        gone = [key for key in drawn if key in where]
        table.remove([where[key] for key in gone])
        for key in gone:
            del where[key]
        written = [key for key in written if key not in gone]
        behind = {key: front for key, front in behind.items() if key in where and front in where}
        table.check()
        ready = [key for key in keys if key in where and key not in written]
        run = list(takewhile(ready.__contains__, keys))
        assert table.find_run(keys) == [where[key] for key in run]
        assert table.find_each(keys) == [where.get(key) for key in keys]
        for key in keys[-1:]:
            path = [key] if key in where else []
            while path and path[-1] in behind:
                path.append(behind[path[-1]])
            assert table.ancestors(table.find(key)) == [where[name] for name in reversed(path)]


def test_a_removed_chunk_that_is_read_keeps_its_slot_until_it_is_not() -> None:
    table = ChunkTable(2)
    slots = table.take(2)
    table.place(numbered(1, 2), slots, NO_SLOT)
    table.publish(slots)
    table.pin([0, 0, 1])
    table.remove(slots)
    assert table.find_run(numbered(1, 2)) == [] and (table.num_free, table.num_leaving) == (0, 2)
    for left, (unpinned, num_leaving) in enumerate([([0], 2), ([1], 1), ([0], 0)]):
        table.unpin(unpinned)
        assert (table.num_free, table.num_leaving) == (2 - num_leaving, num_leaving), left
        table.check()


def test_eviction_from_the_end_stops_at_a_chunk_with_children_and_names_those_that_have_none_any_more() -> None:
    table = ChunkTable(4)
    first, left, right = slots = table.take(3)
    keys = numbered(1, 2, 3)
    table.place(keys[:2], [first, left], NO_SLOT)
    table.place(keys[2:], [right], first)
    table.publish(slots)
    slots = [first, right]
    assert table.evict_end(slots, 2) == ([right], []) and slots == [first], "another chunk follows the first"
    assert table.evict_end([left], 1) == ([left], [first])
    table.evict(first)
    assert table.evicted == [keys[2], keys[1], keys[0]] and table.states.count(READY) == 0
    table.check()


def test_offload_keys_are_those_of_whole_chunks_and_grow_with_the_request() -> None:
    group = KVCacheGroup(3, AttentionKind.FULL, 4, ("layer",), None)
    keys = ChunkKeys(group, blocks_per_chunk=2, hash_block_tokens=2)
    hashes = numbered(*range(11))
    for known in (1, 3, 4, 9, 11):
        keys.extend(hashes[:known])
        assert keys.keys == [offload_key(hashes[last], 3) for last in range(3, known, 4)]
    assert [split_key(key) for key in keys.keys] == [(hashes[3], 3), (hashes[7], 3)]


@given(paths=st.lists(st.sampled_from(EVERY_PATH), max_size=12), start=st.sampled_from(EVERY_PATH))
def test_what_continues_a_chunk_is_found_in_all_branches(paths: list[tuple[int, ...]], start: tuple[int, ...]) -> None:
    manager = make_manager("lru", 128)
    for path in paths:
        keys = chain(path)
        there = manager.touch(keys)
        manager.prepare_store(keys[there:], keys[there - 1] if there else None).commit()
    stored = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    behind = {common.key(path) for path in stored if path[: len(start)] == start != path and start in stored}
    found = manager.continuations([common.key(start)])
    assert set(found) == behind and len(found) == len(behind)
