"""What a disk tier finds at its start: descriptions, namespaces and files of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cargohold.errors import ConfigError
from cargohold.tiers import StoreOutcome
from cargohold.tiers.disk import shard as disk_shard
from cargohold.tiers.disk.files import DirectoryLock
from cargohold.tiers.disk.root import bytes_in
from tests.tiers.common import (
    codec,
    disk_tier,
    key,
    load,
    num_segments,
    payload,
    spoil_reads,
)
from tests.tiers.disks import MIB, fill, present, store


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


@pytest.mark.parametrize(
    "why",
    [
        "segments with chunks, because shard.json is missing or damaged",
        "chunks used longest ago are deleted, because max_bytes is lower than before",
    ],
)
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
    assert why in caplog.text and len(present(tier, 100)) < 100
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
    before = num_segments(tmp_path)
    for number in range(100, 200):
        store(tier, number)
    assert num_segments(tmp_path) == before
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
