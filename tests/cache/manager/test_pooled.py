"""Host memory and the device pool as one cache, beside one LRU over both."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from unittest.mock import MagicMock

import numpy as np
import pytest

from cargohold.cache import TierManager, make_manager
from cargohold.cache.manager import ChunkPins, StoreOffer, offload_key
from cargohold.cache.retention import NORMAL
from cargohold.cache.rows import PooledTable
from cargohold.cache.shares import Limits

POOL = 40


class OneCache:
    """A device pool that evicts the leaf used last of all, in front of a manager that is told of all that happens to it.

    Args:
        manager: the manager.
        may_take: whether slots of copies may be taken.
        loads_take_time: whether chunks that are loaded keep their slots until those that the device loses for them are saved.

    Attributes:
        num_found: chunks asked for that were on the device, or in host memory.
        num_copied: chunks that were copied down.
    """

    def __init__(self, manager: TierManager, *, may_take: bool = True, loads_take_time: bool = False) -> None:
        self.manager = manager
        self.loads_take_time = loads_take_time
        self.pool: OrderedDict[bytes, None] = OrderedDict()
        assert manager.pool_with_device(POOL, lambda keys: [may_take and key in self.pool for key in keys])
        self.num_found = self.num_copied = 0

    def ask(self, keys: Sequence[bytes], tenant: str | None = None) -> None:
        """Serve a prompt with these chunks."""
        manager, num_hit = self.manager, 0
        while num_hit < len(keys) and keys[num_hit] in self.pool:
            num_hit += 1
        num_loaded = len(manager.lookup_run(keys[num_hit:]))
        self.num_found += num_hit + num_loaded
        manager.touch(keys)
        pins = manager.prepare_load(keys[num_hit : num_hit + num_loaded])
        if not self.loads_take_time:
            self._end_load(pins)
        for key in reversed(keys):
            self.pool[key] = None
            self.pool.move_to_end(key)
        gone = list(self.pool)[: max(0, len(self.pool) - POOL)]
        for key in gone:
            del self.pool[key]
        self.lose(gone)
        if self.loads_take_time:
            self._end_load(pins)
        new = list(keys[manager.num_known(keys) :])
        offer = StoreOffer(new, keys[-len(new) - 1] if len(new) < len(keys) else None, tenant)
        if len(new) <= manager.num_free:
            handle = manager.prepare_stores([offer])
            self.num_copied += len(handle.keys)
            handle.commit()
            manager.note_copies(handle.keys)
        else:
            manager.list_on_device([offer])
        manager.check()

    def _end_load(self, pins: ChunkPins) -> None:
        pins.release()
        self.pool.update(dict.fromkeys(reversed(pins.keys)))
        self.manager.note_copies(pins.keys)

    def lose(self, keys: Sequence[bytes]) -> None:
        """Evict chunks from the device."""
        handle = self.manager.prepare_saves(keys)
        self.num_copied += len(handle.keys)
        self.manager.note_lost(keys)
        handle.commit()


def one_lru(asked: Sequence[Sequence[bytes]], capacity: int) -> int:
    """How many chunks one cache finds that evicts the leaf used last of all."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    num_found = 0
    for keys in asked:
        at = 0
        while at < len(keys) and keys[at] in cache:
            at += 1
        num_found += at
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_found


def documents(num: int, length: int) -> list[list[bytes]]:
    return [[offload_key(bytes([doc, at]) * 16, 0) for at in range(length)] for doc in range(num)]


def conversations(num_asked: int, seed: int = 0) -> list[list[bytes]]:
    """Prompts that share beginnings and grow."""
    dice, known = random.Random(seed), [[offload_key(bytes([of]) * 32, 0)] for of in range(16)]
    asked = []
    for _ in range(num_asked):
        keys = dice.choice(known)
        if len(keys) < 16:
            more = [offload_key(dice.randbytes(32), 0) for _ in range(dice.randint(1, 3))]
            known[dice.randrange(len(known))] = keys = [*keys, *more]
        else:
            known[dice.randrange(len(known))] = keys[:2]
        asked.append(keys)
    return asked


