"""Who may use the directory of a disk tier: permissions, locks, forks, other users."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cargohold.deadlines import GROWTH, LOCK, ROOM
from cargohold.errors import ConfigError, TierError
from cargohold.tiers import DiskTierConfig, LoadOutcome, SharedTierConfig, StoreOutcome, TierConfig
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk import shard as disk_shard
from cargohold.tiers.disk.files import brief_lock
from cargohold.tiers.disk.root import bytes_in, delete_shard
from cargohold.tiers.opening import open_tier
from cargohold.tiers.places import warn_of_writers
from tests.tiers.common import (
    CHUNK,
    NAMESPACE,
    codec,
    disk_tier,
    key,
    load,
    needs_root,
    payload,
    run_as_nobody,
    slots_per_segment,
)
from tests.tiers.disks import MIB, fill, present, store

WAIT_S = 30.0  # a bound on hangs, not a measure


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    old = os.umask(0)
    try:
        fill(disk_tier(root), 3)
    finally:
        os.umask(old)
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def disk_config(directory: Path) -> TierConfig:
    return DiskTierConfig(directory=directory, max_bytes="1MiB", reserve_bytes=0)


def shared_config(directory: Path) -> TierConfig:
    return SharedTierConfig(url=f"file://{directory}")


def test_two_engines_never_share_a_directory(tmp_path: Path) -> None:
    first = disk_tier(tmp_path)
    store(first, 1)
    with pytest.raises(ConfigError, match="another tier uses it for the same model"):
        disk_tier(tmp_path)
    script = (
        "import sys; sys.path.insert(0, '.');"
        "from dataclasses import replace; from pathlib import Path; from tests.tiers.common import disk_tier;"
        "from cargohold.tiers.disk import shard; shard.LOCK = replace(shard.LOCK, plus_s=0.25);"
        f"disk_tier(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert other.returncode and "another tier uses it for the same model" in other.stderr.splitlines()[-1]
    assert f"disk tier in {tmp_path}: another process uses it; waiting 0.25 s for it to end" in other.stderr
    first.close()
    assert load(disk_tier(tmp_path), 1) == payload(1)


@contextmanager
def forked() -> Iterator[None]:
    """A child process meanwhile, that has all our files open."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_a_directory(tmp_path: Path) -> None:
    """Found by reading: until it ended, nobody could open the tier again that its parent had closed."""
    with ExitStack() as stack:
        tier = disk_tier(tmp_path)
        store(tier, 1)
        with brief_lock(tmp_path):
            stack.enter_context(forked())
        tier.close()
        assert load(disk_tier(tmp_path), 1) == payload(1)


KILLED_WITH_A_CHILD = """
import os, signal, sys
from pathlib import Path
from cargohold.tiers.disk.files import brief_lock
from tests.tiers.common import disk_tier, key, payload
tier = disk_tier(Path(sys.argv[1]))
tier.store(key(1), memoryview(payload(1)))
with brief_lock(Path(sys.argv[1])):
    if not os.fork():
        os.write(1, b"forked")
        os.read(0, 1)
        os._exit(0)
    signal.pause()
"""


def test_a_forked_child_does_not_keep_a_directory_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.read(6) == b"forked"
        process.kill()
        process.wait()
        assert load(disk_tier(tmp_path), 1) == payload(1)
        process.stdin.close()
        assert not process.stdout.read(), "the child lived until now"


def test_a_forked_child_writes_to_nothing_of_its_parents(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    store(tier, 1)
    child = os.fork()
    if not child:
        try:
            tier.store(key(2), memoryview(payload(2)))
        except TierError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (load(tier, 1), load(tier, 2)) == (payload(1), LoadOutcome.ABSENT)


def test_a_forked_child_does_not_give_a_directory_away(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    child = os.fork()
    if not child:
        tier.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError, match="another tier uses it for the same model"):
        disk_tier(tmp_path)


def test_links_in_a_circle_and_the_root_are_no_directories(tmp_path: Path) -> None:
    """Found by use: a circle raised ``RuntimeError`` at the start, and for ``/`` all of ``/proc`` was counted."""
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for directory in (circle, circle / "kv"):
        config = DiskTierConfig(directory=directory, max_bytes="1MiB")
        with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
            config.require_place()
    with pytest.raises(ConfigError, match="it must be a directory of its own"):
        DiskTierConfig(directory="/", max_bytes="1MiB").require_place()
    warn_of_writers("disk", (circle,))


def test_what_is_mounted_in_the_directory_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "large").write_bytes(bytes(10 * MIB))
    with monkeypatch.context() as patch:
        patch.setattr("os.path.ismount", lambda path: path == str(tmp_path / "mounted"))
        assert bytes_in(tmp_path) == 0
    assert bytes_in(tmp_path) >= 10 * MIB


