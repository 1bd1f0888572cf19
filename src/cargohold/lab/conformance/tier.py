"""The conformance suite for tiers: tests of what every tier must do, to be inherited."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import pytest

from cargohold.cache import OffloadKey
from cargohold.errors import TierError
from cargohold.lab.conformance.policy import contents, key
from cargohold.tiers import JobKind, JobStatus, LoadOutcome, QueueConfig, StoreOutcome, Tier, TierJob, TierQueue

NUM_THREADS = 4
NUM_ROUNDS = 40
QUEUE_S = 30.0
"""Deadline of jobs in seconds: longer than any medium takes to fail."""


class TierConformance(ABC):
    """Tests a tier: stores, loads and removes chunks, from one thread and from several, also on a medium that goes bad.

    Attributes:
        chunk_bytes: bytes of the largest chunk; not a multiple of the page size, so that padding is tested.
        outlives_process: whether chunks stay when the tier is closed and opened again.
        is_shared: whether others may use the same store, so that ``usage`` counts what this tier stored, not what is there.
        max_chunks: chunks that fit in, if the tier has a limit that a test can reach.
        is_listed: whether engines rely on its list, and on what it reports of losses; see ``TierConfig.is_listed``.
        cannot_be_damaged: for a tier whose medium is the memory of its own process, the reason why no stored byte can change.
            Any other tier must implement ``damage``.
        cannot_fail: the reason why its medium cannot fail, if so. Any other tier must implement ``break_medium``.
    """

    chunk_bytes: ClassVar[int] = 10_000
    outlives_process: ClassVar[bool] = True
    is_shared: ClassVar[bool] = False
    max_chunks: ClassVar[int | None] = None
    is_listed: ClassVar[bool] = False
    cannot_be_damaged: ClassVar[str] = ""
    cannot_fail: ClassVar[str] = ""

    @abstractmethod
    def open(self, place: Path) -> Tier:
        """Open a tier with a medium for this directory alone: the same directory, the same chunks.

        The tier must have room for at least 20 chunks of ``chunk_bytes``.
        """

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        """Change a byte in the middle of a chunk's stored bytes, directly on the medium, while a tier may be open on it."""
        del place, chunk
        raise NotImplementedError(f"{type(self).__name__} needs damage(place, chunk), or a reason in cannot_be_damaged")

    def break_medium(self, place: Path) -> None:
        """Make the medium fail while a tier is open on it, like a disk that is pulled out or a server that goes away."""
        del place
        raise NotImplementedError(f"{type(self).__name__} needs break_medium(place), or a reason in cannot_fail")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A directory that belongs to this test alone."""
        return tmp_path

    def test_the_life_of_chunks(self, place: Path) -> None:
        """Chunks are absent, stored, found, loaded, removed, absent, and stored again."""
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
        """Storing a key that is there answers ``PRESENT`` and changes nothing: a key stands for its contents."""
        tier = self.open(place)
        assert self._store(tier, "a") is StoreOutcome.STORED
        usage = tier.usage()
        assert self._store(tier, "a") is StoreOutcome.PRESENT
        assert tier.usage() == usage
        assert self._load(tier, "a") == self._contents("a")
        tier.close()

    def test_usage_counts_what_is_there(self, place: Path) -> None:
        """``usage`` counts the chunks, and no fewer bytes than they have."""
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
        """Chunks may be shorter than ``chunk_bytes``, and their memory need not be aligned."""
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
        """A chunk is not loaded into a destination of another length than was stored: it cannot be what the caller expects."""
        tier = self.open(place)
        self._store(tier, "a")
        for size in (self.chunk_bytes - 1, 1):
            assert tier.load(key("a"), memoryview(bytearray(size))) in {LoadOutcome.ABSENT, LoadOutcome.CORRUPT}
        tier.close()

    def test_damage_is_found_and_the_next_store_mends_it(self, place: Path) -> None:
        """A damaged chunk is not handed out and is forgotten, until it is stored again; other chunks stay."""
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
        """A chunk that was damaged while no tier was open is not handed out: opening the tier or loading the chunk finds it."""
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
        """Calls raise ``TierError`` or answer truthfully from what the tier knows; ``usage`` and ``close`` never raise."""
        if self.cannot_fail:
            pytest.skip(f"its medium cannot fail: {self.cannot_fail}")
        tier = self.open(place)
        self._store(tier, "a")
        self.break_medium(place)
        errors: list[TierError] = []
        for _ in range(2):  # after a failure, the tier must still take calls
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
        """Behind a ``TierQueue``, as in an engine, jobs on a failing medium end, done or failed, and nothing is raised."""
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
            if result.answers == [LoadOutcome.LOADED]:
                assert into == self._contents("a")
        queue.shutdown(QUEUE_S)

    def test_what_was_stored_does_not_change_with_its_source(self, place: Path) -> None:
        """The caller may overwrite the payload's memory as soon as ``store`` has returned."""
        tier = self.open(place)
        source = bytearray(self._contents("a"))
        tier.store(key("a"), memoryview(source))
        source[:] = bytes(len(source))
        assert self._load(tier, "a") == self._contents("a")
        tier.close()

    def test_chunks_are_stored_from_and_loaded_into_its_staging_memory(self, place: Path) -> None:
        """As the threads of a ``TierQueue`` do: each has one piece of it, for chunks of all sizes."""
        tier = self.open(place)
        pieces = [tier.staging() for _ in range(2)]
        for size in (self.chunk_bytes, 1, self.chunk_bytes // 2 + 1):
            for number, piece in enumerate(pieces):
                piece[:size] = contents(f"{number}", size)
            for number, piece in enumerate(pieces):
                stored = tier.store(key(f"{number} of {size}"), piece[:size])
                assert stored is StoreOutcome.STORED
            for number, piece in enumerate(reversed(pieces)):
                piece[:size] = bytes(size)
                assert tier.load(key(f"{number} of {size}"), piece[:size]) is LoadOutcome.LOADED
                assert piece[:size] == contents(f"{number}", size)
        tier.close()

    def test_chunks_outlive_the_process(self, place: Path) -> None:
        """A tier that is closed and opened again holds the same chunks."""
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
        """A full tier refuses chunks or evicts others, within its capacity; every chunk that it finds can be loaded."""
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

    def test_who_reads_its_list_and_follows_its_losses_knows_all_chunks(self, place: Path) -> None:
        """Whatever it stores, evicts or removes, it need not be asked which chunks it has. Nor after a restart."""
        if not self.is_listed:
            pytest.skip("no engine relies on its list")
        names = [f"{number}" for number in range(6 * (self.max_chunks or 10))]
        keys = [key(name) for name in names]
        tier = self.open(place)
        known = set(self._listed(tier))
        for at, name in enumerate(names):
            if self._store(tier, name) is StoreOutcome.STORED:
                known.add(keys[at])
            if at % 5 == 4:
                tier.remove(keys[at - 1 : at])
            losses = tier.take_losses()
            known = set(self._listed(tier)) if losses.is_all else known.difference(losses.keys)
            assert known == {k for k, is_there in zip(keys, tier.probe(keys), strict=True) if is_there}
        assert sorted(self._listed(tier)) == sorted(known), "the list is not what is there"
        tier.close()
        if self.outlives_process:
            tier = self.open(place)
            assert sorted(self._listed(tier)) == sorted(known), "after a restart, the list is not what is there"
            tier.close()

    def test_threads_get_what_belongs_to_their_keys(self, place: Path) -> None:
        """Threads that store, load and remove the same few chunks at once never get wrong contents, and raise nothing."""
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

    def _listed(self, tier: Tier) -> list[OffloadKey]:
        listing = tier.list_chunks(b"", 3, with_details=False)
        found = list(listing.keys)
        while listing.cursor:
            listing = tier.list_chunks(listing.cursor, 3, with_details=False)
            found += listing.keys
        return found

    def _store(self, tier: Tier, name: str) -> StoreOutcome:
        return tier.store(key(name), memoryview(self._contents(name)))

    def _load(self, tier: Tier, name: str) -> bytes | LoadOutcome:
        """The chunk's bytes, or why there are none."""
        into = bytearray(self.chunk_bytes)
        outcome = tier.load(key(name), memoryview(into))
        return bytes(into) if outcome is LoadOutcome.LOADED else outcome
