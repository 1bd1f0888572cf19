"""What is stored in a place, looked at while engines use it, while others do, and where the medium has bad places."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cargohold.offload.tier import StoreOutcome, Tier
from cargohold.offload.tier.config import SharedTierConfig
from cargohold.offload.tier.disk import files as disk_files
from cargohold.offload.tier.factory import open_tier
from cargohold.offload.tier.header import HEADER_BYTES
from cargohold.offload.tier.inventory import Finding, open_inventory
from cargohold.offload.tier.inventory.disk import DiskInventory
from tests.offload.tier.common import CHUNK, NAMESPACE, codec, disk_tier, key, load, payload
from tests.servers import key_value_server


def filled(tier: Tier, count: int) -> Tier:
    for number in range(count):
        assert tier.store(key(number), memoryview(payload(number))) is StoreOutcome.STORED
    return tier


@pytest.mark.parametrize("is_damaged", [False, True])
def test_chunks_that_engines_delete_during_a_look_do_not_end_it(tmp_path: Path, is_damaged: bool) -> None:
    """Found by reading: where a budget is kept, or a damaged chunk loaded, verifying ended with "not found"."""
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")
    url = f"file://{tmp_path}"
    tier = filled(open_tier(SharedTierConfig(url=url), NAMESPACE, CHUNK), 6)
    paths = sorted(tmp_path.glob("*/00/*"))
    if is_damaged:
        for path in paths:
            path.write_bytes(bytes(CHUNK + HEADER_BYTES))
    inventory = open_inventory(url)
    findings = inventory.verify(NAMESPACE.id, delete=True)
    first = next(findings)
    tier.remove([key(number) for number in range(5)])
    assert [first, *findings] in ([first] * 2, [first]), "of the last one, unless it came first"
    assert first is (Finding.DAMAGED if is_damaged else Finding.GOOD)


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
    assert findings == [Finding.GOOD, Finding.DAMAGED, Finding.GOOD, Finding.GOOD]
    tier = disk_tier(tmp_path)
    assert [number for number in range(4) if load(tier, number) == payload(number)] == [0, 2, 3]


def test_engines_do_not_wait_for_a_look_at_large_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: whoever needed room, or started, waited until all headers were read, and gave up after a minute."""
    filled(disk_tier(tmp_path, using=codec(weights="other")), 3).close()
    monkeypatch.setattr("cargohold.offload.tier.disk.locks.MAX_LOCK_WAIT_S", 0.1)
    engines: list[Tier] = []

    def count(file: Path) -> int:
        del file
        engines.append(filled(disk_tier(tmp_path), 3))
        return 3

    monkeypatch.setattr("cargohold.offload.tier.inventory.disk._count_headers", count)
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
        filled(open_tier(SharedTierConfig(url=url), NAMESPACE, CHUNK), 2)
        foreign = {b"cargohold:requests", b"cargohold:" + b"0" * 31, b"cargohold:" + b"0" * 32 + b"s"}
        for name in foreign:
            client.set(name, "mine")
        client.rpush("cargohold:queue", "first")
        inventory = open_inventory(url)
        assert [holding.num_chunks for holding in inventory.holdings()] == [2]
        for holding in inventory.holdings():
            assert list(inventory.verify(holding.id, delete=True)) == [Finding.GOOD] * 2
            inventory.remove(holding.id)
        assert set(client.keys("*")) == foreign | {b"cargohold:queue"}
