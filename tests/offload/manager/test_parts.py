"""The index, the key map and the slot table, each against something plainer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cargohold.blocks import READY
from cargohold.offload.keys import ChunkKeys, offload_key, split_key
from cargohold.offload.manager import make_manager
from cargohold.offload.manager.chain_index import ChainIndex
from cargohold.offload.policy.base import NO_SLOT, Slots
from cargohold.offload.policy.key_hash import KeyHash
from cargohold.offload.policy.key_map import KeyFilter, KeyMap
from cargohold.protocol import AttentionKind, KVCacheGroup
from tests.offload.common import numbered


@pytest.mark.parametrize("capacity", [10, 1_000_000])
def test_a_key_map_is_a_dict(capacity: int) -> None:
    keys = numbered(*range(2_000))
    mapping, plain = KeyMap(capacity), dict(zip(keys[::2], range(1_000), strict=True))
    mapping.add(keys[::2], range(1_000))
    gone = keys[:500:4]
    mapping.remove(gone)
    for key in gone:
        del plain[key]
    assert mapping.get_many(keys) == [plain.get(key) for key in keys] == [mapping.get(key) for key in keys]
    assert sorted(mapping.values()) == sorted(plain.values()) and len(mapping) == len(plain)
    mapping.clear()
    assert len(mapping) == 0 and mapping.get_many(keys[:3]) == [None] * 3


def test_a_filter_misses_nothing_and_is_seldom_wrong() -> None:
    keys = numbered(*range(4_000))
    seen = KeyFilter(2_000)
    for first in range(0, 2_000, 100):
        seen.add(keys[first : first + 100])
        assert len(seen.candidates(keys[: first + 100])) == first + 100, "what was added last is missed"
    seen.remove(keys[:1_000])
    candidates = set(seen.candidates(keys))
    assert candidates.issuperset(range(1_000, 2_000))
    assert len(candidates) < 1_000 + 0.05 * 3_000
    seen.clear()
    assert len(seen.candidates(keys)) == 0


def test_a_filter_that_overflows_holds_everything_for_possible() -> None:
    """One place for all keys: 640 added at once, or 512 of them, would make its count 0 again."""
    for size in (640, 128, 1):
        keys = numbered(*range(641))
        seen = KeyFilter(0)
        for first in range(0, 640, size):
            seen.add(keys[first : min(first + size, 640)])
        assert list(seen.candidates(keys[639:])) == [0, 1]
        seen.remove(keys[:639])
        assert list(seen.candidates(keys[639:])) == [0, 1]
        seen.clear()
        assert list(seen.candidates(keys)) == []


def test_a_key_that_comes_goes_and_comes_again_is_not_missed() -> None:
    """All before the filter counts anything."""
    (key,) = numbered(0)
    seen = KeyFilter(1_000)
    seen.add([key])
    seen.remove([key])
    seen.add([key])
    assert list(seen.candidates([key])) == [0]
    seen.remove(numbered(*range(1, 1_000)))  # far more than it waits for
    seen.clear()
    assert list(seen.candidates([key])) == []


def test_a_filter_holds_every_key_without_two_words_for_possible() -> None:
    """As in replays of more chunks than a single dict takes. The filter refused such keys once."""
    keys = [number.to_bytes(4, "little") for number in range(1_000)]
    seen = KeyFilter(1_000)
    seen.add([])
    assert list(seen.candidates(keys)) == []
    seen.add(keys[:900])
    seen.remove(keys[:800])
    assert list(seen.candidates(keys)) == list(range(1_000))
    mapping = KeyMap(1_000_000)
    mapping.add(keys[:900], range(900))
    mapping.remove(keys[:800])
    assert mapping.find(keys) == {at: at for at in range(800, 900)}


def test_a_chunk_that_comes_and_goes_does_not_crowd_a_filter() -> None:
    """Found by a review: after 120 failed stores of one chunk, the filter held every key for possible."""
    manager = make_manager("lru", 200_000)
    for _ in range(600):
        manager.prepare_store(numbered(0)).forfeit()
    assert list(manager._index._slots._filter.candidates(numbered(*range(300)))) == []


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse-index"])
def test_keys_of_another_length_are_refused_before_anything_changes(policy: str) -> None:
    """Found by a review: they were noticed in later stores, in the middle of these."""
    manager = make_manager(policy, 200_000)
    good = numbered(*range(40))
    manager.prepare_store(good[:1]).commit()
    for bad in ([good[1][:-4]], [good[1][:-4], good[2] + bytes(4)]):
        with pytest.raises(ValueError, match="one length"):
            manager.prepare_store(bad)
    manager.prepare_store(good[1:]).commit()
    assert manager.lookup(good) == bytes([READY]) * 40 and manager.num_writing == 0
    manager.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_index_finds_every_chunk_whatever_is_cut_out(data: st.DataObject) -> None:
    """Long prefixes that share beginnings, in strands that are joined, cut, and cut in the middle."""
    capacity = 1_500
    index = ChainIndex(capacity)
    where: dict[bytes, int] = {}
    ready: set[bytes] = set()
    free = list(range(capacity))
    trunk = numbered(*range(600))
    for at in range(data.draw(st.integers(1, 8))):
        length = data.draw(st.sampled_from([0, 1, 5, 255, 256, 257, 600]))
        keys = [*trunk[:length], *numbered(*range(1_000 * (at + 1), 1_000 * (at + 1) + data.draw(st.integers(0, 300))))]
        first = next((place for place, key in enumerate(keys) if key not in where), len(keys))
        new = [key for key in keys[first:] if key not in where]
        if new and len(new) <= len(free) and new == keys[first:]:
            slots, free = free[: len(new)], free[len(new) :]
            strands = index.insert([tuple(new)], _array(slots), [keys[first - 1] if first else None])
            where.update(zip(new, slots, strict=True))
            assert index.run(tuple(keys)).length <= first, "what is being written is not ready"
            if data.draw(st.booleans()):
                for strand in strands:
                    index.publish(strand)
                ready.update(new)
        if where:
            victims = data.draw(st.lists(st.sampled_from(sorted(ready) or [b""]), unique=True, max_size=3))
            victims += [key for key in new[data.draw(st.integers(0, 300)) :] if key in ready and key not in victims]
            victims = [key for key in victims if key in where]
            assert index.remove(_array([where[key] for key in victims])) == victims
            free += [where.pop(key) for key in victims]
            ready.difference_update(victims)
        index.check()
        run = index.run(tuple(keys))
        expected = next((place for place, key in enumerate(keys) if key not in ready), len(keys))
        assert run.length == expected
        assert run.slots.tolist() == [where[key] for key in keys[:expected]]
        assert index.slots_of(keys) == [where.get(key) for key in keys]
        assert index.keys_at(_array(list(where.values()))) == list(where)
        if keys and keys[-1] in where:
            present = next(place for place in range(len(keys), -1, -1) if not place or keys[place - 1] not in where)
            assert index.ancestors(where[keys[-1]]).tolist() == [where[key] for key in keys[present:]]


def test_ancestors_of_nothing_are_none() -> None:
    assert ChainIndex(4).ancestors(NO_SLOT).tolist() == []


def test_keys_that_claim_to_follow_each_other_in_a_circle_do_no_harm() -> None:
    index = ChainIndex(4)
    first, second = numbered(1, 2)
    for strand in index.insert([(first,), (second,)], _array([0, 1]), [second, first]):
        index.publish(strand)
    assert index.ancestors(0).tolist()[-1:] == [0] and index.ancestors(1).tolist()[-1:] == [1]


def test_offload_keys_are_those_of_whole_chunks_and_grow_with_the_request() -> None:
    group = KVCacheGroup(3, AttentionKind.FULL, 4, ("layer",), None)
    keys = ChunkKeys(group, blocks_per_chunk=2, hash_block_tokens=2)
    hashes = numbered(*range(11))
    for known in (1, 3, 4, 9, 11):
        keys.extend(hashes[:known])
        assert keys.keys == [offload_key(hashes[last], 3) for last in range(3, known, 4)]
    assert [split_key(key) for key in keys.keys] == [(hashes[3], 3), (hashes[7], 3)]


def _array(slots: list[int]) -> Slots:
    return np.array(slots, dtype=np.intp)


@pytest.mark.parametrize("length", [1, 4, 7, 16, 36])
def test_hashes_are_spread_and_only_the_seed_counts(length: int) -> None:
    keys = sorted({key[:length] for key in numbered(*range(200))})
    hashes = KeyHash(seed=3)(keys)
    assert len(set(hashes.tolist())) == len(keys)
    assert KeyHash(seed=3)(keys[::-1]).tolist() == hashes[::-1].tolist()
    assert KeyHash()(keys).tolist() != KeyHash()(keys).tolist() != hashes.tolist()
    assert [KeyHash(seed=3).of(key) for key in keys] == hashes.tolist()


def test_keys_of_other_lengths_are_refused() -> None:
    hashes = KeyHash()
    assert len(hashes([])) == 0
    with pytest.raises(ValueError, match=r"one length, not \[1, 2\]"):
        hashes([b"a", b"bc"])
    hashes([b"ab", b"cd"])
    with pytest.raises(ValueError, match=r"one length, not \[2, 3\]"):
        hashes([b"abc"])
    with pytest.raises(ValueError, match=r"one length, not \[2, 3\]"):
        hashes.of(b"abc")
