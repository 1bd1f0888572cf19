"""Our own tiers pass the suite that others inherit; broken ones do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from cargohold.conformance import TierConformance
from cargohold.offload.manager import OffloadKey
from cargohold.offload.tier import CountingTier, LoadOutcome, MemoryTier, SharedTierConfig, StoreOutcome, Tier
from tests.offload.tier.common import codec, disk_tier


class TestMemory(TierConformance):
    outlives_process: ClassVar[bool] = False
    max_chunks: ClassVar[int | None] = 20

    def open(self, place: Path) -> Tier:
        return CountingTier(MemoryTier(self.chunk_bytes, max_chunks=20))


class TestDisk(TierConformance):
    def open(self, place: Path) -> Tier:
        return disk_tier(place / "disk", "512KiB", chunk_bytes=self.chunk_bytes)


class TestBufferedDisk(TierConformance):
    def open(self, place: Path) -> Tier:
        return disk_tier(place / "disk", "512KiB", chunk_bytes=self.chunk_bytes, direct_io=False)


class TestEncryptedDisk(TierConformance):
    def open(self, place: Path) -> Tier:
        return disk_tier(place / "disk", "512KiB", using=codec(bytes(range(32))), chunk_bytes=self.chunk_bytes)


class TestDirectory(TierConformance):
    is_shared: ClassVar[bool] = True

    def open(self, place: Path) -> Tier:
        from cargohold.offload.tier.object_tier import ObjectTier  # noqa: PLC0415  # needs an extra

        return ObjectTier(SharedTierConfig(url=f"file://{place}/shared"), codec(), self.chunk_bytes)


class Shortening(MemoryTier):
    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        return super().store(key, payload[:-1], parent)


class Lying(MemoryTier):
    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        super().load(key, into)
        return LoadOutcome.LOADED


class Hoarding(MemoryTier):
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        del keys


class Boundless(MemoryTier):
    def __init__(self, chunk_bytes: int, max_chunks: int) -> None:
        super().__init__(chunk_bytes)


class Borrowing(MemoryTier):
    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        if key in self._chunks:
            return StoreOutcome.PRESENT
        self._chunks[key] = payload  # type: ignore[assignment]  # that is what is wrong with it
        return StoreOutcome.STORED


class Replacing(MemoryTier):
    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        self.remove([key])
        return super().store(key, payload, parent)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Shortening, "test_the_life_of_chunks"),
        (Lying, "test_the_life_of_chunks"),
        (Hoarding, "test_usage_counts_what_is_there"),
        (Boundless, "test_its_limit_is_never_passed"),
        (Borrowing, "test_what_was_stored_does_not_change_with_its_source"),
        (Replacing, "test_storing_twice_is_storing_once"),
        (Lying, "test_a_chunk_of_another_length_is_not_loaded"),
    ],
)
def test_broken_tiers_fail(broken: type[MemoryTier], test: str, tmp_path: Path) -> None:
    class Suite(TestMemory):
        __test__ = False

        def open(self, place: Path) -> Tier:
            return broken(self.chunk_bytes, max_chunks=20)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)(tmp_path)
