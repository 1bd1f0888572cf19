"""The limit of a store: kept by all workers together, whoever looks when, and in spite of what may not be deleted."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import LocalStore, MemoryStore, ObjectStore

from cargohold.errors import ConfigError, TierError
from cargohold.tiers import SharedTierConfig, StoreOutcome, Tier, open_tier
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.inventory import StoredObject
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.namespace import Namespace
from cargohold.tiers.stores import objects as store_budget
from cargohold.tiers.stores.directory import list_ours
from cargohold.tiers.stores.objects import StoreBudget
from tests.tiers.bad_medium import ordinary_user
from tests.tiers.common import CHUNK, NAMESPACE, key, load, payload
from tests.tiers.shared import bytes_of_files, store

WAIT_S = 30.0
VALUE = CHUNK + HEADER_BYTES
OTHERS = replace(NAMESPACE, weights="of others")


def shared(directory: Path, max_bytes: int | None, namespace: Namespace = NAMESPACE, num_shards: int = 1) -> Tier:
    return open_tier(SharedTierConfig(url=f"file://{directory}", max_bytes=max_bytes), namespace, [CHUNK], num_shards)


class TestBudget:
    """The limit of a store, by itself; every chunk has one byte."""

    def setup_method(self) -> None:
        self.store = MemoryStore()
        self.budget = StoreBudget(self.store, 32)

    def put(self, number: int) -> bool:
        with self.budget.room_for(1) as is_granted:
            if is_granted:
                obstore.put(self.store, f"{'0' * 32}/00/{number:04x}", b"x")
        return is_granted

    def test_what_is_just_being_written_counts(self) -> None:
        """Found by reading: who looked at the store did not see it, so eight threads could exceed the limit by seven chunks."""
        with ExitStack() as writing:
            granted = [writing.enter_context(self.budget.room_for(1)) for _ in range(40)]
            assert sum(granted) == 32

    def test_nobody_waits_while_another_makes_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found by reading: a listing of a large bucket takes minutes, and held all threads, so loads failed meanwhile too."""
        for number in range(33):
            assert self.put(number)
        arrived, opened = threading.Event(), threading.Event()

        def slow_list(store: object, prefix: str = "") -> Iterator[StoredObject]:
            arrived.set()
            assert opened.wait(WAIT_S)
            return list_ours(self.store, prefix)

        monkeypatch.setattr("cargohold.tiers.stores.objects.list_ours", slow_list)
        num_free = 0
        looker = threading.Thread(target=lambda: [self.put(number) for number in range(100, 110)], daemon=True)
        looker.start()
        assert arrived.wait(WAIT_S)
        while self.put(200 + num_free):
            num_free += 1
        assert num_free < 16, "there is a limit also while it is looked at"
        opened.set()
        looker.join(WAIT_S)
        assert not looker.is_alive()
        assert len(list(list_ours(self.store))) <= 32

    def test_a_store_that_fails_while_it_is_looked_at_is_looked_at_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*_: object) -> Iterator[StoredObject]:
            raise OSError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr("cargohold.tiers.stores.objects.list_ours", failing)
            with pytest.raises(OSError, match="no answer"):
                self.put(0)
        assert self.put(0)

    def test_a_store_without_room_is_not_listed_for_every_chunk(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each refused chunk would otherwise cost a listing and an attempt to delete, which of a bucket take minutes."""
        foreign = [f"{'1' * 32}/00/{number:04x}" for number in range(32)]
        for path in foreign:
            obstore.put(self.store, path, b"x")
        attempts = refusing_to_delete(monkeypatch, "1")
        looks = counting_looks(monkeypatch)
        assert not any(self.put(number) for number in range(30))
        assert len(looks) == len(attempts) == 10, "the others were refused at once: two for every one that looked"
        assert caplog.text.count("no more chunks are stored") == 1
        assert caplog.text.count("cannot be deleted to make room") == 1
        monkeypatch.undo()
        assert any(self.put(number) for number in range(3)), "the right came back"

    def test_what_may_not_be_deleted_does_not_take_the_rest_along(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of what is left beside it, only a little more than needed is deleted, as without it."""
        for number in range(30):
            obstore.put(self.store, f"{'1' * 32}/00/{number:04x}", b"x")
        refusing_to_delete(monkeypatch, "1")
        assert all(self.put(number) for number in range(10))
        assert len(list(list_ours(self.store, "0" * 32))) == 2

    def test_a_store_with_very_many_objects_takes_no_memory_for_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found by running: a listing kept half a kilobyte of each, 2 GB of 10 TiB in chunks of 2 MiB, on every worker."""
        monkeypatch.setattr(store_budget, "_MOST_REMEMBERED", 10)

        def many(_: object) -> Iterator[StoredObject]:
            for number in range(5000):
                yield StoredObject(f"{'0' * 32}/00/{number:064x}", "0" * 32, bytes(32), 1, float(number))

        monkeypatch.setattr(store_budget, "list_ours", many)
        tracemalloc.start()
        try:
            budget = StoreBudget(self.store, 5000)
            budget.look_ahead()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 200_000, "1.5 MB if all are kept"

    def test_a_listing_that_begins_anew_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found by running: a server that gave the same page for ever was listed for ever, and nobody was told."""
        obstore.put(self.store, f"{'1' * 32}/00/{'0' * 64}", b"x")
        (page,) = obstore.list(self.store)
        monkeypatch.setattr(obstore, "list", lambda *_: itertools.repeat(page))
        with pytest.raises(ValueError, match="the store's listing does not end"):
            self.budget.look_ahead()
        monkeypatch.undo()
        assert self.put(2)

    @pytest.mark.parametrize("num_remembered", [1, 3, 100])
    def test_the_same_is_deleted_however_few_objects_are_remembered(
        self, num_remembered: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_budget, "_MOST_REMEMBERED", num_remembered)
        for number in range(40):
            obstore.put(self.store, f"{number % 2 * '1' or '0'}{'0' * 31}/00/{number:04x}", b"x")
        refusing_to_delete(monkeypatch, "0")
        assert self.put(100)
        left = {int(known.path[-4:], 16) for known in list_ours(self.store)}
        assert left == {*range(0, 40, 2), 23, 25, 27, 29, 31, 33, 35, 37, 39, 100}

    def test_another_error_of_deleting_is_one_of_the_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise GenericError("no answer")

        for number in range(32):
            assert self.put(number)
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "delete", fail)
            with pytest.raises(GenericError, match="no answer"):
                self.put(32)
        assert self.put(32)


