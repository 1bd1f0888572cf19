"""What is stored in a place, looked at while engines use it, while others do, and where the medium has bad places."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.deadlines import ROOM
from cargohold.errors import TierError
from cargohold.tiers import SharedTierConfig, StoreOutcome, Tier
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.disk import files as disk_files
from cargohold.tiers.disk.files import Descriptor
from cargohold.tiers.disk.inventory import DiskInventory
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.opening import open_tier
from cargohold.tiers.stores import directory as object_listing
from tests.servers import key_value_server
from tests.tiers.common import (
    CHUNK,
    NAMESPACE,
    codec,
    disk_tier,
    key,
    load,
    needs_root,
    payload,
    run_as_nobody,
    shared_tier,
    slots_per_segment,
)


def filled(tier: Tier, count: int) -> Tier:
    for number in range(count):
        assert tier.store(key(number), memoryview(payload(number))) is StoreOutcome.STORED
    return tier


def filled_directory(place: Path, count: int) -> tuple[str, Tier]:
    """The URL of a shared directory with some chunks, and a tier over it."""
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")
    url = f"file://{place}"
    return url, filled(open_tier(SharedTierConfig(url=url), NAMESPACE, [CHUNK]), count)


def spoil_opening(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one file of a shared directory fail to open, as over a bad place on the medium."""

    def open_file(path: Path, flags: int) -> Descriptor:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return Descriptor(path, flags)

    monkeypatch.setattr(object_listing, "Descriptor", open_file)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_chunks_that_engines_delete_during_a_look_do_not_end_it(tmp_path: Path, is_damaged: bool) -> None:
    """Found by reading: where a budget is kept, or a damaged chunk loaded, verifying ended with "not found"."""
    url, tier = filled_directory(tmp_path, 6)
    paths = sorted(tmp_path.glob("*/00/*"))
    if is_damaged:
        for path in paths:
            path.write_bytes(bytes(CHUNK + HEADER_BYTES))
    inventory = open_inventory(url)
    findings = inventory.verify(NAMESPACE.id, delete=True)
    first = next(findings)
    tier.remove([key(number) for number in range(5)])
    assert [first, *findings] in ([first] * 2, [first]), "of the last one, unless it came first"
    assert first is (Verification.DAMAGED if is_damaged else Verification.GOOD)


@pytest.mark.parametrize("method", ["read_header", "read_payload"])
def test_a_bad_place_on_the_disk_is_a_damaged_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Found by reading: a look ended at the first one, and said nothing of what is behind it."""
    filled(disk_tier(tmp_path), 4).close()
    really_read = getattr(disk_files.Segment, method)

    def read(segment: disk_files.Segment, slot: int, *into: memoryview) -> object:
        if slot == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_read(segment, slot, *into)

    with monkeypatch.context() as patch:
        patch.setattr(disk_files.Segment, method, read)
        findings = list(DiskInventory(tmp_path).verify(NAMESPACE.id, delete=True))
    assert findings == [Verification.GOOD, Verification.DAMAGED, Verification.GOOD, Verification.GOOD]
    tier = disk_tier(tmp_path)
    assert [number for number in range(4) if load(tier, number) == payload(number)] == [0, 2, 3]


def test_a_damaged_chunk_that_cannot_be_deleted_is_told_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk_tier(tmp_path), 4).close()
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    data = bytearray(headers.read_bytes())
    data[0] ^= 1
    data[2 * HEADER_BYTES] ^= 1
    headers.write_bytes(data)

    def write(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk_files.Segment, "write_header", write)
    findings = DiskInventory(tmp_path).verify(NAMESPACE.id, delete=True)
    assert [next(findings) for _ in range(4)] == [Verification.DAMAGED, Verification.GOOD] * 2
    with pytest.raises(TierError, match=rf"{headers}: Read-only file system \(and 1 more\)"):
        next(findings)


def test_a_file_that_cannot_be_opened_keeps_nobody_from_verifying_the_other_ones(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    filled(tier, 20)
    num_per_segment = slots_per_segment(tmp_path)
    tier.close()
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    headers.unlink()
    headers.symlink_to("/etc/passwd")
    findings = DiskInventory(tmp_path).verify(NAMESPACE.id, delete=False)
    assert [next(findings) for _ in range(20 - num_per_segment)] == [Verification.GOOD] * (20 - num_per_segment)
    with pytest.raises(TierError, match=f"{headers} is not a regular file$"):
        next(findings)


def test_of_files_that_were_cut_off_is_told_that_they_cannot_be_verified(tmp_path: Path) -> None:
    filled(disk_tier(tmp_path), 4).close()
    (data,) = tmp_path.glob("*/segment-00000.data")
    os.truncate(data, CHUNK)
    with pytest.raises(TierError, match=f"{data.with_suffix('')} is not whole, so no chunk in it can be verified"):
        list(DiskInventory(tmp_path).verify(NAMESPACE.id, delete=True))


def test_a_bad_place_under_a_shared_directory_is_a_damaged_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: a look ended at the first one, and did not delete it."""
    url, _ = filled_directory(tmp_path, 6)
    (bad,) = tmp_path.glob(f"*/*/{key(2).hex()}")
    spoil_opening(bad, monkeypatch)
    findings = list(open_inventory(url).verify(NAMESPACE.id, delete=True))
    assert (findings.count(Verification.GOOD), findings.count(Verification.DAMAGED)) == (5, 1)
    assert not bad.exists()


