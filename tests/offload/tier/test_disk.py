"""The disk tier among disks that fill up, directories that vanish, and other processes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.errors import ConfigError, TierError
from cargohold.offload.tier import LoadOutcome, StoreOutcome
from cargohold.offload.tier.config import DiskTierConfig
from cargohold.offload.tier.disk import DiskTier
from cargohold.offload.tier.disk import files as disk_files
from cargohold.offload.tier.disk import shard as disk_shard
from cargohold.offload.tier.disk.folders import delete_shard
from cargohold.offload.tier.disk.locks import DirectoryLock, brief_lock
from cargohold.offload.tier.disk.root import bytes_in
from cargohold.offload.tier.factory import open_tier
from tests.offload.tier.common import (
    CHUNK,
    NAMESPACE,
    codec,
    disk_tier,
    key,
    load,
    needs_root,
    payload,
    run_as_nobody,
    spoil_reads,
)

MIB = 1024**2
WAIT_S = 30.0  # a bound on hangs, not a measure


def store(tier: DiskTier, number: int, parent: int | None = None) -> StoreOutcome:
    return tier.store(key(number), memoryview(payload(number)), None if parent is None else key(parent))


def present(tier: DiskTier, count: int) -> list[int]:
    return [number for number, is_there in enumerate(tier.probe([key(n) for n in range(count)])) if is_there]


def fill(tier: DiskTier, count: int) -> list[StoreOutcome]:
    return [store(tier, number) for number in range(count)]


# --- budget and eviction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_budget_is_kept_at_every_moment_and_the_oldest_make_room(tmp_path: Path, policy: str) -> None:
    tier = disk_tier(tmp_path, 1 * MIB, policy=policy)
    usage = tier.usage()
    assert usage.capacity_bytes is not None and 0.8 * MIB < usage.capacity_bytes <= 1 * MIB
    for number in range(150):
        assert store(tier, number) is not StoreOutcome.PRESENT
        assert bytes_in(tmp_path) <= 1 * MIB
        tier.check()
    kept = present(tier, 150)
    assert 60 <= len(kept) < 90
    assert tier.usage().num_bytes <= usage.capacity_bytes
    assert all(load(tier, number) == payload(number) for number in kept)
    if policy in {"lru", "fifo"}:
        assert kept == list(range(150 - len(kept), 150))


def test_what_is_touched_stays(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 1 * MIB)
    fill(tier, 60)
    for number in range(60, 150):
        tier.touch([key(3), key(5)])
        store(tier, number)
    assert {3, 5} <= set(present(tier, 150)) and 4 not in present(tier, 150)


def test_a_chunk_is_never_evicted_for_its_own_child(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 1 * MIB)
    number = 0
    while store(tier, number, number - 1 if number else None) is StoreOutcome.STORED:
        number += 1
    assert 60 <= number < 90
    assert present(tier, 150) == list(range(number))
    assert store(tier, 1000) is StoreOutcome.STORED, "another prefix may have the place of the last"
    assert present(tier, 150) == list(range(number - 1))


def open_both_shards(root: Path, max_bytes: int) -> list[DiskTier]:
    """Those of an engine with two workers."""
    return [disk_tier(root, max_bytes, using=codec(split=f"rank {rank} of 2"), num_shards=2) for rank in range(2)]


def test_shards_share_the_budget(tmp_path: Path) -> None:
    tiers = open_both_shards(tmp_path, 2 * MIB)
    for number in range(150):
        for tier in tiers:
            store(tier, number)
        assert bytes_in(tmp_path) <= 2 * MIB
    assert all(len(present(tier, 150)) > 50 for tier in tiers)


def test_a_smaller_budget_takes_effect_at_the_next_start(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 4 * MIB)
    fill(tier, 300)
    tier.close()
    tier = disk_tier(tmp_path, 1 * MIB)
    assert bytes_in(tmp_path) <= 1 * MIB
    kept = present(tier, 300)
    assert 20 < len(kept) < 90
    assert all(load(tier, number) == payload(number) for number in kept)
    tier.check()


def test_a_smaller_budget_holds_for_what_others_left_too(tmp_path: Path) -> None:
    for weights in ("other", "w"):
        tier = disk_tier(tmp_path, 6 * MIB, using=codec(weights=weights))
        fill(tier, 150)
        tier.close()
    tier = disk_tier(tmp_path, 3 * MIB)
    assert bytes_in(tmp_path) <= 3 * MIB
    assert len(present(tier, 150)) > 100


def test_a_smaller_budget_makes_all_workers_give_up_their_share(tmp_path: Path) -> None:
    """Found by reading: the first to start deleted all that the others had, and with it the use of its own."""
    for tier in open_both_shards(tmp_path, 4 * MIB):
        fill(tier, 145)
        tier.close()
    tiers = open_both_shards(tmp_path, 3 * MIB)
    assert bytes_in(tmp_path) <= 3 * MIB
    assert all(len(present(tier, 145)) > 90 for tier in tiers)


def test_a_smaller_budget_spares_nothing_of_an_engine_with_another_number_of_workers(tmp_path: Path) -> None:
    """Nobody will open that again, and give up what is above its share."""
    alone = disk_tier(tmp_path, 4 * MIB)
    fill(alone, 290)
    alone.close()
    disk_tier(tmp_path, 3 * MIB, using=codec(split="rank 0 of 2"), num_shards=2)
    assert bytes_in(tmp_path) <= 3 * MIB


def test_a_smaller_budget_deletes_no_shard_of_which_cannot_be_read_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: it counted as another engine's, and went as a whole though a part of it was too much."""
    for tier in open_both_shards(tmp_path, 4 * MIB):
        fill(tier, 100)
        tier.close()
    other = tmp_path / codec(split="rank 1 of 2").namespace.id
    with monkeypatch.context() as patch:
        spoil_reads(patch, other / "shard.json")
        disk_tier(tmp_path, 2 * MIB, using=codec(split="rank 0 of 2"), num_shards=2).close()
    assert all(len(present(tier, 100)) > 50 for tier in open_both_shards(tmp_path, 2 * MIB))


