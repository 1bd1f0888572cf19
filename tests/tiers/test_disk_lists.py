"""A disk keeps what engines know of its chunks, and lists them for the next one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cargohold.errors import TierError
from cargohold.tiers import LoadOutcome, Tier
from cargohold.tiers.chunk_format import ChunkCodec, Details, Note
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk import tier as disk_module
from cargohold.tiers.disk.slot_index import parents_first
from cargohold.tiers.encryption import EncryptionKey
from cargohold.tiers.port import Losses
from tests.tiers.common import NAMESPACE, disk_tier, key, load, payload, ticking

SMALL = 200
ROOM = 256
SECRET = bytes(range(32))


def codec(secret: bytes | None = None) -> ChunkCodec:
    return ChunkCodec(
        replace(NAMESPACE, details_bytes=ROOM), None if secret is None else EncryptionKey(secret), ticking()
    )


def details(number: int) -> Details:
    return Details(number.to_bytes(4, "little") * 8, b"\x80" * (number % 3))


def small_disk(directory: Path, secret: bytes | None = None, max_bytes: str = "1MiB", policy: str = "lru") -> DiskTier:
    return disk_tier(directory, max_bytes, using=codec(secret), chunk_bytes=SMALL, policy=policy)


def store(tier: Tier, number: int) -> None:
    tier.store(key(number), memoryview(payload(number, SMALL)), None, Note(details(number)))


def listed(tier: Tier, limit: int = 7) -> dict[bytes, Details]:
    """What the tier lists, from one end to the other; nothing twice."""
    found: dict[bytes, Details] = {}
    cursor, is_first = b"", True
    while cursor or is_first:
        listing = tier.list_chunks(cursor, limit, with_details=True)
        assert len(listing.keys) <= limit
        for chunk, of_chunk in zip(listing.keys, listing.details, strict=True):
            assert chunk not in found
            found[chunk] = of_chunk
        cursor, is_first = listing.cursor, False
    return found


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_a_disk_lists_its_chunks_after_a_restart(tmp_path: Path, secret: bytes | None) -> None:
    tier = small_disk(tmp_path, secret)
    for number in range(40):
        store(tier, number)
    tier.store(key(40), memoryview(payload(40, SMALL)))  # by an engine without events
    tier.remove([key(3)])
    expected = {key(number): details(number) for number in range(40) if number != 3}
    assert listed(tier) == expected
    tier.close()
    tier = small_disk(tmp_path, secret)
    assert listed(tier) == expected
    assert listed(tier, 1000) == expected
    tier.close()
    headers = b"".join(path.read_bytes() for path in tmp_path.glob("*/*.headers"))
    assert (details(5).tokens in headers) is (secret is None)


def test_details_of_an_earlier_chunk_in_a_slot_are_not_taken_for_those_of_a_later_one(tmp_path: Path) -> None:
    tier = small_disk(tmp_path)
    store(tier, 1)
    tier.remove([key(1)])
    tier.store(key(2), memoryview(payload(2, SMALL)))
    assert listed(tier) == {}
    tier.close()


def test_details_that_were_damaged_or_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    tier = small_disk(tmp_path)
    for number in range(3):
        store(tier, number)
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    data = bytearray(headers.read_bytes())
    data[data.index(details(1).tokens)] ^= 1
    headers.write_bytes(data)
    assert listed(tier) == {key(0): details(0), key(2): details(2)}
    headers.write_bytes(b"")
    assert listed(tier) == {}
    tier.close()


def test_to_be_listed_is_no_use(tmp_path: Path) -> None:
    """The chunk used longest ago is evicted, whatever was listed."""
    tier = small_disk(tmp_path, max_bytes="256KiB")
    number = 0
    while tier.usage().num_chunks == number:
        store(tier, number)
        number += 1
    there = set(listed(tier))
    store(tier, number)
    assert there - set(listed(tier)) == {key(1)}
    tier.close()


def test_a_disk_tells_what_it_has_evicted(tmp_path: Path) -> None:
    tier = small_disk(tmp_path, max_bytes="256KiB")
    number = 0
    while not (losses := tier.take_losses()):
        store(tier, number)
        number += 1
    assert losses == Losses((key(0),)) and not tier.take_losses()
    tier.remove([key(2), key(9_999)])
    assert key(2) in tier.take_losses().keys
    tier.close()


def test_a_directory_that_was_deleted_is_a_loss_of_everything(tmp_path: Path) -> None:
    tier = small_disk(tmp_path / "kv")
    store(tier, 1)
    assert not tier.take_losses()
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(TierError):
        store(tier, 2)
    assert tier.take_losses() == Losses((), is_all=True)
    assert not listed(tier)
    tier.close()


def test_a_chunk_that_cannot_be_read_or_is_damaged_is_a_loss(tmp_path: Path) -> None:
    tier = small_disk(tmp_path)
    for number in (1, 2):
        store(tier, number)
    (data,) = tmp_path.glob("*/segment-00000.data")
    contents = bytearray(data.read_bytes())
    contents[0] ^= 1
    data.write_bytes(contents)
    assert load(tier, 1, SMALL) is LoadOutcome.CORRUPT
    assert tier.take_losses() == Losses((key(1),))
    os.truncate(data, 0)
    with pytest.raises(TierError):
        load(tier, 2, SMALL)
    assert tier.take_losses() == Losses((key(2),))
    tier.close()


def test_of_too_many_losses_that_nobody_asks_for_the_keys_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "MAX_LOSSES", 3)
    tier = small_disk(tmp_path)
    for number in range(5):
        store(tier, number)
        tier.remove([key(number)])
    losses = tier.take_losses()
    assert losses.is_all and len(losses.keys) <= 3
    tier.close()


def test_chunks_are_listed_after_those_before_them(tmp_path: Path) -> None:
    """Whatever slots they are in: a router cannot place a block whose parent it does not know."""
    tier = small_disk(tmp_path)
    for number in range(20):
        store(tier, 100 + number)
    tier.remove([key(100 + number) for number in range(20)])  # from now on, the last slots are used first
    parents = {number: None if number < 3 else number - 3 for number in range(18)}
    for number, parent in parents.items():
        before = None if parent is None else key(parent)
        tier.store(key(number), memoryview(payload(number, SMALL)), before, Note(details(number)))
    for _ in range(2):
        order = list(listed(tier))
        assert len(order) == 18
        for number, parent in parents.items():
            assert parent is None or order.index(key(parent)) < order.index(key(number))
        tier.close()
        tier = small_disk(tmp_path)
    tier.close()


def test_chunks_that_claim_to_be_before_each_other_are_listed_too() -> None:
    parents = np.array([1, 0, -1, 2], dtype=np.intc)
    assert sorted(parents_first(parents, np.array([True, True, False, True]))) == [0, 1, 3]