@pytest.mark.parametrize("make", [disk_config, shared_config])
def test_a_read_only_file_system_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], TierConfig]
) -> None:
    """Found by use: it was said that permission was denied."""
    really_ask = os.statvfs

    def ask(path: Path) -> object:
        told = really_ask(path)
        return SimpleNamespace(
            f_flag=os.ST_RDONLY, f_blocks=told.f_blocks, f_frsize=told.f_frsize, f_bavail=told.f_bavail
        )

    monkeypatch.setattr(os, "statvfs", ask)
    with pytest.raises(ConfigError, match="Read-only file system"):
        make(tmp_path).require_place()


def test_a_lock_that_cannot_be_let_go_of_is_gone_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by playing: the error kept the file open, and with it the lock, so that nobody could make room for a while."""
    tier = disk_tier(tmp_path)
    really_lock = fcntl.flock

    def lock(number: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really_lock(number, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock)
        assert store(tier, 1) is StoreOutcome.STORED
    monkeypatch.setattr("cargohold.tiers.disk.files.ROOM", replace(ROOM, plus_s=0.0))
    with brief_lock(tmp_path):
        assert load(tier, 1) == payload(1)


def test_further_replicas_of_an_engine_have_directories_and_budgets_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    first = DiskTierConfig(directory=root, max_bytes="1MiB", reserve_bytes=0)
    assert first.of_replica(0) == first
    tiers = [open_tier(first.of_replica(replica), NAMESPACE, [CHUNK]) for replica in (2, 0, 1)]
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == sorted(
        [NAMESPACE.id, "replica-1", "replica-2"]
    )
    assert root.stat().st_mode & 0o077 == 0, "whoever comes first makes it"
    for tier in tiers:
        assert isinstance(tier, DiskTier)
        fill(tier, 60)
        assert len(present(tier, 60)) == 60
    assert bytes_in(root) <= 1 * MIB, "those of the others are not counted"


def test_the_wait_for_a_lock_of_a_stopped_process_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: after Ctrl-Z in `cargohold cache ls`, an engine hung at its start, and said nothing."""
    monkeypatch.setattr("cargohold.tiers.disk.files.ROOM", replace(ROOM, plus_s=0.1))
    tier = disk_tier(tmp_path)
    with brief_lock(tmp_path):
        with pytest.raises(ConfigError, match="another process has held"):
            disk_tier(tmp_path)
        with pytest.raises(TierError, match="another process has held"):
            store(tier, 1)
    assert store(tier, 1) is StoreOutcome.STORED


