"""A disk tier that is started with less room than before keeps what was used last, as far as it fits."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest

from cargohold.tiers.chunk_format import ChunkCodec, Details, Note
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.files import Segment
from cargohold.tiers.disk.root import bytes_in
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from tests.tiers.common import NAMESPACE, disk_tier, key, payload
from tests.tiers.disks import MIB

PAGE = 4096
SIZES = {"one size": (10_000,), "several sizes": (7 * PAGE - 100, 5 * PAGE, 3 * PAGE - 4000)}
COUNT = 150


class Disk:
    """A directory whose tier is opened with other limits."""

    def __init__(self, root: Path, sizes: tuple[int, ...]) -> None:
        self.root, self.sizes = root, sizes
        clock = count(1_700_000_000 * 10**9, 11 * 10**9)  # so slow that each use is saved with a time of its own
        self._using = ChunkCodec(replace(NAMESPACE, details_bytes=512), None, clock.__next__)

    def open(self, max_bytes: int) -> DiskTier:
        return disk_tier(self.root, max_bytes, using=self._using, chunk_bytes=max(self.sizes), chunk_sizes=self.sizes)

    def payload(self, number: int) -> bytes:
        return payload(number, self.sizes[number % len(self.sizes)])

    def fill(self, max_bytes: int, seed: int) -> list[int]:
        """Store chunks and use them; returns the order."""
        tier = self.open(max_bytes)
        for number in range(COUNT):
            tier.store(key(number), memoryview(self.payload(number)), note=Note(Details(bytes([number]) * 40)))
        order = Random(seed).sample(range(COUNT), COUNT)
        for number in order:
            tier.touch([key(number)])
        tier.close()
        return order

    def there(self, tier: DiskTier) -> set[int]:
        """The chunks that are found; each must be what was stored."""
        found = {number for number, is_there in enumerate(tier.probe([key(at) for at in range(COUNT)])) if is_there}
        for number in found:
            into = bytearray(len(self.payload(number)))
            tier.load(key(number), memoryview(into))
            assert bytes(into) == self.payload(number)
        return found


@pytest.fixture(params=SIZES)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Disk:
    return Disk(tmp_path, SIZES[request.param])


@pytest.mark.parametrize("seed", range(3))
def test_what_was_used_last_stays_as_far_as_it_fits(disk: Disk, seed: int) -> None:
    """Found by use: segments with high numbers were deleted, whatever was in them."""
    order, kept = disk.fill(6 * MIB, seed), set[int]()
    for limit in (MIB, 3 * MIB // 4, MIB // 2):  # when a chunk was used last is known after each
        tier = disk.open(limit)
        kept, usage = disk.there(tier), tier.usage()
        assert bytes_in(disk.root) <= limit
        assert usage.num_bytes > 0.9 * (usage.capacity_bytes or 0), "no more than a chunk's room is left empty"
        oldest = sorted(map(order.index, kept))[2]  # small chunks may fit where no larger one does
        assert kept >= set(order[oldest + 3 :])
        listed = tier.list_chunks(b"", COUNT, with_details=True)
        assert {key: found.tokens for key, found in zip(listed.keys, listed.details, strict=True)} == {
            key(number): bytes([number]) * 40 for number in kept
        }
        tier.check()
        tier.close()
    (holding,) = open_inventory(str(disk.root)).holdings()
    assert list(open_inventory(str(disk.root)).verify(holding.id, delete=False)) == [Verification.GOOD] * len(kept)


def test_what_prune_has_left_stays_wherever_it_is(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.fill(6 * MIB, 0)
    inventory = open_inventory(str(disk.root))
    (holding,) = inventory.holdings()
    inventory.trim(holding.id, holding.num_bytes - 700 * 1024)
    tier = disk.open(6 * MIB)
    kept = disk.there(tier)
    tier.close()
    caplog.clear()
    assert len(kept) > 10
    assert disk.there(disk.open(MIB)) == kept and not caplog.text


def test_a_bad_place_costs_its_chunk_alone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    order = disk.fill(6 * MIB, 0)
    really_read, reads = Segment.read_payload, count()

    def read(segment: Segment, slot: int, into: memoryview, skipped: int = 0) -> None:
        if not next(reads):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really_read(segment, slot, into, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "read_payload", read)
        tier = disk.open(MIB)
    assert len(set(order[-10:]) - disk.there(tier)) == 1
    tier.check()


def test_a_header_that_an_earlier_chunk_left_in_the_middle_of_another_does_not_cost_that_one(tmp_path: Path) -> None:
    """Found by reading: its slot was given back to the file system, and counted twice."""
    disk = Disk(tmp_path, SIZES["several sizes"])
    tier = disk.open(MIB)
    for number in (0, 3):
        tier.store(key(number), memoryview(disk.payload(number)))
    tier.close()
    headers = next(tmp_path.glob("*/segment-00000.headers"))
    with headers.open("r+b") as file:
        chunks = [at for at in range(20) if os.pread(file.fileno(), 8, 256 * at) != bytes(8)]
        file.seek(256 * (chunks[1] + 1))
        file.write(b"remains of an earlier header")
    inventory = open_inventory(str(tmp_path))
    (holding,) = inventory.holdings()
    inventory.trim(holding.id, 1)
    assert disk.there(disk.open(MIB)) == {3}
