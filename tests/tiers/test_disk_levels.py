"""A disk evicts what hints have lowered first, and what they have leased last, also after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.cache.retention import HELD, NO_RETENTION, Retention
from cargohold.tiers import StoreOutcome
from cargohold.tiers.chunk_format import ChunkCodec, Note
from cargohold.tiers.disk import DiskTier
from tests.tiers.common import NAMESPACE, disk_tier, key, payload

SMALL = 200
LEASE, RAISED, LOWERED = Retention(HELD, 100.0), Retention(80, 100.0), Retention(10)


class Clock:
    """Time of day in seconds."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def ns(self) -> int:
        self.now += 1e-6
        return int(self.now * 1e9)


class World:
    """A small disk that is full of chunks 0, 1, ..., each a prefix of its own, the first one stored first."""

    def __init__(self, place: Path, retained: dict[int, Retention], policy: str = "lru") -> None:
        self.clock = Clock()
        self.place, self.policy = place, policy
        self.tier = self.open()
        self.count = 0
        while not self.tier.take_losses():
            self.store(self.count)
            self.count += 1
        self.tier.remove([key(number) for number in range(self.count)])
        self.count -= 1  # as many as there is room for
        for number in range(self.count):
            self.store(number, retained.get(number, NO_RETENTION))

    def open(self) -> DiskTier:
        using = ChunkCodec(replace(NAMESPACE, details_bytes=256), None, self.clock.ns)
        return disk_tier(self.place, "256KiB", using=using, chunk_bytes=SMALL, policy=self.policy)

    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()

    def store(self, number: int, asked: Retention = NO_RETENTION) -> StoreOutcome:
        return self.tier.store(key(number), memoryview(payload(number, SMALL)), None, Note(retention=asked))

    def evicted_by(self, num_new: int) -> list[int]:
        """Store new chunks; return which others were evicted, in order."""
        self.tier.take_losses()
        first, self.count = self.count, self.count + num_new
        for number in range(first, self.count):
            assert self.store(number) is StoreOutcome.STORED
        self.tier.check()
        return [int.from_bytes(chunk[:32], "big") for chunk in self.tier.take_losses().keys]


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("policy", ["lru", "fifo", "arc"])
def test_lowered_chunks_go_first_and_leased_ones_stay(tmp_path: Path, policy: str, is_restarted: bool) -> None:
    world = World(tmp_path, {1: LEASE, 2: RAISED, 9: LOWERED, 8: Retention(5)}, policy)
    if is_restarted:
        world.restart()
    assert world.evicted_by(2) == [8, 9], "the lowest first"
    lost = world.evicted_by(3 * world.count)
    assert not {1, 2} & set(lost) and len(set(lost)) == len(lost)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_lease_ends_with_its_time(tmp_path: Path, is_restarted: bool) -> None:
    world = World(tmp_path, {1: LEASE, 2: RAISED})
    if is_restarted:
        world.restart()
    world.clock.now += 101.0
    assert {1, 2} <= set(world.evicted_by(world.count))


def test_what_has_ended_when_the_next_engine_starts_counts_for_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, {1: LEASE, 2: RAISED})
    world.clock.now += 101.0
    world.restart()
    assert {1, 2} <= set(world.evicted_by(world.count))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_hints_that_come_later_count_as_well(tmp_path: Path, is_restarted: bool) -> None:
    world = World(tmp_path, {3: LEASE})
    world.tier.rank([key(1), key(7), key(3), key(99_999)], [LEASE, LOWERED, NO_RETENTION, LEASE])
    if is_restarted:
        world.restart()
    assert world.evicted_by(1) == [7]
    lost = world.evicted_by(world.count)
    assert 1 not in lost and 3 in lost
    into = bytearray(SMALL)
    world.tier.load(key(1), memoryview(into))
    assert bytes(into) == payload(1, SMALL)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_lowered_chunk_that_is_used_is_normal_again(tmp_path: Path, is_restarted: bool) -> None:
    world = World(tmp_path, {7: LOWERED, 8: LOWERED})
    world.tier.touch([key(7)])
    if is_restarted:
        world.restart()
    assert world.evicted_by(1) == [8]
    assert 7 not in world.evicted_by(2)


def test_a_lease_is_renewed_by_a_later_one_and_ended_by_none(tmp_path: Path) -> None:
    world = World(tmp_path, {1: LEASE})
    world.clock.now += 60.0
    world.tier.rank([key(1)], [LEASE])
    world.clock.now += 60.0
    assert 1 not in world.evicted_by(world.count)
    world.tier.rank([key(1)], [NO_RETENTION])
    assert 1 in world.evicted_by(world.count)


def test_what_hints_ask_is_not_written_into_the_header_of_another_chunk(tmp_path: Path) -> None:
    world = World(tmp_path, {})
    (ours, theirs) = (
        next(path for path in sorted(tmp_path.rglob("*")) if path.is_file() and key(number) in path.read_bytes())
        for number in (1, 2)
    )
    before = theirs.read_bytes()
    with ours.open("r+b") as changed:  # by others: where the index has chunk 1, there is chunk 2
        changed.write(before)
    world.tier.rank([key(1)], [LEASE])
    assert ours.read_bytes() == before
    world.tier.rank([key(2)], [LEASE])
    assert theirs.read_bytes() != before


def test_leases_cover_at_most_a_quarter_of_the_slots_and_raised_priorities_half(tmp_path: Path) -> None:
    world = World(tmp_path, {})
    there = [number for number in range(world.count) if world.tier.probe([key(number)])[0]]
    num_slots = len(there)
    world.tier.rank([key(number) for number in there], [LEASE] * num_slots)
    lost = world.evicted_by(3 * num_slots)
    assert set(there) - set(lost) == set(there[: num_slots // 4]), "the first that were leased"
    world.tier.rank([key(number) for number in there], [NO_RETENTION] * num_slots)
    there = [number for number in range(world.count) if world.tier.probe([key(number)])[0]]
    world.tier.rank([key(number) for number in there], [RAISED] * num_slots)
    lost = world.evicted_by(3 * num_slots)
    assert set(there) - set(lost) == set(there[: num_slots // 2])


def test_of_what_leases_may_cover_one_tenant_has_half(tmp_path: Path) -> None:
    world = World(tmp_path, {})
    there = [number for number in range(world.count) if world.tier.probe([key(number)])[0]]
    limit = len(there) // 4
    world.tier.rank([key(number) for number in there], [Retention(HELD, 100.0, b"tenant-7")] * len(there))
    lost = world.evicted_by(3 * len(there))
    assert set(there) - set(lost) == set(there[: limit - limit // 2])


def test_a_policy_with_an_order_of_its_own_keeps_it(tmp_path: Path) -> None:
    world = World(tmp_path, {1: LEASE}, "tests.cache.policies.naive_policies:NaiveFIFO")
    assert 1 in world.evicted_by(world.count)