def test_a_tier_that_could_not_be_opened_holds_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one chunk of one worker needs") as caught:
        disk_tier(tmp_path, "8KiB")
    assert store(disk_tier(tmp_path), 1) is StoreOutcome.STORED
    del caught


def test_chunks_of_another_size_make_the_shard_start_anew(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    fill(tier, 3)
    tier.close()
    tier = disk_tier(tmp_path, chunk_bytes=3 * CHUNK)
    assert present(tier, 3) == []
    assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)


# --- what others left -----------------------------------------------------------------------------------------------------


def test_a_description_that_cannot_be_read_costs_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by review: one failed read of 600 bytes at a start deleted all chunks, and nothing was logged."""
    tier = disk_tier(tmp_path)
    fill(tier, 20)
    tier.close()
    (description,) = tmp_path.glob("*/shard.json")
    with monkeypatch.context() as patch:
        spoil_reads(patch, description)
        with pytest.raises(ConfigError, match=f"{description}: Input/output error"):
            disk_tier(tmp_path)
    assert present(disk_tier(tmp_path), 20) == list(range(20))


@pytest.mark.parametrize("why", ["shard.json is missing or damaged", "they do not fit into max_bytes"])
def test_chunks_that_are_deleted_at_a_start_are_told(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk_tier(tmp_path)
    fill(tier, 100)
    tier.close()
    max_bytes = 2 * MIB
    if "shard.json" in why:
        next(tmp_path.glob("*/shard.json")).write_text("{")
    else:
        max_bytes = MIB
    tier = disk_tier(tmp_path, max_bytes)
    assert f"segments with chunks, because {why}" in caplog.text and len(present(tier, 100)) < 100
    tier.remove([key(number) for number in range(100)])
    tier.close()
    caplog.clear()
    next(tmp_path.glob("*/shard.json")).unlink()
    disk_tier(tmp_path, max_bytes)
    assert not caplog.text, "of segments without chunks nothing is told"


def test_unused_namespaces_go_when_room_is_needed_the_oldest_first(tmp_path: Path) -> None:
    for at, weights in enumerate(["old", "newer"]):
        tier = disk_tier(tmp_path, 1 * MIB, using=codec(weights=weights))
        fill(tier, 20)
        tier.close()
        os.utime(tmp_path / codec(weights=weights).namespace.id / "lock", (at + 1, at + 1))
    tier = disk_tier(tmp_path, 1 * MIB)
    assert fill(tier, 40) == [StoreOutcome.STORED] * 40
    assert bytes_in(tmp_path) <= 1 * MIB
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert codec(weights="old").namespace.id not in left
    assert codec(weights="newer").namespace.id in left, "no more than needed"


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_namespace_used_until_now_is_not_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Found by reading: what counted was when an engine had begun to use it, be that a month ago."""
    lasting = disk_tier(tmp_path, 1 * MIB, using=codec(weights="lasting"))
    fill(lasting, 20)
    lasting_path, brief_path = (tmp_path / codec(weights=name).namespace.id for name in ("lasting", "brief"))
    os.utime(lasting_path / "lock", (1, 1))
    brief = disk_tier(tmp_path, 1 * MIB, using=codec(weights="brief"))
    fill(brief, 20)
    brief.close()
    os.utime(brief_path / "lock", (1000, 1000))
    lasting.touch([key(0)])  # from time to time it says so
    if how == "closed":
        lasting.close()
    else:
        monkeypatch.setattr(DirectoryLock, "note_use", lambda _: None)
        lasting.close()
        monkeypatch.undo()
    fill(disk_tier(tmp_path, 1 * MIB), 40)
    left = {path for path in tmp_path.iterdir() if path.is_dir()}
    assert lasting_path in left and brief_path not in left


