"""The disk tier where space, files or descriptors run out."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cargohold.errors import ConfigError, TierError
from cargohold.tiers import StoreOutcome
from cargohold.tiers.disk import files as disk_files
from cargohold.tiers.disk import shard as disk_shard
from cargohold.tiers.disk.root import bytes_in
from tests.tiers.common import (
    disk_tier,
    key,
    num_segments,
    payload,
    slots_per_segment,
)
from tests.tiers.disks import MIB, fill, present, store


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


def test_a_process_that_may_open_few_files_keeps_a_quarter_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by trying with ``ulimit -n 64``: the disk took all, and the program could not open a file of its own."""
    monkeypatch.setattr(disk_shard, "allow_open_files", lambda _: None)  # as where no more are allowed
    with few_files(64):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        tier = disk_tier(tmp_path, 64 * MIB)
        fill(tier, 26 * slots_per_segment(tmp_path))
        with ExitStack() as others:
            for _ in range(most // 4 - 2):  # of which the lock for growing was one
                others.callback(os.close, os.dup(0))
        assert "because no more files can be opened" in caplog.text
        tier.check()
        tier.close()
    del tier
    with few_files(20), pytest.raises(ConfigError, match=r"more files must be open than allowed \(ulimit -n\)"):
        disk_tier(tmp_path, 64 * MIB)


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
    assert num_segments(tmp_path) == 25
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by playing: every store failed, and after a few of them there were no more."""
    monkeypatch.setattr("cargohold.tiers.disk.shard._GROWTH_PAUSE", 0)
    tier = disk_tier(tmp_path, 2 * MIB)
    store(tier, 0)
    per_segment = slots_per_segment(tmp_path)
    for count in (0, 1, 3):  # not even the lock, the lock only, a part of a segment
        with few_files(count):
            outcomes = fill(tier, 4 * per_segment)
        assert StoreOutcome.STORED in outcomes and set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.PRESENT}
        assert tier.usage().num_chunks == per_segment and len(list(tmp_path.glob("*/segment-*"))) == 3
    assert "because no more files can be opened: Too many open files" in caplog.text
    fill(tier, 4 * per_segment)
    assert tier.usage().num_chunks == 4 * per_segment


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_free_space_that_cannot_be_read_does_not_count_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Found by playing: a directory that could not be listed was taken for an empty one, and the budget was exceeded."""
    monkeypatch.setattr("cargohold.tiers.disk.shard._GROWTH_PAUSE", 0)
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


def test_a_disk_that_has_less_room_than_its_limit_says_so_once_and_how_large_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: it stayed small for ever, and the log was silent; the gauge showed the limit of the options."""
    free = [10 * MIB]
    monkeypatch.setattr(disk_shard, "free_bytes", lambda directory: free[0] - bytes_in(tmp_path))
    tier = disk_tier(tmp_path, 4 * MIB, reserve_bytes=9 * MIB)
    limit = tier.usage().capacity_bytes or 0
    assert 3.5 * MIB < limit <= 4 * MIB
    fill(tier, 300)
    used = tier.usage()
    assert used.num_bytes == used.capacity_bytes is not None and used.num_bytes < MIB
    (line,) = caplog.messages
    assert "it cannot grow above" in line and "of which reserve_bytes keeps 9.0 MiB" in line
    free[0] = 100 * MIB
    for number in range(300, 400):
        store(tier, number)
    assert tier.usage().capacity_bytes == limit and len(caplog.messages) == 1


def test_a_disk_whose_room_others_take_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.joinpath("foreign").write_bytes(bytes(3 * MIB))
    tier = disk_tier(tmp_path, 4 * MIB)
    fill(tier, 300)
    assert f"because other files take the rest of max_bytes in {tmp_path}" in caplog.text
    assert (tier.usage().capacity_bytes or 0) < MIB


def full_disk(*arguments: object) -> None:
    del arguments
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["for data", "for a file"])
def test_a_disk_without_room_refuses_and_goes_on_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    tier = disk_tier(tmp_path, 4 * MIB)
    with monkeypatch.context() as patch:
        if place == "for data":
            patch.setattr(os, "posix_fallocate", full_disk)
        else:
            patch.setattr(disk_files.Segment, "_reopen_direct", full_disk)
        assert fill(tier, 3) == [StoreOutcome.REFUSED] * 3
        assert present(tier, 3) == [] and not list(tmp_path.glob("*/segment-*"))
        assert tier.usage().capacity_bytes == 0 and "No space left on device" in caplog.text
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
