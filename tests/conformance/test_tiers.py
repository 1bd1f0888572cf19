"""Our own tiers pass the suite that others inherit; broken ones do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from cargohold.cache import OffloadKey
from cargohold.lab.conformance import TierConformance
from cargohold.tiers import LoadOutcome, StoreOutcome, Tier
from cargohold.tiers.chunk_format import HEADER_BYTES, NO_NOTE, Note
from cargohold.tiers.port import NO_LOSSES, Listing, Losses
from tests.tiers.common import codec, disk_tier, shared_tier
from tests.wrapped_tiers import CountingTier, MemoryTier


class TestMemory(TierConformance):
    outlives_process: ClassVar[bool] = False
    max_chunks: ClassVar[int | None] = 20
    cannot_be_damaged: ClassVar[str] = "it is memory of this process"
    cannot_fail: ClassVar[str] = cannot_be_damaged

    def open(self, place: Path) -> Tier:
        return CountingTier(MemoryTier(self.chunk_bytes, max_chunks=20))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class TestDisk(TierConformance):
    is_listed: ClassVar[bool] = True

    def open(self, place: Path) -> Tier:
        return disk_tier(place / "disk", "512KiB", chunk_bytes=self.chunk_bytes)

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        for headers in place.glob("disk/*/*.headers"):
            at = headers.read_bytes().find(chunk)
            if at >= 0:
                slot_bytes = json.loads((headers.parent / "shard.json").read_text())["slot_bytes"]
                flip(headers.with_suffix(".data"), at // HEADER_BYTES * slot_bytes + slot_bytes // 3)

    def break_medium(self, place: Path) -> None:
        shutil.rmtree(place / "disk")
        (place / "disk").touch()


class TestBufferedDisk(TestDisk):
    def open(self, place: Path) -> Tier:
        return disk_tier(place / "disk", "512KiB", chunk_bytes=self.chunk_bytes, direct_io=False)


class TestDiskOfSeveralSizes(TestDisk):
    def open(self, place: Path) -> Tier:
        sizes = [self.chunk_bytes, 7_100, 4_200]
        return disk_tier(place / "disk", "512KiB", chunk_bytes=self.chunk_bytes, chunk_sizes=sizes)


class TestEncryptedDisk(TestDisk):
    def open(self, place: Path) -> Tier:
        return disk_tier(place / "disk", "512KiB", using=codec(bytes(range(32))), chunk_bytes=self.chunk_bytes)


class TestDirectory(TierConformance):
    is_shared: ClassVar[bool] = True

    def open(self, place: Path) -> Tier:

        return shared_tier(f"file://{place}/shared", codec(), self.chunk_bytes)

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        (value,) = place.glob(f"shared/*/*/{chunk.hex()}")
        flip(value, value.stat().st_size // 2)

    def break_medium(self, place: Path) -> None:
        shutil.rmtree(place / "shared")
        (place / "shared").touch()


class Shortening(MemoryTier):
    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        return super().store(key, payload[:-1], parent, note)


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
    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        if key in self._chunks:
            return StoreOutcome.PRESENT
        self._chunks[key] = payload  # type: ignore[assignment]  # that is what is wrong with it
        return StoreOutcome.STORED


class Replacing(MemoryTier):
    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        self.remove([key])
        return super().store(key, payload, parent, note)


class Silent(CountingTier):
    def take_losses(self) -> Losses:
        return NO_LOSSES


class Brief(CountingTier):
    def list_chunks(self, cursor: bytes, limit: int, *, with_details: bool) -> Listing:
        return replace(super().list_chunks(cursor, limit, with_details=with_details), cursor=b"")


@pytest.mark.parametrize("broken", [Silent, Brief])
def test_who_tells_less_than_it_has_or_loses_fails(broken: type[CountingTier], tmp_path: Path) -> None:
    class Suite(TestDisk):
        __test__ = False

        def open(self, place: Path) -> Tier:
            return broken(super().open(place))

    with pytest.raises(AssertionError):
        Suite().test_who_reads_its_list_and_follows_its_losses_knows_all_chunks(tmp_path)


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


class Files(MemoryTier):
    """Keeps each chunk in a file, and looks at nothing but its length."""

    def __init__(self, place: Path, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self.place = place

    def path(self, key: OffloadKey) -> Path:
        return self.place / key.hex()

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [self.path(key).exists() for key in keys]

    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        if self.path(key).exists():
            return StoreOutcome.PRESENT
        self.path(key).write_bytes(payload)
        return StoreOutcome.STORED

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        if not self.path(key).exists() or self.path(key).stat().st_size != len(into):
            return LoadOutcome.ABSENT
        into[:] = self.path(key).read_bytes()
        return LoadOutcome.LOADED


class SuiteOfFiles(TierConformance):
    __test__ = False

    def open(self, place: Path) -> Tier:
        return Files(place, self.chunk_bytes)

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        flip(place / chunk.hex(), self.chunk_bytes // 2)

    def break_medium(self, place: Path) -> None:
        shutil.rmtree(place)


def test_a_tier_that_verifies_nothing_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="must be verified"):
        SuiteOfFiles().test_damage_is_found_and_the_next_store_mends_it(tmp_path)
    with pytest.raises(AssertionError):
        SuiteOfFiles().test_damage_is_found_by_the_next_process(tmp_path)


def test_errors_of_the_medium_are_tier_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SuiteOfFiles().test_a_failing_medium_raises_tier_errors_and_nothing_else(tmp_path)


class Deaf(SuiteOfFiles):
    __test__ = False

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        pass

    def break_medium(self, place: Path) -> None:
        pass


def test_hooks_that_reach_nothing_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has not reached"):
        Deaf().test_damage_is_found_and_the_next_store_mends_it(tmp_path)
    with pytest.raises(AssertionError):
        Deaf().test_a_failing_medium_raises_tier_errors_and_nothing_else(tmp_path)


class Hookless(TierConformance):
    __test__ = False

    def open(self, place: Path) -> Tier:
        return Files(place, self.chunk_bytes)


def test_hooks_are_left_out_for_a_reason_only(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="cannot_be_damaged"):
        Hookless().test_damage_is_found_and_the_next_store_mends_it(tmp_path)
    with pytest.raises(NotImplementedError, match="cannot_fail"):
        Hookless().test_a_failing_medium_raises_tier_errors_and_nothing_else(tmp_path)
