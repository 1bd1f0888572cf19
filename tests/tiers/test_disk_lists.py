"""A disk keeps what engines know of its chunks, and lists them for the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.tiers import Tier
from cargohold.tiers.chunk_format import ChunkCodec, Details, Note
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.encryption import EncryptionKey
from tests.tiers.common import NAMESPACE, disk_tier, key, payload, ticking

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
        listing = tier.list_chunks(cursor, limit)
        assert len(listing.found) <= limit
        for chunk in listing.found:
            assert chunk.key not in found
            found[chunk.key] = chunk.details
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
