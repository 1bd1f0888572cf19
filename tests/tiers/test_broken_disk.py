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
    index = tier._index
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


@pytest.mark.parametrize("what", ["everything", "the root too", "the files", "moved", "a file now"])
def test_a_directory_that_is_gone_turns_the_tier_off_until_the_restart(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written in its place: what is there now may be another disk, or another engine's."""
    root, moved = tmp_path / "kv", tmp_path / "moved"
    tier = disk_tier(root)
    fill(tier, 10)
    if what in ("moved", "a file now"):
        root.rename(moved)
    elif what == "the files":
        for path in root.glob("*/segment-*"):
            path.unlink()
    else:
        delete(root)
    if what == "the root too":
        root.rmdir()
    if what == "a file now":
        root.write_text("mine")
    assert load(tier, 3) in {payload(3), LoadOutcome.ABSENT}
    for number in (3, 20, 21):
        with pytest.raises(TierError, match="its directory is gone; it is off until a restart"):
            store(tier, number)
    assert caplog.text.count("is gone; the tier is off until a restart") == 1
    assert tier.take_losses().is_all and present(tier, 20) == [] and load(tier, 3) is LoadOutcome.ABSENT
    tier.check()
    tier.close()
    if what == "a file now":
        assert root.read_text() == "mine"
        return
    if what == "moved":
        moved.rename(root)
        assert present(disk_tier(root), 20) == list(range(10)), "the next start finds what came back"
    else:
        assert fill(disk_tier(root), 20) == [StoreOutcome.STORED] * 20