def test_one_store_waits_for_the_lock_of_another_process_and_the_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: while another process deleted what was large, all threads waited for it, and loads came too late."""
    tier = disk_tier(tmp_path)
    store(tier, 0)
    number = slots_per_segment(tmp_path)
    fill(tier, number)
    arrived, opened = threading.Event(), threading.Event()

    @contextmanager
    def held(directory: Path) -> Iterator[None]:
        arrived.set()
        assert opened.wait(WAIT_S)
        with brief_lock(directory):
            yield

    monkeypatch.setattr(disk_shard, "brief_lock", held)
    monkeypatch.setattr("cargohold.tiers.disk.tier.GROWTH", replace(GROWTH, plus_s=0.01))
    outcomes: list[StoreOutcome] = []
    first = threading.Thread(target=lambda: outcomes.append(store(tier, number)), daemon=True)
    first.start()
    assert arrived.wait(WAIT_S)
    other = threading.Thread(target=lambda: outcomes.append(store(tier, number + 1)), daemon=True)
    other.start()
    other.join(WAIT_S)
    assert outcomes == [StoreOutcome.LATER], "nothing is evicted where there may be room in a moment"
    assert load(tier, 0) == payload(0)
    opened.set()
    first.join(WAIT_S)
    assert outcomes[1:] == [StoreOutcome.STORED] and store(tier, number + 1) is StoreOutcome.STORED
    tier.check()


def test_a_start_waits_for_the_lock_of_an_ending_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "from pathlib import Path; from tests.tiers.common import disk_tier, key, payload;"
        f"tier = disk_tier(Path({str(tmp_path)!r})); tier.store(key(1), memoryview(payload(1)));"
        "print('stored', flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "stored\n"
        with pytest.raises(ConfigError, match="another tier uses it for the same model"):
            disk_tier(tmp_path)
        ending = threading.Timer(0.2, process.kill)
        ending.start()
        monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=60.0))
        tier = disk_tier(tmp_path)
        ending.join()
    assert load(tier, 1) == payload(1)


@needs_root
def test_an_unwritable_directory_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tmp_path.parent.chmod(0o755)
    tmp_path.parent.parent.chmod(0o755)

    def action() -> None:
        with pytest.raises(ConfigError, match="Permission denied") as caught:
            disk_tier(tmp_path / "kv")
        assert caught.value.key == "directory"

    assert run_as_nobody(action) == 0


@needs_root
def test_lost_permissions_are_errors_and_nothing_else(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to(tempfile.gettempdir()) and str(path) != tempfile.gettempdir():
            path.chmod(0o777)

    def action() -> None:
        tier = disk_tier(tmp_path / "kv", 4 * MIB)
        store(tier, 0)
        (tmp_path / "kv").chmod(0)
        outcomes: set[object] = set()
        for number in range(1, 100):
            try:
                outcomes.add(store(tier, number))
            except TierError as error:
                outcomes.add(error.reason)
        assert "Permission denied" in outcomes, "it cannot grow"
        assert load(tier, 0) == payload(0)
        (tmp_path / "kv").chmod(0o700)
        assert store(tier, 500) is StoreOutcome.STORED

    assert run_as_nobody(action) == 0


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o744])
def test_a_namespace_of_another_user_is_skipped(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Found by playing: after one start with sudo, every store failed that needed room, and soon every start."""
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to(tempfile.gettempdir()) and str(path) != tempfile.gettempdir():
            path.chmod(0o777)
    root = tmp_path / "kv"
    foreign = root / codec(weights="foreign").namespace.id
    unused = root / codec(weights="unused").namespace.id
    root.mkdir()
    root.chmod(0o777)
    foreigner = disk_tier(root, 1 * MIB, using=codec(weights="foreign"))
    fill(foreigner, 20)
    foreigner.close()
    (root / ".lock").chmod(0o666)
    foreign.chmod(mode)

    def action() -> None:
        tier = disk_tier(root, 1 * MIB, using=codec(weights="unused"))
        fill(tier, 40)
        tier.close()
        tier = disk_tier(root, 1 * MIB)
        assert fill(tier, 100) == [StoreOutcome.STORED] * 100
        assert len(present(tier, 100)) > 60, "it has all the room that can be seen"
        tier.close()
        assert not unused.exists() and foreign.exists()
        disk_tier(root, MIB // 2).close()
        assert [record.getMessage() for record in caplog.records if "make room" in record.getMessage()] == [
            f"disk tier: {foreign} cannot be deleted to make room: Permission denied"
        ]

    assert run_as_nobody(action) == 0
    assert present(disk_tier(root, 4 * MIB, using=codec(weights="foreign")), 20) == list(range(20))


def test_a_namespace_that_cannot_be_deleted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn, *willing = (tmp_path / codec(weights=name).namespace.id for name in ("stubborn", "old", "newer"))
    for at, name in enumerate(["stubborn", "old", "newer"]):
        tier = disk_tier(tmp_path, 1 * MIB, using=codec(weights=name))
        fill(tier, 20)
        tier.close()
        os.utime(tmp_path / codec(weights=name).namespace.id / "lock", (at + 1, at + 1))

    def delete(path: Path) -> None:
        if path == stubborn:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        delete_shard(path)

    monkeypatch.setattr("cargohold.tiers.disk.root.delete_shard", delete)
    tier = disk_tier(tmp_path, 1 * MIB)
    assert fill(tier, 40) == [StoreOutcome.STORED] * 40
    assert stubborn.exists() and not any(path.exists() for path in willing)
    assert caplog.text.count(f"{stubborn} cannot be deleted to make room: Operation not permitted") == 1


@pytest.mark.parametrize("is_open_before", [True, False])
def test_a_start_that_is_interrupted_leaves_the_directory_to_the_next(
    is_open_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by sending SIGINT at random: as long as somebody kept the traceback, as notebooks do, nobody could start again."""
    config = DiskTierConfig(directory=str(tmp_path), max_bytes="2MiB", reserve_bytes=0)

    def interrupted(waiting: list[Future[object]], _: object) -> None:
        if is_open_before:
            wait(waiting)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cargohold.tiers.opening.wait", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            open_tier(config, NAMESPACE, [CHUNK])
    for thread in threading.enumerate():
        if thread.name == "cargohold-disk-start":
            thread.join()
    open_tier(config, NAMESPACE, [CHUNK]).close()
    del kept
