"""The disk tier against a dictionary, under any sequence of calls and restarts; its index slot by slot; a disk really full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from cargohold.cache.policies import find_policy
from cargohold.tiers import LoadOutcome, StoreOutcome
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.root import bytes_in
from cargohold.tiers.disk.slot_index import SlotIndex
from tests.tiers.common import codec, disk_tier, key, load, payload

NUM_KEYS = 40
SMALL = 3000
MAX_BYTES = 320 * 1024


def step(random: Random, tier: DiskTier, model: dict[int, bytes]) -> None:
    number = random.randrange(NUM_KEYS)
    match random.randrange(6):
        case 0:
            victims = random.sample(range(NUM_KEYS), 2)
            tier.remove([key(victim) for victim in victims])
            for victim in victims:
                model.pop(victim, None)
        case 1:
            tier.touch([key(other) for other in range(number, number + 3)])
        case 2 | 3:
            found = load(tier, number, SMALL)
            assert found in {LoadOutcome.ABSENT, model.get(number)}
        case _:
            parent = key(number - 1) if number % 5 else None
            outcome = tier.store(key(number), memoryview(payload(number, SMALL)), parent)
            if outcome is StoreOutcome.PRESENT:
                assert number in model
            if outcome is StoreOutcome.STORED:
                model[number] = payload(number, SMALL)
                assert load(tier, number, SMALL) == model[number]


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse-index"])
def test_like_a_dictionary_that_forgets(tmp_path: Path, policy: str) -> None:
    random = Random(policy)
    model: dict[int, bytes] = {}
    first, second = codec(packs=True), codec()
    tier = disk_tier(tmp_path, MAX_BYTES, chunk_bytes=SMALL, policy=policy, using=first)
    for _ in range(20):
        for _ in range(60):
            step(random, tier, model)
        tier.check()
        present = tier.probe([key(number) for number in range(NUM_KEYS)])
        assert {number for number in range(NUM_KEYS) if present[number]} <= set(model)
        assert bytes_in(tmp_path) <= MAX_BYTES
        tier.close()
        first, second = second, first
        tier = disk_tier(tmp_path, MAX_BYTES, chunk_bytes=SMALL, policy=policy, using=first)
        tier.check()
        assert tier.probe([key(number) for number in range(NUM_KEYS)]) == present
        model = {number: data for number, data in model.items() if present[number]}
    assert len(model) > 15


def index_of(num_slots: int) -> SlotIndex:
    index = SlotIndex(num_slots, find_policy("lru"))
    index.add_slots(num_slots)
    return index


def test_a_slot_is_free_when_its_last_reader_has_let_go() -> None:
    index = index_of(1)
    slot = index.reserve(key(1), None)
    assert slot == 0
    index.commit(slot)
    assert index.pin(key(1)) == slot and index.pin(key(1)) == slot
    assert index.discard([key(1), key(1)]) == [slot]
    assert index.pin(key(1)) is None and not index.is_current(key(1), slot)
    for _ in range(2):
        assert index.reserve(key(2), None) is StoreOutcome.REFUSED
        index.check()
        index.unpin(slot)
    assert index.reserve(key(2), None) == slot
    index.check()


def test_a_chunk_being_written_cannot_be_read_or_removed_and_is_no_victim() -> None:
    index = index_of(1)
    slot = index.reserve(key(1), None)
    assert isinstance(slot, int)
    assert not index.contains(key(1)) and index.is_known(key(1))
    assert index.pin(key(1)) is None
    assert index.discard([key(1)]) == []
    assert index.reserve(key(2), None) is StoreOutcome.LATER, "when that is written, its slot can be had"
    index.check()
    index.forfeit(slot)
    assert not index.is_known(key(1)) and index.has_free
    index.check()


def test_what_is_ready_counts_and_what_is_discarded_leaves_room_at_once() -> None:
    index = index_of(2)
    slots = [index.reserve(key(number), None) for number in range(2)]
    assert index.num_ready == 0
    for at, slot in enumerate(slots):
        assert isinstance(slot, int)
        index.commit(slot)
        assert index.num_ready == at + 1
    assert index.discard([key(0)]) == [0]
    assert index.num_ready == 1 and index.has_free
    assert index.reserve(key(2), None) == 0 and index.contains(key(1)), "nothing was evicted for it"
    index.check()


@pytest.mark.parametrize("policy", ["lru", "fifo", "arc", "reuse-index"])
@pytest.mark.parametrize("is_restored", [False, True])
def test_no_chunk_before_it_is_evicted_for_the_end_of_a_prefix(policy: str, *, is_restored: bool) -> None:
    index = SlotIndex(4, find_policy(policy))
    index.add_slots(4)
    if is_restored:
        places = [(number,) for number in range(4)]
        index.forget_free(places)
        index.restore([key(number) for number in range(4)], places, b"")
    else:
        for number in range(4):
            slot = index.reserve(key(number), key(number - 1) if number else None)
            assert isinstance(slot, int)
            index.commit(slot)
    assert index.reserve(key(4), key(3)) is StoreOutcome.REFUSED
    assert index.num_ready == 4
    index.check()


def test_low_slots_come_first_and_more_can_be_added() -> None:
    index = SlotIndex(4, find_policy("lru"))
    assert index.reserve(key(0), None) is StoreOutcome.REFUSED
    index.add_slots(2)
    assert [index.reserve(key(number), None) for number in range(2)] == [0, 1]
    index.add_slots(2)
    assert [index.reserve(key(number), None) for number in (2, 3)] == [2, 3]
    index.check()


def test_a_thread_has_one_bounce_buffer_however_many_files_there_are(tmp_path: Path) -> None:
    size = 4 * 1024 * 1024 + 1  # no whole number of pages, and encrypted: nothing can be read or written in place
    tier = disk_tier(tmp_path, "200MiB", using=codec(bytes(32)), chunk_bytes=size)
    process = psutil.Process()
    chunk = memoryview(payload(1, size))
    into = bytearray(size)
    before = 0
    for number in range(30):
        tier.store(key(number), chunk)
        assert tier.load(key(number), memoryview(into)) is LoadOutcome.LOADED
        if number == 4:
            before = process.memory_info().rss
    assert len(list(tmp_path.glob("*/segment-*.data"))) > 8
    assert process.memory_info().rss - before < 6 * size
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("this process may not mount file systems")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_others_fill_up(small_disk: Path) -> None:
    tier = disk_tier(small_disk / "kv", "6MiB", chunk_bytes=100_000)
    chunks = [payload(number, 100_000) for number in range(100)]

    def store_all() -> list[StoreOutcome]:
        return [tier.store(key(number), memoryview(chunk)) for number, chunk in enumerate(chunks)]

    (small_disk / "other").write_bytes(bytes(8 * 1024 * 1024 - 64 * 1024))
    assert set(store_all()) == {StoreOutcome.REFUSED}
    (small_disk / "other").write_bytes(bytes(5 * 1024 * 1024))
    store_all()
    assert store_all()[-1] in {StoreOutcome.STORED, StoreOutcome.PRESENT}
    num_kept = sum(tier.probe([key(number) for number in range(100)]))
    assert 10 < num_kept < 32
    (small_disk / "other").unlink()
    store_all()
    kept = [number for number in range(100) if tier.probe([key(number)])[0]]
    assert len(kept) > 40, "it took the room that became free"
    assert all(load(tier, number, 100_000) == chunks[number] for number in kept)
    tier.check()
    tier.close()