def uniform(num_asked: int, seed: int = 1) -> list[list[bytes]]:
    dice, docs = random.Random(seed), documents(12, 8)
    return [dice.choice(docs) for _ in range(num_asked)]


@pytest.mark.parametrize("traffic", [uniform, conversations])
@pytest.mark.parametrize("num_slots", [POOL // 4, POOL // 2, POOL, 2 * POOL, 4 * POOL])
@pytest.mark.parametrize("policy", ["lru", "fifo", "reuse-index"])
def test_both_find_what_one_cache_of_their_sizes_finds(
    policy: str, num_slots: int, traffic: Callable[[int], list[list[bytes]]]
) -> None:
    asked = traffic(400)
    cache = OneCache(make_manager(policy, num_slots, record_events=True))
    for keys in asked:
        cache.ask(keys)
    expected, num_asked = one_lru(asked, POOL + num_slots), sum(map(len, asked))
    assert cache.num_found >= expected - {"lru": 0.005, "fifo": 0.05, "reuse-index": 0.02}[policy] * num_asked
    assert cache.num_copied <= num_asked - one_lru(asked, POOL), "no more than the device computes or loads"


def test_what_is_being_loaded_keeps_its_slot_meanwhile() -> None:
    asked = uniform(400)
    cache = OneCache(make_manager("lru", POOL), loads_take_time=True)
    for keys in asked:
        cache.ask(keys)
    assert cache.num_found >= one_lru(asked, 2 * POOL - 8) - 0.01 * sum(map(len, asked)), "a document is there twice"


def test_prompts_that_come_once_are_not_copied_once_that_is_known() -> None:
    cache = OneCache(make_manager("reuse-index", POOL))
    for keys in documents(200, 8):
        cache.ask(keys)
    assert cache.num_copied <= POOL + 256, "the policy looks for the first time when it has seen so many"


def test_without_copies_to_take_both_are_still_two() -> None:
    asked = uniform(400)
    taking, keeping = (OneCache(make_manager("lru", POOL // 2), may_take=may_take) for may_take in (True, False))
    for keys in asked:
        taking.ask(keys)
        keeping.ask(keys)
    assert taking.num_found > keeping.num_found
    assert taking.num_copied > keeping.num_copied


def test_quotas_count_what_has_a_slot_and_hold_for_what_the_device_loses() -> None:
    cache = OneCache(make_manager("lru", POOL, quotas={"a": Limits(hard=4), "b": Limits(reserved=8)}))
    for at, keys in enumerate(uniform(300)):
        cache.ask(keys, (None, "a", "b")[at % 3])
        usage = cache.manager.usage()
        assert usage["a"] <= 4
        assert sum(usage.values()) == cache.manager.num_ready


def test_where_blocks_differ_in_size_each_chunk_takes_its_rows() -> None:
    dice, cache = random.Random(3), OneCache(make_manager("lru", POOL, chunk_rows=(1, 3)))
    docs = [[offload_key(bytes([doc, at]) * 16, doc % 2) for at in range(8)] for doc in range(12)]
    for _ in range(300):
        cache.ask(dice.choice(docs))
    assert cache.num_found


@pytest.mark.parametrize("limits", [Limits(), Limits(reserved=8), Limits(hard=POOL)])
def test_what_the_device_loses_is_all_kept_while_there_is_room_also_of_tenants(limits: Limits) -> None:
    manager = make_manager("lru", POOL, quotas={"a": limits})
    assert manager.pool_with_device(POOL, lambda keys: [False] * len(keys))
    (keys,) = documents(1, 8)
    manager.list_on_device([StoreOffer(keys, None, "a")])
    handle = manager.prepare_saves(keys)
    handle.commit()
    assert len(manager.lookup_run(keys)) == 8
    manager.check()


def test_a_copy_that_is_still_being_written_is_taken_later() -> None:
    """Found by seeds: a copy that a store passed while it was being written was never taken again."""
    manager = make_manager("lru", 2)
    keys = [offload_key(bytes([number]) * 32, 0) for number in range(3)]
    assert manager.pool_with_device(POOL, lambda asked: [True] * len(asked))
    table = manager.table
    assert isinstance(table, PooledTable)
    written = manager.prepare_stores([StoreOffer(keys[:2], None)])
    manager.note_copies(keys[:2])
    manager.list_on_device([StoreOffer(keys[2:], None)])
    assert not manager.prepare_saves(keys[2:]).keys, "both slots are being written"
    written.commit()
    assert len(table.take_copies(1, lambda slots: [True] * len(slots))) == 1


def test_the_slot_of_what_comes_from_below_although_the_device_has_it_is_taken() -> None:
    """Found by seeds: such a chunk counted as none of the device's, so what the device lost then found no slot."""
    manager = make_manager("lru", 1)
    keys = [offload_key(bytes([number]) * 32, 0) for number in range(2)]
    assert manager.pool_with_device(POOL, lambda asked: [True] * len(asked))
    manager.list_on_device([StoreOffer(keys, None)])
    manager.prepare_stores([StoreOffer(keys[:1], None)]).commit()
    manager.prepare_saves(keys[1:]).commit()
    assert manager.lookup_run(keys[1:]) and manager.listed(keys) == keys[:1]


def test_what_is_being_saved_is_brought_back_when_its_hint_ends() -> None:
    """Found by seeds: a listed chunk that a hint had lowered stayed lowered if the hint ended while it was saved."""
    manager = make_manager("reuse-index", 4)
    keys = [offload_key(bytes([number]) * 32, 0) for number in range(2)]
    assert manager.pool_with_device(POOL, lambda asked: [True] * len(asked))
    manager.list_on_device([StoreOffer(keys, None)])
    assert manager.rank(keys, 0) == len(keys)
    saved = manager.prepare_saves(keys)
    manager.rank(keys, NORMAL)
    saved.commit()
    assert manager.shares is not None and manager.shares.num_aside == 0
    manager.check()


@pytest.mark.parametrize("order", [1, -1])
def test_only_to_lose_a_beginning_alone_takes_a_look_at_all_slots(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by sampling: each listed chunk that the device lost took a look, half of a step's time with 40,000 slots."""
    manager = make_manager("lru", POOL)
    assert manager.pool_with_device(POOL, lambda asked: [True] * len(asked))
    (keys,) = documents(1, 8)
    manager.list_on_device([StoreOffer(keys, None)])
    looks = MagicMock(side_effect=np.frombuffer)
    monkeypatch.setattr(np, "frombuffer", looks)
    manager.note_lost(keys[4:][::order])
    assert not looks.called
    manager.note_lost(keys[:2][::order])
    manager.check()
    assert looks.call_count == 1 and manager.parents(keys[2:4]) == {keys[2]: None, keys[3]: keys[2]}
    assert manager.listed(keys) == keys[2:4]


def test_a_chunk_that_two_requests_offer_in_one_step_is_one_copy() -> None:
    """Found by seed 79100065: what a step offers is noted at once, and the slot of such a chunk was taken twice."""
    manager = make_manager("lru", 3)
    keys = [offload_key(bytes([number]) * 32, 0) for number in range(5)]
    assert manager.pool_with_device(POOL, lambda asked: [True] * len(asked))
    manager.prepare_stores([StoreOffer(keys[:3], None)]).commit()
    manager.note_lost(keys[:2])
    manager.note_copies([keys[2], keys[2]])
    manager.list_on_device([StoreOffer(keys[3:], None)])
    manager.prepare_saves(keys[3:]).commit()
    manager.check()


def test_what_nothing_is_evicted_for_is_saved_within_its_tenants_limit_too() -> None:
    """Found by a seed: of chunks that a hint had lowered, a tenant had more in free slots than it may have."""
    manager = make_manager("lru", POOL, quotas={"a": Limits(hard=4)})
    assert manager.pool_with_device(POOL, lambda keys: [False] * len(keys))
    (keys,) = documents(1, 8)
    manager.list_on_device([StoreOffer(keys, None, "a")])
    assert manager.rank(keys, 0, "a") == 8
    assert len(manager.prepare_saves(keys).keys) == 4
    manager.check()
