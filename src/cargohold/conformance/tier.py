"""What any tier must do, as a suite of tests to inherit."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import pytest

from cargohold.conformance.chunks import contents, key
from cargohold.errors import TierError
from cargohold.offload.manager import OffloadKey
from cargohold.offload.tier import (
    JobKind,
    JobStatus,
    LoadOutcome,
    QueueConfig,
    StoreOutcome,
    Tier,
    TierJob,
    TierQueue,
)

NUM_THREADS = 4
NUM_ROUNDS = 40
QUEUE_S = 30.0
"""Longer than any medium takes to fail."""


class TierConformance(ABC):
    """Stores, loads and forgets chunks in a tier, from one thread and from several.

    Attributes:
        chunk_bytes: bytes of the largest chunk; no whole number of pages, so that padding is tested.
        outlives_process: whether chunks stay when the tier is closed and opened again.
        is_shared: whether others use the same store, so that usage counts what was stored here, not what is there.
        max_chunks: chunks that fit, if the tier has a limit that a test can reach.
        cannot_be_damaged: why no stored byte can ever change, for a tier whose medium is the memory of its own process. Any
            other tier has ``damage``.
        cannot_fail: why its medium cannot fail. Any other tier has ``break_medium``.
    """

    chunk_bytes: ClassVar[int] = 10_000
    outlives_process: ClassVar[bool] = True
    is_shared: ClassVar[bool] = False
    max_chunks: ClassVar[int | None] = None
    cannot_be_damaged: ClassVar[str] = ""
    cannot_fail: ClassVar[str] = ""

    @abstractmethod
    def open(self, place: Path) -> Tier:
        """A tier on a medium of ``place``'s own: the same directory, the same chunks.

        It takes 20 chunks of ``chunk_bytes`` at least.
        """

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        """Change a byte in the middle of what the medium holds of a chunk, behind the back of the tier that is open there."""
        del place, chunk
        raise NotImplementedError(f"{type(self).__name__} needs damage(place, chunk), or a reason in cannot_be_damaged")

    def break_medium(self, place: Path) -> None:
        """Make the medium fail, as a disk that is torn out or a server that goes, while a tier is open on it."""
        del place
        raise NotImplementedError(f"{type(self).__name__} needs break_medium(place), or a reason in cannot_fail")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A directory of this test's own."""
        return tmp_path

    def test_the_life_of_chunks(self, place: Path) -> None:
        """Absent, stored, found, loaded, removed, stored again."""
        tier = self.open(place)
        keys = [key(f"{number}") for number in range(4)]
        assert tier.probe(keys) == [False] * 4, "chunks are found before any was stored"
        assert tier.probe([]) == []
        assert self._load(tier, "0") is LoadOutcome.ABSENT
        for number in range(3):
            parent = keys[number - 1] if number else None
            payload = memoryview(self._contents(f"{number}"))
            assert tier.store(keys[number], payload, parent) is StoreOutcome.STORED
        assert tier.probe(keys) == [True, True, True, False], "of four chunks the first three were stored"
        assert [self._load(tier, f"{number}") for number in range(3)] == [self._contents(f"{n}") for n in range(3)]
        tier.touch(keys)
        tier.remove([keys[1], keys[3]])
        tier.remove([])
        tier.touch([])
        assert tier.probe(keys) == [True, False, True, False], "the second was removed"
        assert self._load(tier, "1") is LoadOutcome.ABSENT
        assert self._load(tier, "2") == self._contents("2")
        assert self._store(tier, "1") is StoreOutcome.STORED
        assert self._load(tier, "1") == self._contents("1")
        tier.close()

    def test_storing_twice_is_storing_once(self, place: Path) -> None:
        """A key names contents: what is there stays as it is."""
        tier = self.open(place)
        assert self._store(tier, "a") is StoreOutcome.STORED
        usage = tier.usage()
        assert self._store(tier, "a") is StoreOutcome.PRESENT
        assert tier.usage() == usage
        assert self._load(tier, "a") == self._contents("a")
        tier.close()

    def test_usage_counts_what_is_there(self, place: Path) -> None:
        """Chunks, and at least their bytes."""
        tier = self.open(place)
        assert tier.usage().num_chunks == 0
        for number in range(3):
            self._store(tier, f"{number}")
        usage = tier.usage()
        assert usage.num_chunks == 3
        assert usage.num_bytes >= 3 * self.chunk_bytes
        tier.remove([key("0"), key("1")])
        if not self.is_shared:
            assert tier.usage().num_chunks == 1
            assert tier.usage().num_bytes < usage.num_bytes
        tier.close()

    @pytest.mark.parametrize("offset", [0, 1, 7])
    def test_sizes_and_places_in_memory_do_not_matter(self, place: Path, offset: int) -> None:
        """Chunks may be short, and lie anywhere."""
        tier = self.open(place)
        sizes = [1, 511, 4095, 4096, 4097, 8192, self.chunk_bytes]
        for size in [size for size in sizes if size <= self.chunk_bytes]:
            name = f"{size} at {offset}"
            memory = bytearray(offset) + contents(name, size)
            assert tier.store(key(name), memoryview(memory)[offset:]) is StoreOutcome.STORED
            into = bytearray(offset + size)
            assert tier.load(key(name), memoryview(into)[offset:]) is LoadOutcome.LOADED
            assert into[offset:] == contents(name, size)
        tier.close()

    def test_a_chunk_of_another_length_is_not_loaded(self, place: Path) -> None:
        """Whoever expects another length would get something else than it asked for."""
        tier = self.open(place)
        self._store(tier, "a")
        for size in (self.chunk_bytes - 1, 1):
            assert tier.load(key("a"), memoryview(bytearray(size))) in {LoadOutcome.ABSENT, LoadOutcome.CORRUPT}
        tier.close()

    def test_damage_is_found_and_the_next_store_mends_it(self, place: Path) -> None:
        """A chunk that fails its check is not handed out, and is not there any more; others are."""
        if self.cannot_be_damaged:
            pytest.skip(f"nothing to damage: {self.cannot_be_damaged}")
        tier = self.open(place)
        for name in ("a", "b"):
            self._store(tier, name)
        self.damage(place, key("a"))
        loaded = self._load(tier, "a")
        assert loaded != self._contents("a"), "the whole chunk was loaded: damage() has not reached what is stored"
        assert not isinstance(loaded, bytes), "a damaged chunk was handed out: what is loaded must be verified"
        assert loaded is LoadOutcome.CORRUPT
        assert tier.probe([key("a"), key("b")]) == [False, True], "a damaged chunk is not to be found again"
        assert self._load(tier, "a") is LoadOutcome.ABSENT
        assert self._store(tier, "a") is StoreOutcome.STORED
        assert [self._load(tier, name) for name in ("a", "b")] == [self._contents("a"), self._contents("b")]
        tier.close()

    def test_damage_is_found_by_the_next_process(self, place: Path) -> None:
        """What was damaged while nobody had it open is a miss, when it is opened or when it is loaded."""
        if self.cannot_be_damaged or not self.outlives_process:
            pytest.skip(self.cannot_be_damaged or "this tier keeps nothing when it is closed")
        first = self.open(place)
        for name in ("a", "b"):
            self._store(first, name)
        first.close()
        self.damage(place, key("a"))
        second = self.open(place)
        loaded = self._load(second, "a")
        assert not isinstance(loaded, bytes), "a damaged chunk was handed out: what is loaded must be verified"
        assert self._load(second, "b") == self._contents("b")
        second.close()

    def test_a_failing_medium_raises_tier_errors_and_nothing_else(self, place: Path) -> None:
        """What it still knows it may answer; it never hands out what it did not store, and can always be asked and closed."""
        if self.cannot_fail:
            pytest.skip(f"its medium cannot fail: {self.cannot_fail}")
        tier = self.open(place)
        self._store(tier, "a")
        self.break_medium(place)
        errors: list[TierError] = []
        for _ in range(2):  # the first failure must not spoil the tier
            for call in (
                lambda: tier.probe([key("a"), key("b")]),
                lambda: tier.touch([key("a")]),
                lambda: self._load(tier, "a"),
                lambda: self._store(tier, "b"),
                lambda: tier.remove([key("a")]),
            ):
                try:
                    answer = call()
                except TierError as error:
                    errors.append(error)
                else:
                    assert not isinstance(answer, bytes) or answer == self._contents("a"), (
                        "it loaded what it never stored"
                    )
                    assert answer is not StoreOutcome.PRESENT, "it claims to hold what it never stored"
            tier.usage()
        assert all(error.reason for error in errors), "an error says why"
        assert errors, "nothing failed: break_medium() has not reached the medium, or failures are hidden"
        tier.close()

    def test_a_failing_medium_ends_jobs(self, place: Path) -> None:
        """Between the engine and a failing medium is ``TierQueue``: jobs end, nothing is raised, no thread is lost."""
        if self.cannot_fail:
            pytest.skip(f"its medium cannot fail: {self.cannot_fail}")
        tier = self.open(place)
        self._store(tier, "a")
        queue = TierQueue(tier, time.monotonic, QueueConfig(num_threads=1))
        self.break_medium(place)
        payload, into = memoryview(self._contents("b")), memoryview(bytearray(self.chunk_bytes))
        jobs = [
            TierJob(0, JobKind.STORE, [key("b")], time.monotonic() + QUEUE_S, [payload]),
            TierJob(1, JobKind.LOAD, [key("a")], time.monotonic() + QUEUE_S, [into]),
        ]
        for job in jobs:
            assert queue.submit(job), "a queue that has failed once takes no more"
            assert queue.drain(QUEUE_S), "a job does not end"
            (result,) = queue.poll()
            assert result.status in {JobStatus.DONE, JobStatus.FAILED}
            if result.answers == (LoadOutcome.LOADED,):
                assert into == self._contents("a")
        queue.shutdown(QUEUE_S)

    def test_what_was_stored_does_not_change_with_its_source(self, place: Path) -> None:
        """The source may be reused as soon as ``store`` has returned."""
        tier = self.open(place)
        source = bytearray(self._contents("a"))
        tier.store(key("a"), memoryview(source))
        source[:] = bytes(len(source))
        assert self._load(tier, "a") == self._contents("a")
        tier.close()

    def test_chunks_outlive_the_process(self, place: Path) -> None:
        """Closed and opened again, it holds what it held."""
        if not self.outlives_process:
            pytest.skip("this tier keeps nothing when it is closed")
        first = self.open(place)
        for number in range(3):
            self._store(first, f"{number}")
        first.close()
        second = self.open(place)
        assert second.probe([key(f"{number}") for number in range(4)]) == [True, True, True, False]
        assert [self._load(second, f"{number}") for number in range(3)] == [self._contents(f"{n}") for n in range(3)]
        second.close()

    def test_its_limit_is_never_passed(self, place: Path) -> None:
        """A full tier refuses chunks or evicts others; what it says is there can be loaded."""
        tier = self.open(place)
        names = [f"{number}" for number in range(3 * (self.max_chunks or 10))]
        for name in names:
            assert self._store(tier, name) in {StoreOutcome.STORED, StoreOutcome.REFUSED}
            usage = tier.usage()
            assert usage.capacity_bytes is None or usage.num_bytes <= usage.capacity_bytes
            assert self.max_chunks is None or usage.num_chunks <= self.max_chunks
        there = tier.probe([key(name) for name in names])
        assert sum(there) == tier.usage().num_chunks
        for name, is_there in zip(names, there, strict=True):
            assert self._load(tier, name) == (self._contents(name) if is_there else LoadOutcome.ABSENT)
        tier.close()

    def test_threads_get_what_belongs_to_their_keys(self, place: Path) -> None:
        """Stores, loads and removals of the same few chunks from several threads, which must not get in each other's way."""
        tier = self.open(place)
        wrong: list[object] = []

        def work(stride: int) -> None:
            into = bytearray(self.chunk_bytes)
            try:
                for at in range(NUM_ROUNDS):
                    name = f"{at * stride % 7}"
                    self._store(tier, name)
                    loaded = tier.load(key(name), memoryview(into))
                    if loaded is LoadOutcome.LOADED and into != self._contents(name):
                        wrong.append(name)
                    if at % 5 == 0:
                        tier.remove([key(f"{(at + 1) % 7}")])
            except Exception as error:  # noqa: BLE001  # whatever goes wrong in a thread, the test must tell
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(stride,)) for stride in range(1, NUM_THREADS + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, f"threads got wrong contents or failed: {wrong}"
        for number in range(7):
            self._store(tier, f"{number}")
            assert self._load(tier, f"{number}") == self._contents(f"{number}")
        tier.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _contents(self, name: str) -> bytes:
        return contents(name, self.chunk_bytes)

    def _store(self, tier: Tier, name: str) -> StoreOutcome:
        return tier.store(key(name), memoryview(self._contents(name)))

    def _load(self, tier: Tier, name: str) -> bytes | LoadOutcome:
        """The chunk's bytes, or why there are none."""
        into = bytearray(self.chunk_bytes)
        outcome = tier.load(key(name), memoryview(into))
        return bytes(into) if outcome is LoadOutcome.LOADED else outcome
