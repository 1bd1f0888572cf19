"""The disk tier on disks that break, and under directories that are deleted or moved."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from cargohold.errors import TierError
from cargohold.tiers import LoadOutcome, StoreOutcome
from cargohold.tiers.disk import files as disk_files
from cargohold.tiers.disk.root import bytes_in
from tests.tiers.common import (
    disk_tier,
    key,
    load,
    payload,
    slots_per_segment,
)
from tests.tiers.disks import delete, fill, present, store


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


def test_damage_found_by_two_loads_at_once_removes_no_good_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    num_per_segment = slots_per_segment(tmp_path)
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


def test_a_store_begun_before_the_directory_was_deleted_makes_no_files_in_the_new_one(
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
    assert store(tier, 2) is StoreOutcome.LATER
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