def test_a_namespace_that_was_moved_elsewhere_and_linked_is_left_alone(tmp_path: Path) -> None:
    """Found by reading: it can not be deleted, so every store failed that needed room."""
    root = tmp_path / "kv"
    other = disk_tier(root, 1 * MIB, using=codec(weights="other"))
    fill(other, 20)
    other.close()
    other_path = root / codec(weights="other").namespace.id
    other_path.rename(tmp_path / "elsewhere")
    other_path.symlink_to(tmp_path / "elsewhere")
    (root / "notes.txt").write_bytes(bytes(MIB // 2))
    tier = disk_tier(root, 1 * MIB)
    assert set(fill(tier, 60)) == {StoreOutcome.STORED}
    assert 0 < len(present(tier, 60)) < 60, "the budget was used up"
    tier.close()
    assert load(disk_tier(root, 2 * MIB, using=codec(weights="other")), 3) == payload(3)


def test_namespaces_in_use_are_left_alone(tmp_path: Path) -> None:
    other = disk_tier(tmp_path, 1 * MIB, using=codec(weights="other"))
    fill(other, 40)
    tier = disk_tier(tmp_path, 1 * MIB)
    fill(tier, 100)
    assert bytes_in(tmp_path) <= 1 * MIB
    assert present(other, 40) == list(range(40))
    assert 10 < len(present(tier, 100)) < 60
    assert all(load(other, number) == payload(number) for number in range(40))


@pytest.mark.parametrize("shortage", ["of the budget", "of the disk"])
def test_unused_namespaces_stay_if_deleting_them_all_would_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortage: str
) -> None:
    """Found by reading: they were deleted one after the other, and then the chunk was refused."""
    other = disk_tier(tmp_path, 1 * MIB, using=codec(weights="other"))
    fill(other, 20)
    other.close()
    tier = disk_tier(tmp_path, 1 * MIB, reserve_bytes=1 * MIB)
    if shortage == "of the budget":
        (tmp_path / "notes.txt").write_bytes(bytes(MIB))
    else:
        fill(tier, 45)  # with one segment more, the budget would be exceeded
        monkeypatch.setattr(disk_shard, "free_bytes", lambda _: 0)
        tier._growth_pause = 0
    before = tier._state.shard.num_slots
    for number in range(100, 200):
        store(tier, number)
    assert tier._state.shard.num_slots == before
    tier.close()
    assert present(disk_tier(tmp_path, 2 * MIB, using=codec(weights="other")), 20) == list(range(20))


def test_unused_namespaces_make_room_on_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_shard, "free_bytes", lambda _: MIB // 2 - bytes_in(tmp_path))
    other = disk_tier(tmp_path, 1 * MIB, using=codec(weights="other"))
    fill(other, 60)
    other.close()
    tier = disk_tier(tmp_path, 1 * MIB)
    assert fill(tier, 20) == [StoreOutcome.STORED] * 20
    assert bytes_in(tmp_path) <= MIB // 2


def test_strange_files_are_counted_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(bytes(MIB // 2))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    tier = disk_tier(tmp_path, 1 * MIB)
    fill(tier, 100)
    assert bytes_in(tmp_path) <= 1 * MIB
    assert (tmp_path / "photos" / "cat.png").read_bytes() == b"cat"


# --- disks that fill up ------------------------------------------------------------------------------------------------


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """The process can open that many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_large_budget_leaves_files_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by counting: beyond 85 GiB a process had no file left, where it may have 1024."""
    size = 60_000
    monkeypatch.setattr(disk_shard, "_SEGMENT_BYTES", 64 * 1024)
    tier = disk_tier(tmp_path, 64 * MIB, chunk_bytes=size)
    with few_files(512):
        for number in range(1000):
            assert tier.store(key(number), memoryview(payload(number % 8, size))) is StoreOutcome.STORED
    assert tier.usage().num_chunks == 1000


def test_a_much_larger_budget_starts_anew_with_larger_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Found by playing: the files stayed as small as before, so many were needed that the process could open no other."""
    tier = disk_tier(tmp_path, 1 * MIB)
    fill(tier, 100)
    tier.close()
    with few_files(512):
        tier = disk_tier(tmp_path, 32 * MIB)
        assert present(tier, 100) == [] and "starting again with nothing" in caplog.text
        assert fill(tier, 2400) == [StoreOutcome.STORED] * 2400
        assert tier.usage().num_bytes > 28 * MIB
        tier.close()
        caplog.clear()
        assert len(present(disk_tier(tmp_path, 32 * MIB), 2400)) == tier.usage().num_chunks
    assert not caplog.text


def test_a_larger_budget_keeps_the_chunks_and_no_more_files_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk_tier(tmp_path, 1 * MIB)
    fill(tier, 60)
    tier.close()
    twice = disk_tier(tmp_path, 2 * MIB)
    assert present(twice, 60) == list(range(60)) and not caplog.text
    assert (twice.usage().capacity_bytes or 0) > 1.9 * MIB
    twice.close()
    monkeypatch.setattr(disk_shard, "_MOST_SEGMENTS", 25)
    tier = disk_tier(tmp_path, 2 * MIB)
    assert present(tier, 60) == list(range(60))
    assert "can hold only 1.1 MiB of 2.0 MiB; to use all, delete this directory" in caplog.text
    fill(tier, 300)
    assert len(tier._state.shard.segments) == 25
    tier.check()


def test_a_large_budget_can_be_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_shard, "_SEGMENT_BYTES", 64 * 1024)
    tier = disk_tier(tmp_path, 16 * MIB)
    fill(tier, 60)
    tier.close()
    tier = disk_tier(tmp_path, 32 * MIB)
    assert present(tier, 60) == list(range(60))
    assert (tier.usage().capacity_bytes or 0) > 31 * MIB


def test_a_process_that_can_open_no_more_files_goes_on_with_those_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by playing: every store failed, and after a few of them there were no more."""
    tier = disk_tier(tmp_path, 2 * MIB)
    store(tier, 0)
    per_segment = tier._state.shard.geometry.slots_per_segment
    for count in (0, 1, 3):  # not even the lock, the lock only, a part of a segment
        with few_files(count):
            outcomes = fill(tier, 4 * per_segment)
        assert StoreOutcome.STORED in outcomes and set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.PRESENT}
        assert tier.usage().num_chunks == per_segment and len(list(tmp_path.glob("*/segment-*"))) == 3
        tier._growth_pause = 0
    assert "cannot become larger, because no more files can be opened: Too many open files" in caplog.text
    fill(tier, 4 * per_segment)
    assert tier.usage().num_chunks == 4 * per_segment


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_what_cannot_be_counted_does_not_pass_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Found by playing: a directory that could not be listed was taken for an empty one, and the budget was exceeded."""
    tier = disk_tier(tmp_path, MIB)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "large").write_bytes(bytes(MIB))
    really_scan = os.scandir

    def scan(place: str | Path) -> object:
        if Path(place) == foreign:
            raise OSError(number, os.strerror(number))
        return really_scan(place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        if number == errno.EIO:
            with pytest.raises(TierError, match=os.strerror(number)):
                store(tier, 0)
        else:
            assert store(tier, 0) is StoreOutcome.REFUSED
    assert bytes_in(tmp_path) < MIB + 64 * 1024
    shutil.rmtree(foreign)
    tier._growth_pause = 0
    assert store(tier, 0) is StoreOutcome.STORED


def test_the_reserve_of_free_space_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10 * MIB]
    monkeypatch.setattr(disk_shard, "free_bytes", lambda directory: free[0] - bytes_in(tmp_path))
    tier = disk_tier(tmp_path, 4 * MIB, reserve_bytes=9 * MIB)
    fill(tier, 300)
    assert free[0] - bytes_in(tmp_path) >= 9 * MIB
    assert 30 < len(present(tier, 300)) < 90
    free[0] = 100 * MIB  # somebody has tidied up
    for number in range(300, 800):
        store(tier, number)
    assert len(present(tier, 800)) > 200


def full_disk(*arguments: object) -> None:
    del arguments
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["for data", "for a file"])
def test_a_disk_without_room_refuses_and_goes_on_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    tier = disk_tier(tmp_path, 4 * MIB)
    with monkeypatch.context() as patch:
        if place == "for data":
            patch.setattr(os, "posix_fallocate", full_disk)
        else:
            patch.setattr(disk_files.Segment, "_reopen_direct", full_disk)
        assert fill(tier, 3) == [StoreOutcome.REFUSED] * 3
        assert present(tier, 3) == [] and not list(tmp_path.glob("*/segment-*"))
    outcomes = fill(tier, 100)
    assert outcomes[-1] is StoreOutcome.STORED
    tier.check()


def test_a_write_without_room_is_refused_and_leaves_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk_tier(tmp_path)
    store(tier, 0)
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.Segment, "write_payload", full_disk)
        assert store(tier, 1) is StoreOutcome.REFUSED
    assert present(tier, 2) == [0]
    tier.check()
    assert store(tier, 1) is StoreOutcome.STORED


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no tmpfs in /dev/shm")
def test_a_budget_above_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file system has") as caught:
        disk_tier(tmp_path, "900000TiB")
    assert caught.value.key == "max_bytes"


# --- disks that break ------------------------------------------------------------------------------------------------------


def broken_disk(*arguments: object) -> None:
    del arguments
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_bad_place_on_the_disk_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk_tier(tmp_path)
    fill(tier, 2)
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.Segment, "read_payload", broken_disk)
        with pytest.raises(TierError, match="Input/output error"):
            load(tier, 0)
    assert load(tier, 0) is LoadOutcome.ABSENT
    assert load(tier, 1) == payload(1)
    tier.check()
    assert store(tier, 0) is StoreOutcome.STORED


def test_damage_that_two_find_costs_no_good_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: the second wiped what had meanwhile been stored anew."""
    tier = disk_tier(tmp_path)
    fill(tier, 3)
    (data,) = tmp_path.glob("*/segment-00000.data")
    data.write_bytes(b"damage" + data.read_bytes()[6:])
    index = tier._state.index
    really_ask = index.is_current
    asked: list[bool] = []

    class Lock:
        """The tier's own; when it was held to decide on the damage, another thread comes in between."""

        def __init__(self, inner: threading.Lock) -> None:
            self.inner = inner

        def __enter__(self) -> None:
            self.inner.acquire()

        def __exit__(self, *_: object) -> None:
            self.inner.release()
            if asked.count(True) == 1:
                asked.clear()
                tier.remove([key(0)])
                assert store(tier, 0) is StoreOutcome.STORED

    def ask(name: bytes, slot: int) -> bool:
        asked.append(really_ask(name, slot))
        return asked[-1]

    monkeypatch.setattr(index, "is_current", ask)
    monkeypatch.setattr(tier, "_lock", Lock(tier._lock))
    assert load(tier, 0) is LoadOutcome.CORRUPT
    assert load(tier, 0) == payload(0)
    tier.check()
    tier.close()
    assert load(disk_tier(tmp_path), 0) == payload(0)


@pytest.mark.parametrize("method", ["read_headers", "read_uses"])
def test_a_bad_place_on_the_disk_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Found by reading: the directory had to be deleted by hand, with all that could still be read."""
    tier = disk_tier(tmp_path)
    fill(tier, 20)
    num_per_segment = tier._state.shard.geometry.slots_per_segment
    tier.close()
    really_read = getattr(disk_files.Segment, method)
    calls: list[object] = []

    def read(segment: disk_files.Segment) -> bytes:
        calls.append(segment)
        if len(calls) == 1:
            broken_disk()
        return bytes(really_read(segment))

    with monkeypatch.context() as patch:
        patch.setattr(disk_files.Segment, method, read)
        tier = disk_tier(tmp_path)
    lost = num_per_segment if method == "read_headers" else 0
    assert present(tier, 20) == list(range(lost, 20)) and 0 <= lost < 20
    assert fill(tier, 20) == [StoreOutcome.PRESENT if number >= lost else StoreOutcome.STORED for number in range(20)]
    assert all(load(tier, number) == payload(number) for number in range(20))
    tier.check()


def test_a_header_that_cannot_be_wiped_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk_tier(tmp_path)
    fill(tier, 2)
    tier.close()
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    headers.write_bytes(b"damage" + headers.read_bytes()[6:])
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.Segment, "write_header", broken_disk)
        tier = disk_tier(tmp_path)
    assert present(tier, 2) == [1]
    assert store(tier, 0) is StoreOutcome.STORED and load(tier, 0) == payload(0)


@pytest.mark.parametrize("method", ["write_header", "write_payload"])
def test_a_failed_write_is_an_error_and_leaves_no_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    tier = disk_tier(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.Segment, method, broken_disk)
        with pytest.raises(TierError, match="Input/output error"):
            store(tier, 0)
    assert load(tier, 0) is LoadOutcome.ABSENT
    tier.check()
    assert store(tier, 0) is StoreOutcome.STORED and load(tier, 0) == payload(0)


def delete(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("what", ["everything", "the root too", "the files"])
def test_a_deleted_directory_is_noticed_and_made_anew(tmp_path: Path, what: str) -> None:
    root = tmp_path / "kv"
    tier = disk_tier(root)
    fill(tier, 10)
    if what == "the files":
        for path in root.glob("*/segment-*"):
            path.unlink()
    else:
        delete(root)
    if what == "the root too":
        root.rmdir()
    assert load(tier, 3) in {payload(3), LoadOutcome.ABSENT}
    assert fill(tier, 20) == [StoreOutcome.STORED] * 20
    assert present(tier, 20) == list(range(20))
    tier.check()
    tier.close()
    assert present(disk_tier(root), 20) == list(range(20)), "they are in the new directory"


def test_a_directory_that_was_moved_away_is_left_alone(tmp_path: Path) -> None:
    """Found by reading: the files stayed open, and when more were needed every store failed, or wrote into another's."""
    root, moved = tmp_path / "kv", tmp_path / "moved"
    tier = disk_tier(root)
    fill(tier, 3)
    root.rename(moved)
    num_bytes = bytes_in(moved)
    assert fill(tier, 60) == [StoreOutcome.STORED] * 60
    assert present(tier, 60) == list(range(60))
    assert bytes_in(moved) == num_bytes
    assert load(disk_tier(moved), 2) == payload(2), "nobody holds it any more"


def test_who_began_before_the_directory_was_deleted_makes_no_files_in_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: the files of both had the same names, so each wrote over the other's chunks."""
    root = tmp_path / "kv"
    tier = disk_tier(root)
    really_reserve = tier._reserve
    arrived: list[object] = []

    def reserve(state: object, *chunk: object) -> object:
        if not arrived:
            arrived.append(state)
            delete(root)
            assert store(tier, 1) is StoreOutcome.STORED, "another thread, in the new directory"
        return really_reserve(state, *chunk)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(tier, "_reserve", reserve)
    assert store(tier, 2) is StoreOutcome.REFUSED
    assert load(tier, 1) == payload(1)
    tier.check()


def test_a_directory_that_cannot_be_made_anew_is_an_error_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by review: each store that failed told that the tier starts again."""
    root = tmp_path / "kv"
    tier = disk_tier(root)
    fill(tier, 2)
    delete(root)
    root.rmdir()
    root.write_text("a file now")
    for _ in range(100):
        with pytest.raises(TierError):
            store(tier, 5)
    assert load(tier, 0) in {payload(0), LoadOutcome.ABSENT}
    assert "starting again" not in caplog.text
    assert caplog.text.count("is gone and cannot be made anew: it must be a directory") == 7 + 4, "8, 16, 32 and 64"
    root.unlink()
    assert store(tier, 5) is StoreOutcome.STORED
    assert caplog.text.count("is gone; starting again with nothing") == 1


def test_a_directory_that_comes_back_with_its_chunks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, moved = tmp_path / "kv", tmp_path / "moved"
    tier = disk_tier(root)
    fill(tier, 3)
    root.rename(moved)
    root.write_text("a file now")
    with pytest.raises(TierError):
        store(tier, 5)
    root.unlink()
    moved.rename(root)
    assert store(tier, 5) is StoreOutcome.STORED
    assert present(tier, 10) == [0, 1, 2, 5]
    assert "was gone; it is there again with 3 chunks" in caplog.text and "with nothing" not in caplog.text


# --- who may use it ---------------------------------------------------------------------------------------------------


def test_everything_is_for_its_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    old = os.umask(0)
    try:
        fill(disk_tier(root), 3)
    finally:
        os.umask(old)
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_two_never_share_a_directory(tmp_path: Path) -> None:
    first = disk_tier(tmp_path)
    store(first, 1)
    with pytest.raises(ConfigError, match="it is used for the same model already"):
        disk_tier(tmp_path)
    script = (
        "import sys; sys.path.insert(0, '.');"
        "from pathlib import Path; from tests.offload.tier.common import disk_tier;"
        f"disk_tier(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert other.returncode and "it is used for the same model already" in other.stderr
    first.close()
    assert load(disk_tier(tmp_path), 1) == payload(1)


@contextmanager
def forked() -> Iterator[None]:
    """A child process meanwhile, that has all our files open."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_a_directory(tmp_path: Path) -> None:
    """Found by reading: until it ended, nobody could open the tier again that its parent had closed."""
    with ExitStack() as stack:
        tier = disk_tier(tmp_path)
        store(tier, 1)
        with brief_lock(tmp_path):
            stack.enter_context(forked())
        tier.close()
        assert load(disk_tier(tmp_path), 1) == payload(1)


KILLED_WITH_A_CHILD = """
import os, signal, sys
from pathlib import Path
from cargohold.offload.tier.disk.locks import brief_lock
from tests.offload.tier.common import disk_tier, key, payload
tier = disk_tier(Path(sys.argv[1]))
tier.store(key(1), memoryview(payload(1)))
with brief_lock(Path(sys.argv[1])):
    if not os.fork():
        os.write(1, b"forked")
        os.read(0, 1)
        os._exit(0)
    signal.pause()
"""


def test_a_forked_child_does_not_keep_a_directory_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.read(6) == b"forked"
        process.kill()
        process.wait()
        assert load(disk_tier(tmp_path), 1) == payload(1)
        process.stdin.close()
        assert not process.stdout.read(), "the child lived until now"


def test_a_forked_child_writes_to_nothing_of_its_parents(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    store(tier, 1)
    child = os.fork()
    if not child:
        try:
            tier.store(key(2), memoryview(payload(2)))
        except TierError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (load(tier, 1), load(tier, 2)) == (payload(1), LoadOutcome.ABSENT)


def test_a_forked_child_does_not_give_a_directory_away(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    child = os.fork()
    if not child:
        tier.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError, match="it is used for the same model already"):
        disk_tier(tmp_path)


def test_a_lock_that_cannot_be_let_go_of_is_gone_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by playing: the error kept the file open, and with it the lock, so that nobody could make room for a while."""
    tier = disk_tier(tmp_path)
    really_lock = fcntl.flock

    def lock(number: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really_lock(number, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock)
        assert store(tier, 1) is StoreOutcome.STORED
    monkeypatch.setattr("cargohold.offload.tier.disk.locks.MAX_LOCK_WAIT_S", 0.0)
    with brief_lock(tmp_path):
        assert load(tier, 1) == payload(1)


def test_further_replicas_of_an_engine_have_directories_and_budgets_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    first = DiskTierConfig(directory=root, max_bytes="1MiB", reserve_bytes=0, lock_wait_s=0.0)
    assert first.of_replica(0) == first
    tiers = [open_tier(first.of_replica(replica), NAMESPACE, CHUNK) for replica in (2, 0, 1)]
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == sorted(
        [NAMESPACE.id, "replica-1", "replica-2"]
    )
    assert root.stat().st_mode & 0o077 == 0, "whoever comes first makes it"
    for tier in tiers:
        assert isinstance(tier, DiskTier)
        fill(tier, 60)
        assert len(present(tier, 60)) == 60
    assert bytes_in(root) <= 1 * MIB, "those of the others are not counted"


def test_nobody_waits_for_ever_for_a_process_that_was_stopped_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: after Ctrl-Z in `cargohold cache ls`, an engine hung at its start, and said nothing."""
    monkeypatch.setattr("cargohold.offload.tier.disk.locks.MAX_LOCK_WAIT_S", 0.1)
    tier = disk_tier(tmp_path)
    with brief_lock(tmp_path):
        with pytest.raises(ConfigError, match="another process has held"):
            disk_tier(tmp_path)
        with pytest.raises(TierError, match="another process has held"):
            store(tier, 1)
    assert store(tier, 1) is StoreOutcome.STORED


def test_one_store_waits_for_a_process_at_work_and_the_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: while another process deleted what was large, all threads waited for it, and loads came too late."""
    tier = disk_tier(tmp_path)
    store(tier, 0)
    while tier._state.index.has_free:
        store(tier, tier.usage().num_chunks)
    number = tier.usage().num_chunks
    arrived, opened = threading.Event(), threading.Event()

    @contextmanager
    def held(directory: Path) -> Iterator[None]:
        arrived.set()
        assert opened.wait(WAIT_S)
        with brief_lock(directory):
            yield

    monkeypatch.setattr(disk_shard, "brief_lock", held)
    monkeypatch.setattr("cargohold.offload.tier.disk.tier._GROWTH_WAIT_S", 0.01)
    outcomes: list[StoreOutcome] = []
    first = threading.Thread(target=lambda: outcomes.append(store(tier, number)), daemon=True)
    first.start()
    assert arrived.wait(WAIT_S)
    other = threading.Thread(target=lambda: outcomes.append(store(tier, number + 1)), daemon=True)
    other.start()
    other.join(WAIT_S)
    assert outcomes == [StoreOutcome.REFUSED], "nothing is evicted where there may be room in a moment"
    assert load(tier, 0) == payload(0)
    opened.set()
    first.join(WAIT_S)
    assert outcomes[1:] == [StoreOutcome.STORED] and store(tier, number + 1) is StoreOutcome.STORED
    tier.check()


def test_a_process_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from tests.offload.tier.common import disk_tier, key, payload;"
        f"tier = disk_tier(Path({str(tmp_path)!r})); tier.store(key(1), memoryview(payload(1)));"
        "print('stored', flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "stored\n"
        with pytest.raises(ConfigError, match="it is used for the same model already"):
            disk_tier(tmp_path)
        ending = threading.Timer(0.2, process.kill)
        ending.start()
        tier = disk_tier(tmp_path, lock_wait_s=60.0)
        ending.join()
    assert load(tier, 1) == payload(1)


@needs_root
def test_an_unwritable_directory_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tmp_path.parent.chmod(0o755)
    tmp_path.parent.parent.chmod(0o755)

    def action() -> None:
        with pytest.raises(ConfigError, match="Permission denied") as caught:
            disk_tier(tmp_path / "kv")
        assert caught.value.key == "directory"

    assert run_as_nobody(action) == 0


@needs_root
def test_lost_permissions_are_errors_and_nothing_else(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to(tempfile.gettempdir()) and str(path) != tempfile.gettempdir():
            path.chmod(0o777)

    def action() -> None:
        tier = disk_tier(tmp_path / "kv", 4 * MIB)
        store(tier, 0)
        (tmp_path / "kv").chmod(0)
        outcomes: set[object] = set()
        for number in range(1, 100):
            try:
                outcomes.add(store(tier, number))
            except TierError as error:
                outcomes.add(error.reason)
        assert "Permission denied" in outcomes, "it cannot grow"
        assert load(tier, 0) == payload(0)
        (tmp_path / "kv").chmod(0o700)
        assert store(tier, 500) is StoreOutcome.STORED

    assert run_as_nobody(action) == 0


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o744])
def test_a_namespace_of_another_user_stops_nobody(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Found by playing: after one start with sudo, every store failed that needed room, and soon every start."""
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to(tempfile.gettempdir()) and str(path) != tempfile.gettempdir():
            path.chmod(0o777)
    root = tmp_path / "kv"
    foreign = root / codec(weights="foreign").namespace.id
    unused = root / codec(weights="unused").namespace.id
    root.mkdir()
    root.chmod(0o777)
    foreigner = disk_tier(root, 1 * MIB, using=codec(weights="foreign"))
    fill(foreigner, 20)
    foreigner.close()
    (root / ".lock").chmod(0o666)
    foreign.chmod(mode)

    def action() -> None:
        tier = disk_tier(root, 1 * MIB, using=codec(weights="unused"))
        fill(tier, 40)
        tier.close()
        tier = disk_tier(root, 1 * MIB)
        assert fill(tier, 100) == [StoreOutcome.STORED] * 100
        assert len(present(tier, 100)) > 60, "it has all the room that can be seen"
        tier.close()
        assert not unused.exists() and foreign.exists()
        disk_tier(root, MIB // 2).close()
        assert [record.getMessage() for record in caplog.records if "make room" in record.getMessage()] == [
            f"disk tier: {foreign} cannot be deleted to make room: Permission denied"
        ]

    assert run_as_nobody(action) == 0
    assert present(disk_tier(root, 4 * MIB, using=codec(weights="foreign")), 20) == list(range(20))


def test_a_namespace_that_cannot_be_deleted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn, *willing = (tmp_path / codec(weights=name).namespace.id for name in ("stubborn", "old", "newer"))
    for at, name in enumerate(["stubborn", "old", "newer"]):
        tier = disk_tier(tmp_path, 1 * MIB, using=codec(weights=name))
        fill(tier, 20)
        tier.close()
        os.utime(tmp_path / codec(weights=name).namespace.id / "lock", (at + 1, at + 1))

    def delete(path: Path) -> None:
        if path == stubborn:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        delete_shard(path)

    monkeypatch.setattr("cargohold.offload.tier.disk.root.delete_shard", delete)
    tier = disk_tier(tmp_path, 1 * MIB)
    assert fill(tier, 40) == [StoreOutcome.STORED] * 40
    assert stubborn.exists() and not any(path.exists() for path in willing)
    assert caplog.text.count(f"{stubborn} cannot be deleted to make room: Operation not permitted") == 1


@pytest.mark.parametrize(
    ("options", "key_of_error"),
    [
        ({"directory": ""}, "directory"),
        ({"directory": "/dev/null/kv"}, "directory"),
        ({"directory": "/dev/null"}, "directory"),
        ({"directory": "kv\0"}, "directory"),
        ({"max_bytes": "lots"}, "max_bytes"),
        ({"max_bytes": "8KiB"}, "max_bytes"),
        ({"policy": "magic"}, "policy"),
        ({"reserve_bytes": "much"}, "reserve_bytes"),
        ({"num_threads": 0}, "num_threads"),
        ({"lock_wait_s": -1}, "lock_wait_s"),
        ({"encryption_key": "password"}, "encryption_key"),
        ({"encryption_key": "file:key\0"}, "encryption_key"),
    ],
)
def test_impossible_options_are_refused_by_name(tmp_path: Path, options: dict[str, object], key_of_error: str) -> None:
    given = {"directory": str(tmp_path), "max_bytes": "2MiB", "reserve_bytes": 0, **options}
    with pytest.raises(ConfigError) as caught:
        open_tier(DiskTierConfig(**given), NAMESPACE, CHUNK)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.key == key_of_error