@pytest.mark.parametrize("operation", ["open", "unlink"])
def test_a_chunk_in_a_shared_directory_that_is_for_its_owner_only_is_told_after_the_others(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = filled_directory(tmp_path, 6)
    (bad,) = tmp_path.glob(f"*/*/{key(2).hex()}")
    bad.write_bytes(bytes(HEADER_BYTES))
    really_do = getattr(os, operation)

    def withhold(path: Path, *rest: object, **options: object) -> object:
        if Path(path) == bad:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_do(path, *rest, **options)

    monkeypatch.setattr(os, operation, withhold)
    findings: list[Verification] = []
    with pytest.raises(TierError, match=f"{bad}: Permission denied$"):
        findings.extend(open_inventory(url).verify(NAMESPACE.id, delete=True))
    assert findings.count(Verification.GOOD) == 5 and len(findings) == 5 + (operation == "unlink")


def test_a_description_in_a_shared_directory_that_cannot_be_read_hides_no_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = filled_directory(tmp_path, 2)
    description = tmp_path / NAMESPACE.id / "namespace.json"
    spoil_opening(description, monkeypatch)
    (holding,) = open_inventory(url).holdings()
    assert (holding.num_chunks, holding.facts) == (2, {})
    assert holding.remark == f"{description}: Input/output error"


@needs_root
def test_the_namespaces_of_another_user_hide_no_others_and_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by review: whoever asked for anything was told that permission is denied, and nothing else."""
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to(tempfile.gettempdir()) and str(path) != tempfile.gettempdir():
            path.chmod(0o777)
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(0o777)
    filled(disk_tier(root), 3).close()
    filled(disk_tier(root / "replica-1"), 3).close()
    (root / ".lock").chmod(0o666)
    foreign = root / NAMESPACE.id

    def action() -> None:
        own = codec(weights="own")
        filled(disk_tier(root, using=own), 5).close()
        inventory = DiskInventory(root)
        found = {holding.id: holding for holding in inventory.holdings()}
        assert set(found) == {NAMESPACE.id, own.namespace.id}
        assert found[own.namespace.id].num_chunks == 5 and not found[own.namespace.id].remark
        theirs = found[NAMESPACE.id]
        assert (theirs.num_chunks, theirs.facts, theirs.is_in_use) == (None, {}, True)
        assert theirs.remark == f"{foreign}: Permission denied (and 2 more)"
        assert f"what is stored in {root / 'replica-1'} is not known: " in caplog.text
        assert list(inventory.verify(own.namespace.id, delete=True)) == [Verification.GOOD] * 5
        for touch in (inventory.remove, lambda name: list(inventory.verify(name, delete=True))):
            with pytest.raises(TierError, match=f"{foreign / 'lock'}: Permission denied"):
                touch(NAMESPACE.id)
        inventory.remove(own.namespace.id)

    assert run_as_nobody(action) == 0
    assert [holding.num_chunks for holding in DiskInventory(root).holdings()] == [3, 3]


def test_of_a_namespace_that_cannot_be_deleted_as_much_goes_as_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk_tier(tmp_path), 20).close()
    files = set(tmp_path.glob("*/*"))
    (stuck,) = tmp_path.glob("*/segment-00001.data")
    really_unlink = os.unlink

    def unlink(path: str, **options: int) -> None:
        if Path(path).name == stuck.name:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        really_unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(TierError, match=f"{stuck}: Operation not permitted"):
            DiskInventory(tmp_path).remove(NAMESPACE.id)
    assert len(files) > 5 and set(tmp_path.glob("*/*")) == {stuck}


def test_engines_do_not_wait_for_a_look_at_large_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: whoever needed room, or started, waited until all headers were read, and gave up after a minute."""
    filled(disk_tier(tmp_path, using=codec(weights="other")), 3).close()
    monkeypatch.setattr("cargohold.tiers.disk.files.ROOM", replace(ROOM, plus_s=0.1))
    engines: list[Tier] = []

    def count(file: Path) -> Counter[tuple[int, int]]:
        del file
        engines.append(filled(disk_tier(tmp_path), 3))
        return Counter({(CHUNK, CHUNK): 3})

    monkeypatch.setattr("cargohold.tiers.disk.inventory._count_headers", count)
    assert [holding.num_chunks for holding in DiskInventory(tmp_path).holdings()] == [3]
    assert len(engines) == 1


def test_a_namespace_that_goes_before_its_turn_leaves_nothing_to_trim(tmp_path: Path) -> None:
    """Found by reading: pruning while an engine made room ended with a traceback."""
    filled(disk_tier(tmp_path), 1).close()
    inventory, other = DiskInventory(tmp_path), DiskInventory(tmp_path)
    other.remove(NAMESPACE.id)
    assert inventory.trim(NAMESPACE.id, 1) == 0


def test_keys_of_others_with_our_prefix_are_not_ours() -> None:
    """Found by reading: a counter of somebody else's was listed as a namespace and deleted; a list of theirs ended all."""
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with key_value_server("valkey") as server, redis.Redis(port=server.port) as client:
        url = f"valkey://127.0.0.1:{server.port}"
        filled(open_tier(SharedTierConfig(url=url), NAMESPACE, [CHUNK]), 2)
        foreign = {b"cargohold:requests", b"cargohold:" + b"0" * 31, b"cargohold:" + b"0" * 32 + b"s"}
        for name in foreign:
            client.set(name, "mine")
        client.rpush("cargohold:queue", "first")
        inventory = open_inventory(url)
        assert [holding.num_chunks for holding in inventory.holdings()] == [2]
        for holding in inventory.holdings():
            assert list(inventory.verify(holding.id, delete=True)) == [Verification.GOOD] * 2
            inventory.remove(holding.id)
        assert set(client.keys("*")) == foreign | {b"cargohold:queue"}


@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_what_an_earlier_format_has_left_is_listed_with_a_remark_and_can_be_deleted(tmp_path: Path, kind: str) -> None:
    tier = disk_tier(tmp_path) if kind == "disk" else shared_tier(f"file://{tmp_path}", codec(), CHUNK)
    tier.store(key(1), memoryview(payload(1)))
    tier.close()
    (description,) = tmp_path.glob("*/shard.json" if kind == "disk" else "*/namespace.json")
    text = description.read_text().replace('"format": "2"', '"format": "1"')
    description.write_text(text.replace(',\n  "details_bytes": 0', ""))
    inventory = open_inventory(str(tmp_path) if kind == "disk" else f"file://{tmp_path}")
    (holding,) = inventory.holdings()
    assert holding.num_chunks == 1
    assert holding.remark == "format 1, and engines of this version read 2"
    inventory.remove(holding.id)
    assert inventory.holdings() == []
