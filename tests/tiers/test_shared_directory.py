"""Shared directories: budgets, other users, killed writers, damaged places."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from cargohold.errors import ConfigError, TierError
from cargohold.tiers import LoadOutcome, StoreOutcome
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.places import PARALLEL_PROBES
from cargohold.tiers.stores import directory as object_listing
from tests.tiers.common import CHUNK, NAMESPACE, key, load, payload
from tests.tiers.shared import bytes_of_files, raising, shared, store

REPOSITORY = Path(__file__).parents[2]


def test_a_budget_is_kept_by_one_engine_and_the_oldest_go_first(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_bytes(bytes(CHUNK))
    tier = shared(f"file://{tmp_path}", max_bytes=10 * CHUNK)
    for number in range(40):
        assert store(tier, number) is StoreOutcome.STORED
        assert bytes_of_files(tmp_path) <= 11 * CHUNK, "what is not ours does not count, and stays"
        for at, path in enumerate(sorted(tmp_path.glob("*/00/*"))):
            os.utime(path, (at, at))  # a clock that is fine enough to tell them apart
    kept = [number for number in range(40) if load(tier, number) == payload(number)]
    assert kept == list(range(40 - len(kept), 40)) and len(kept) >= 7


def test_two_engines_share_a_budget(tmp_path: Path) -> None:
    tiers = [shared(f"file://{tmp_path}", max_bytes=32 * CHUNK) for _ in range(2)]
    for number in range(200):
        store(tiers[number % 2], number)
        assert bytes_of_files(tmp_path) <= 35 * CHUNK
    assert sum(tiers[0].probe([key(number) for number in range(200)])) >= 20


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a name that is no text": lambda place: os.mknod(os.fsencode(place) + b"/\xff"),
    "a name of two lines": lambda place: (place / "two\nlines").write_text("mine"),
    "a link to itself": lambda place: (place / "link").symlink_to("link"),
    "a link to what it is in": lambda place: (place / "link").symlink_to("."),
    "a link in our place": lambda place: (place / ("0" * 32)).symlink_to("."),
    "a file in our place": lambda place: (place / ("0" * 32)).write_text("mine"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_files_of_others_in_a_shared_directory_are_ignored(tmp_path: Path, what: str) -> None:
    """Found by use: one such name, and with ``max_bytes`` every store failed, and every look at what is there."""
    FOREIGN[what](tmp_path)
    tier = shared(f"file://{tmp_path}", max_bytes=10 * CHUNK)
    for number in range(20):
        assert store(tier, number) is StoreOutcome.STORED
    (holding,) = open_inventory(f"file://{tmp_path}").holdings()
    assert holding.num_chunks in range(5, 11)
    assert len(os.listdir(tmp_path)) == 2  # noqa: PTH208  # of any name


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")
def test_a_directory_that_is_not_for_everybody_does_not_stand_in_the_way() -> None:
    """Found by reading: the root of a file system has such a one, ``lost+found``."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)  # noqa: PTH101
        Path(place, "lost+found").mkdir(mode=0o700)
        script = f"""
import os
import cargohold.tiers.stores.objects, numpy.random  # while all modules can be read
from tests.tiers.shared import CHUNK, shared, store
os.setgid(65534)
os.setuid(65534)
tier = shared("file://{place}", max_bytes=10 * CHUNK)
print({{store(tier, number).value for number in range(20)}})
"""
        run = subprocess.run(
            [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert run.stdout == "{'stored'}\n", run.stderr


def killed_while_it_writes(directory: Path) -> Path:
    """What a process leaves that is killed in the middle of a chunk, by the signal for files that become too large."""
    script = f"""
import resource, signal
from pathlib import Path
from tests.tiers.shared import shared, store
tier = shared("file://{directory}")
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, ({CHUNK // 2}, {CHUNK // 2}))
store(tier, 1)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False)
    assert run.returncode == -signal.SIGXFSZ
    (left,) = directory.rglob("*#*")
    assert left.stat().st_size == CHUNK // 2
    return left


def test_an_unfinished_chunk_of_a_killed_process_counts_until_it_is_deleted(tmp_path: Path) -> None:
    """Found by use: where a process was killed again and again, its directory became larger than it may be."""
    left = killed_while_it_writes(tmp_path)
    with left.open("r+b") as file:
        file.truncate(6 * CHUNK)
    tier = shared(f"file://{tmp_path}", max_bytes=10 * CHUNK)
    for number in range(10, 20):
        assert store(tier, number) is StoreOutcome.STORED
        assert bytes_of_files(tmp_path) <= 10 * CHUNK
    (holding,) = open_inventory(f"file://{tmp_path}").holdings()
    assert holding.num_bytes == bytes_of_files(tmp_path) - left.stat().st_size
    assert holding.num_chunks in {2, 3} and left.exists() and "are unfinished" in holding.remark


class AtOnce:
    """A thread that has done its work when it was started."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...] = (), **_: object) -> None:
        self.start = partial(target, *args)


@pytest.mark.parametrize("max_bytes", [10 * CHUNK, None])
def test_an_unfinished_chunk_of_a_killed_process_is_deleted_an_hour_later(
    tmp_path: Path, max_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: without ``max_bytes`` it stayed for ever."""
    monkeypatch.setattr("cargohold.tiers.stores.objects.threading.Thread", AtOnce)
    left = killed_while_it_writes(tmp_path)
    foreign = tmp_path / "photos" / "00" / "abcd#1"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    shared(f"file://{tmp_path}", max_bytes=max_bytes).begin()
    assert left.exists(), "another process may be writing it"
    for path in (left, foreign):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    shared(f"file://{tmp_path}", max_bytes=max_bytes).begin()
    assert not left.exists() and foreign.read_text() == "mine"


@pytest.mark.parametrize("what", ["rm", "prune"])
def test_an_unfinished_chunk_of_a_killed_process_can_be_deleted_by_hand(tmp_path: Path, what: str) -> None:
    left = killed_while_it_writes(tmp_path)
    inventory = open_inventory(f"file://{tmp_path}")
    if what == "rm":
        inventory.remove(NAMESPACE.id)
    else:
        assert inventory.tidy() == 0 and left.exists(), "another process may be writing it"
        os.utime(left, (1, 1))
        size = left.stat().st_size
        assert inventory.tidy() == size > 0
    assert not left.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_directory_refuses_and_what_is_there_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Found by reading: stores failed, so the tier was left to rest, and nothing was loaded from it."""
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    text = f"Generic LocalFileSystem error: Unable to copy data to file: {os.strerror(number)} (os error {number})"
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(GenericError(text)))
        assert store(tier, 2) is StoreOutcome.REFUSED
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(GenericError(text.replace(f"{number}", f"{errno.EIO}"))))
        with pytest.raises(TierError, match="Unable to copy data"):
            store(tier, 2)
    assert load(tier, 1) == payload(1) and load(tier, 2) is LoadOutcome.ABSENT


@pytest.mark.parametrize("can_delete", [True, False])
def test_a_bad_place_under_a_directory_fails_one_load_and_not_every_one_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_delete: bool
) -> None:
    """Found by reading: the file was found and failed again and again, and was never stored anew."""
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(object_listing, "Descriptor", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        if not can_delete:
            patch.setattr(Path, "unlink", raising(OSError(errno.EIO, "a file system that is not there at all")))
        with pytest.raises(TierError, match=os.strerror(errno.EIO)):
            load(tier, 1)
    assert store(tier, 1) is (StoreOutcome.STORED if can_delete else StoreOutcome.PRESENT)
    assert load(tier, 1) == payload(1)


def test_a_store_that_fails_to_answer_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(object_listing, "Descriptor", raising(OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        with pytest.raises(TierError, match="Stale"):
            load(tier, 1)
    assert load(tier, 1) == payload(1)


def test_a_file_that_may_not_become_so_large_is_refused(tmp_path: Path) -> None:
    """What the package says of a real limit."""
    tier = shared(f"file://{tmp_path}")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK // 2, hard))
    try:
        outcome = store(tier, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome is StoreOutcome.REFUSED
    assert store(tier, 1) is StoreOutcome.STORED


def test_one_folder_that_cannot_be_entered_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as the superuser, who may enter every folder."""
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    store(tier, 2)
    really_look = os.lstat

    def look(path: Path) -> os.stat_result:
        if path.name in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really_look(path)

    closed = {key(1).hex()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", look)
        assert tier.probe([key(1), key(2), key(3)]) == [False, True, False]
        closed |= {key(number).hex() for number in (2, 3)}
        with pytest.raises(TierError, match="Permission denied"):
            tier.probe([key(1), key(2), key(3)])


def test_a_probe_without_files_is_an_error_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by playing: where no more files could be opened, Python warned of a coroutine that nobody awaits."""
    monkeypatch.setattr("cargohold.tiers.stores.objects.from_url", lambda *_, **__: MemoryStore())
    tier = shared("s3://bucket/prefix")
    store(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr("asyncio.events.new_event_loop", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(TierError, match="Too many open files"):
            tier.probe([key(1), key(2)])
        gc.collect()
    assert tier.probe([key(1), key(2)]) == [True, False]


def test_a_probe_that_fails_waits_for_what_it_has_asked_and_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by running: each answer that came after the first failure was a traceback of an event loop that is closed."""
    monkeypatch.setattr("cargohold.tiers.stores.objects.from_url", lambda *_, **__: MemoryStore())
    tier = shared("s3://bucket/prefix")
    asked, answered = [], []

    async def answer(_: object, path: str) -> None:
        asked.append(path)
        if len(asked) == 1:
            raise GenericError("no answer")
        await asyncio.sleep(0)
        answered.append(path)

    monkeypatch.setattr(obstore, "head_async", answer)
    with pytest.raises(TierError, match="no answer"):
        tier.probe([key(number) for number in range(4 * PARALLEL_PROBES)])
    assert answered == asked[1:] and len(asked) <= PARALLEL_PROBES


def test_a_file_is_no_shared_directory(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.write_text("no directory")
    with pytest.raises(ConfigError, match="cannot be used"):
        shared(f"file://{directory}")