def refusing_to_delete(monkeypatch: pytest.MonkeyPatch, start: str) -> list[str]:
    """Let nothing be deleted whose path begins with ``start``, in the words of the package; return the attempts."""
    really_delete, attempts = obstore.delete, []

    def delete(store: ObjectStore, path: str) -> None:
        if path.startswith(start):
            attempts.append(path)
            raise GenericError(f"DeleteObjects request failed for key {path}: Access Denied (code: AccessDenied)")
        really_delete(store, path)

    monkeypatch.setattr(obstore, "delete", delete)
    return attempts


def counting_looks(monkeypatch: pytest.MonkeyPatch) -> list[ObjectStore]:
    looks: list[ObjectStore] = []

    def look(store: ObjectStore, prefix: str = "") -> Iterator[StoredObject]:
        looks.append(store)
        return list_ours(store, prefix)

    monkeypatch.setattr(store_budget, "list_ours", look)
    return looks


# --- the workers of one engine ----------------------------------------------------------------------------------------


class Workers:
    """Workers that write to a store by turns, each several chunks at a time; what they do is drawn.

    Args:
        random: draws it.
        num_workers: number of workers.
        num_known: number of workers that each of them is told of.
        max_bytes: the limit.
        value_bytes: bytes of the largest chunk.
    """

    def __init__(self, random: Random, num_workers: int, num_known: int, max_bytes: int, value_bytes: int) -> None:
        self.store = MemoryStore()
        self.budgets = [StoreBudget(self.store, max_bytes, num_known, value_bytes) for _ in range(num_workers)]
        self.most = 0
        self.num_written = 0
        self._random = random
        self._value_bytes = value_bytes
        self._writing: list[tuple[ExitStack, int]] = []
        self._depth = 0

    def act(self) -> None:
        """A worker begins to write a chunk or ends doing so."""
        if self._writing and self._random.random() < 0.5:
            self.end(self._random.randrange(len(self._writing)))
        else:
            self.begin(self._random.randrange(len(self.budgets)), self._random.randint(1, self._value_bytes))

    def begin(self, worker: int, num_bytes: int) -> bool:
        room = ExitStack()
        is_granted = room.enter_context(self.budgets[worker].room_for(num_bytes))
        if is_granted:
            self._writing.append((room, num_bytes))
        return is_granted

    def end(self, at: int) -> None:
        room, num_bytes = self._writing.pop(at)
        if self._random.random() < 0.9:  # else the write fails
            obstore.put(self.store, f"{'0' * 32}/00/{self.num_written:08x}", bytes(num_bytes))
            self.num_written += 1
        room.close()
        self.most = max(self.most, self.taken())

    def end_all(self) -> None:
        while self._writing:
            self.end(0)

    def taken(self) -> int:
        return sum(known.num_bytes for known in list_ours(self.store))

    def look(self, store: ObjectStore, prefix: str = "") -> Iterator[StoredObject]:
        """A listing, before and after which the others go on; these may look, too."""
        self._others_act()
        found = list(list_ours(store, prefix))
        self._others_act()
        return iter(found)

    def _others_act(self) -> None:
        if self._depth < 2:
            self._depth += 1
            for _ in range(self._random.randrange(4)):
                self.act()
            self._depth -= 1


