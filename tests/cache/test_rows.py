"""Chunks that differ in size: their rows are theirs alone, all rows come back, and hardly any memory is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from cargohold.blocks import READY
from cargohold.cache import StoreOffer, TierManager, make_manager
from cargohold.cache.manager import ChunkPins, OffloadKey, SlotReservation, offload_key
from cargohold.cache.policies import POLICIES
from cargohold.cache.rows import plan_rows
from cargohold.cache.shares import Limits
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout

CHUNK_ROWS = (5, 4, 3)


def layout_with(sizes: Sequence[int]) -> KVCacheLayout:
    groups = [
        KVCacheGroup(at, AttentionKind.FULL, 16, (f"layer.{at}",), block_bytes=size) for at, size in enumerate(sizes)
    ]
    return KVCacheLayout(tuple(groups), 4, max(sizes), 16)


@pytest.mark.parametrize("seed", range(200))
def test_blocks_fit_into_their_rows_and_leave_little_of_them(seed: int) -> None:
    dice = Random(seed)
    sizes = [dice.choice((1, 16, 576, 4096)) * dice.randint(200, 1000) for _ in range(dice.randint(1, 6))]
    layout = layout_with(sizes)
    plan = plan_rows(layout)
    even = 1 - sum(sizes) / (max(sizes) * len(sizes))
    assert plan.most <= 16
    assert all(
        (count - 1) * plan.row_bytes < size <= count * plan.row_bytes
        for size, count in zip(sizes, plan.per_block, strict=True)
    )
    padding = 1 - sum(sizes) / (plan.row_bytes * sum(plan.per_block))
    assert padding <= even
    if not plan.is_even:
        assert plan.row_bytes <= min(sizes), "the last row of a block begins in the block"


@pytest.mark.parametrize("sizes", [(4096,), (4096, 4096), (4096, 4080)])
def test_where_sizes_hardly_differ_a_block_is_a_row(sizes: tuple[int, ...]) -> None:
    plan = plan_rows(layout_with(sizes))
    assert plan.is_even and plan.row_bytes == 4096


class Stream:
    """Random traffic to a manager, and what must lie in each row meanwhile."""

    def __init__(self, manager: TierManager, dice: Random) -> None:
        self.manager, self.dice = manager, dice
        self.in_row: dict[int, OffloadKey] = {}
        self.writing: list[SlotReservation] = []
        self.reading: list[ChunkPins] = []

    def prefix(self) -> list[OffloadKey]:
        group, chain = self.dice.randrange(3), self.dice.randrange(12)
        hashes = [hashlib.sha256(f"{chain}/{at}".encode()).digest() for at in range(self.dice.randint(1, 9))]
        return [offload_key(each, group) for each in hashes]

    def run(self, num_steps: int) -> None:
        moves = [self.store, self.store, self.store, self.end_store, self.end_store, self.load, self.end_load, self.use]
        for _ in range(num_steps):
            self.dice.choice(moves)()
            self.manager.check()
        while self.writing or self.reading:
            self.end_store()
            self.end_load()

    def store(self) -> None:
        offers = [
            StoreOffer(self.prefix(), tenant=self.dice.choice((None, "a"))) for _ in range(self.dice.randint(1, 3))
        ]
        handle = self.manager.prepare_stores(offers)
        slots = [rows for store in self.writing for rows in store.slots]
        slots += [rows for load in self.reading for rows in load.slots]
        busy = {row for rows in slots for row in rows}
        taken = [row for rows in handle.slots for row in rows]
        assert len(set(taken)) == len(taken) and busy.isdisjoint(taken), "a row has two owners"
        assert [len(rows) for rows in handle.slots] == [CHUNK_ROWS[key[-4]] for key in handle.keys]
        self.writing.append(handle)

    def end_store(self) -> None:
        if self.writing:
            handle = self.writing.pop(self.dice.randrange(len(self.writing)))
            if self.dice.random() < 0.2:
                handle.forfeit()
                return
            self.in_row.update((row, key) for key, rows in zip(handle.keys, handle.slots, strict=True) for row in rows)
            handle.commit()

    def load(self) -> None:
        keys = self.prefix()
        there = self.manager.lookup_run(keys)
        assert there == bytes([READY]) * len(there)
        handle = self.manager.prepare_load(keys[: len(there)])
        for key, rows in zip(handle.keys, handle.slots, strict=True):
            assert {self.in_row[row] for row in rows} == {key}, "a row holds another chunk's bytes"
        self.reading.append(handle)

    def end_load(self) -> None:
        if self.reading:
            handle = self.reading.pop(self.dice.randrange(len(self.reading)))
            handle.release(handle.keys[:1] if self.dice.random() < 0.2 else ())

    def use(self) -> None:
        self.manager.touch(self.prefix())


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_rows_belong_to_one_chunk_at_a_time_and_all_come_back(policy: str, seed: int) -> None:
    quotas = {"a": Limits(reserved=2, soft=4, hard=6)} if seed else {}
    manager = make_manager(policy, 8 + 9 * seed, chunk_rows=CHUNK_ROWS, quotas=quotas if policy in TAKE_QUOTAS else {})
    Stream(manager, Random(f"{policy}/{seed}")).run(250)
    assert manager.reset()
    manager.check()
    ready, _ = manager.fill
    assert (ready, manager.num_free) == (0, manager.capacity)


TAKE_QUOTAS = {name for name in POLICIES if make_manager(name, 1).takes_hints}


@pytest.mark.parametrize("policy", ["fifo", "lru"])
def test_large_chunks_find_room_where_small_ones_were(policy: str) -> None:
    """One large chunk needs the rows of several small ones, wherever they lie; none of the memory is lost for it."""
    manager = make_manager(policy, 12, chunk_rows=CHUNK_ROWS)
    for group in (2, 0, 1, 0):
        for number in range(40):
            handle = manager.prepare_store([offload_key(bytes([group, number] * 16), group)])
            assert len(handle.keys) == 1 and not handle.deferred
            handle.commit()
        ready, size = manager.fill
        assert size - ready < max(CHUNK_ROWS) + CHUNK_ROWS[group], "rows that nobody can use"
        manager.check()


def test_of_a_prompt_longer_than_the_tier_the_beginning_is_kept() -> None:
    manager = make_manager("lru", 4, chunk_rows=CHUNK_ROWS)
    keys = [offload_key(bytes([at] * 32), 1) for at in range(9)]
    handle = manager.prepare_store(keys)
    assert list(handle.keys) == keys[: len(handle.keys)] and len(handle.keys) == 4
    assert not handle.deferred
    handle.commit()


def tokens_held(per_chunk: Sequence[int]) -> Iterator[int]:
    manager = make_manager("lru", 60, chunk_rows=per_chunk)
    for number in range(400):
        for group in range(len(per_chunk)):
            manager.prepare_store([offload_key(number.to_bytes(32, "little"), group)]).commit()
        yield manager.num_ready


def test_what_is_stored_in_place_of_what_was_evicted_fills_the_memory_for_ever() -> None:
    """Chunks of all sizes come and go together: after hundreds of turns, as much is held as at first."""
    held = list(tokens_held(CHUNK_ROWS))[100:]
    assert max(held) - min(held) <= 2 and min(held) >= 0.95 * 60 * 5 * 3 / sum(CHUNK_ROWS)