def written_by(seed: int, *, told: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Workers, int]:
    """Workers after many steps, and their limit; each knows how many there are, or thinks that it is alone."""
    random = Random(seed)
    num_workers, value_bytes = random.randint(2, 8), random.randint(1, 4)
    max_bytes = random.choice([(2 * num_workers - 1) * value_bytes, 16 * num_workers * value_bytes, 200])
    workers = Workers(random, num_workers, num_workers if told else 1, max_bytes, value_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(store_budget, "list_ours", workers.look)
        for _ in range(150):
            workers.act()
        workers.end_all()
    return workers, max_bytes


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 48))])
def test_workers_of_one_engine_keep_a_limit_whoever_looks_when(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, max_bytes = written_by(seed, told=True, monkeypatch=monkeypatch)
    assert workers.most <= max_bytes
    for worker in range(len(workers.budgets)):
        assert workers.begin(worker, 1), "each of them can still write"
        workers.end_all()


def test_workers_that_do_not_know_of_each_other_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = (written_by(seed, told=False, monkeypatch=monkeypatch) for seed in range(40))
    assert any(workers.most > max_bytes for workers, max_bytes in ends)


@pytest.mark.parametrize(("num_shards", "num_chunks"), [(8, 40), (4, 16), (2, 2)])
def test_an_engine_with_several_workers_keeps_the_limit(tmp_path: Path, num_shards: int, num_chunks: int) -> None:
    """Found by use: each worker had the whole limit, and eight of them exceeded it by fifteen percent."""
    max_bytes = num_shards * num_chunks * VALUE
    tiers = [
        shared(tmp_path, max_bytes, replace(NAMESPACE, split=f"rank {rank} of {num_shards}"), num_shards)
        for rank in range(num_shards)
    ]
    for number in range(60):
        assert [store(tier, number) for tier in tiers] == [StoreOutcome.STORED] * num_shards
        assert bytes_of_files(tmp_path) <= max_bytes
    assert all(load(tier, 59) == payload(59) for tier in tiers)


# --- another user's chunks --------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that belongs to an ordinary user, who this process is."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with ordinary_user(directory):
            yield directory
            for path in [directory, *directory.rglob("*")]:
                if path.is_dir():
                    path.chmod(0o700)


@contextmanager
def with_mode(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode & 0o777
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def of_others(directory: Path, count: int) -> Path:
    """Chunks of another model, older than all others; return their folder."""
    tier = shared(directory, None, OTHERS)
    for number in range(count):
        assert store(tier, number) is StoreOutcome.STORED
    folder = directory / OTHERS.id / "00"
    for at, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (at, at))
    return folder


def test_chunks_that_may_not_be_deleted_are_passed_over(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Found by use: when the oldest chunk was another user's, every store failed from then on."""
    with with_mode(of_others(place, 3), 0o500):
        tier = shared(place, 12 * VALUE)
        for number in range(40):
            assert store(tier, number) is StoreOutcome.STORED
            assert bytes_of_files(place) <= 12 * VALUE
    assert sum(tier.probe([key(number) for number in range(40)])) >= 6
    assert all(shared(place, None, OTHERS).probe([key(number) for number in range(3)]))
    assert caplog.text.count("cannot be deleted to make room") == 1


def test_chunks_are_put_off_while_the_store_is_listed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by use: they were refused, and for ten minutes taken to be absent, promised ones too."""
    tier = shared(place, 12 * VALUE)
    arrived, opened = threading.Event(), threading.Event()

    def slow_list(store: ObjectStore, prefix: str = "") -> Iterator[StoredObject]:
        arrived.set()
        assert opened.wait(WAIT_S)
        return list_ours(store, prefix)

    monkeypatch.setattr("cargohold.tiers.stores.objects.list_ours", slow_list)
    first = threading.Thread(target=store, args=(tier, 0), daemon=True)
    first.start()
    assert arrived.wait(WAIT_S)
    assert store(tier, 1) is StoreOutcome.LATER
    opened.set()
    first.join(WAIT_S)
    assert store(tier, 0) is StoreOutcome.PRESENT and store(tier, 1) is StoreOutcome.STORED


def test_a_store_with_a_limit_is_listed_before_the_first_chunk_comes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: the first hand-off of an engine's life was announced while 40,000 objects were listed, and did not come."""
    looks = counting_looks(monkeypatch)
    tier = shared(place, 64 * VALUE)
    tier.begin()
    for thread in threading.enumerate():  # it may have ended by now
        if thread.name == "cargohold-shared-list":
            thread.join(WAIT_S)
    assert len(looks) == 1
    assert store(tier, 0) is StoreOutcome.STORED and len(looks) == 1


def test_where_nothing_may_be_deleted_chunks_are_refused(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = of_others(place, 12)
    tier = shared(place, 12 * VALUE)
    with with_mode(folder, 0o500):
        assert {store(tier, number) for number in range(20)} == {StoreOutcome.REFUSED}
    (line,) = (record.getMessage() for record in caplog.records if "no more chunks" in record.getMessage())
    assert "nothing more can be deleted" in line
    assert StoreOutcome.STORED in {store(tier, number) for number in range(3)}, "the right came back"


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o600])
@pytest.mark.parametrize("level", ["namespace", "folder"])
def test_what_may_not_be_read_is_passed_over(
    place: Path, mode: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: with another user's directory of mode 0700 every store failed, and every look at what is there."""
    folder = of_others(place, 3)
    with with_mode(folder.parent if level == "namespace" else folder, mode):
        tier = shared(place, 12 * VALUE)
        assert {store(tier, number) for number in range(20)} == {StoreOutcome.STORED}
        own = [holding for holding in open_inventory(f"file://{place}").holdings() if holding.id == NAMESPACE.id]
    assert [6 <= (holding.num_chunks or 0) <= 12 for holding in own] == [True]
    assert caplog.text.count(f"{OTHERS.id} can be read") == 1


def test_a_directory_that_may_not_be_listed_cannot_have_a_limit(place: Path) -> None:
    """Nothing would seem to be there, so it would be filled without end."""
    with with_mode(place, 0o300):
        with pytest.raises(ConfigError, match="refuses access for listing, which max_bytes needs"):
            shared(place, 12 * VALUE)
        assert store(shared(place, None), 1) is StoreOutcome.STORED
    tier = shared(place, 12 * VALUE)
    with with_mode(place, 0o300), pytest.raises(TierError, match="Permission denied"):
        store(tier, 2)
    assert store(tier, 2) is StoreOutcome.STORED


def test_an_attempt_for_each_file_is_made_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one folder, some files can be another user's and others not, where the folder has the sticky bit."""
    budget, folder = StoreBudget(LocalStore(tmp_path), 32), tmp_path / ("0" * 32) / "00"
    folder.mkdir(parents=True)
    for number in range(32):
        (folder / f"{number:04x}").write_bytes(b"x")
        os.utime(folder / f"{number:04x}", (number, number))
    really_unlink = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if int(path.name, 16) % 2 == 0:
            raise PermissionError(1, "Operation not permitted")
        really_unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with budget.room_for(1) as is_granted:
        assert is_granted
    assert sorted(int(path.name, 16) for path in folder.iterdir())[:6] == [0, 2, 4, 6, 7, 8]
