"""A shared directory on a mount that vanishes, and one that is deleted: nothing is written in its place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cargohold.errors import TierError
from cargohold.tiers import LoadOutcome, SharedTierConfig, StoreOutcome, Tier, open_tier
from cargohold.tiers.stores import directory as object_listing
from tests.tiers.common import CHUNK, NAMESPACE, load, payload
from tests.tiers.shared import store


class Mount:
    """A directory that other file systems can be seen in, by means of links.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, beyond: Path) -> None:
        self.path = path
        self._beyond = beyond
        self.mount()

    def mount(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.symlink_to(self._beyond)

    def unmount(self) -> None:
        self.path.unlink()
        self.path.mkdir()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    with tempfile.TemporaryDirectory(dir=memory) as beyond:
        yield Mount(tmp_path / "mnt", Path(beyond))


def shared(directory: Path, max_bytes: int | None = None) -> Tier:
    return open_tier(SharedTierConfig(url=f"file://{directory}", max_bytes=max_bytes), NAMESPACE, [CHUNK])


@pytest.mark.parametrize("below", ["", "kv", "kv/deep"])
@pytest.mark.parametrize("max_bytes", [None, 20 * CHUNK])
def test_nothing_is_written_below_a_mount_that_has_gone(mount: Mount, below: str, max_bytes: int | None) -> None:
    """Found by use: the disk below was filled, without a limit and without a word."""
    tier = shared(mount.path / below, max_bytes)
    assert store(tier, 1) is StoreOutcome.STORED
    mount.unmount()
    for number in range(2, 5):
        with pytest.raises(TierError, match="is missing, or its mount is"):
            store(tier, number)
    assert not list(mount.path.iterdir())
    assert load(tier, 1) is LoadOutcome.ABSENT
    mount.mount()
    assert load(tier, 1) == payload(1)
    assert store(tier, 2) is StoreOutcome.STORED


def test_a_mount_that_goes_while_room_is_made_is_noticed(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = shared(mount.path / "kv", 20 * CHUNK)

    def unmount(*_: object) -> None:
        mount.unmount()

    monkeypatch.setattr("cargohold.tiers.stores.objects.delete_unfinished", unmount)
    with pytest.raises(TierError, match="is missing, or its mount is"):
        store(tier, 1)
    assert not list(mount.path.iterdir())


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_mount_that_comes_back_under_another_number_is_known_by_what_we_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """As network mounts do, above all those that are mounted when somebody looks."""
    tier = shared(tmp_path)
    store(tier, 1)
    really_identify = object_listing._identity  # no file system can be mounted here

    def identify(path: Path) -> tuple[int, int]:
        device, inode = really_identify(path)
        return device + 1, inode

    monkeypatch.setattr(object_listing, "_identity", identify)
    if is_ours:
        assert store(tier, 2) is StoreOutcome.STORED
        assert store(tier, 3) is StoreOutcome.STORED
    else:
        (tmp_path / NAMESPACE.id / "namespace.json").unlink()
        with pytest.raises(TierError, match="is missing, or its mount is"):
            store(tier, 2)


@pytest.mark.parametrize("is_made_by_others", [True, False])
def test_a_directory_that_was_moved_away_gets_nothing_until_it_is_back(tmp_path: Path, is_made_by_others: bool) -> None:
    directory, aside = tmp_path / "above" / "kv", tmp_path / "aside"
    tier = shared(directory)
    store(tier, 1)
    shutil.move(directory.parent, aside)  # so that the number of its inode is not given again
    if is_made_by_others:
        directory.mkdir(parents=True)
    for number in range(3):
        with pytest.raises(TierError, match="is missing, or its mount is"):
            store(tier, number)
    assert not directory.exists() or not list(directory.iterdir())
    if is_made_by_others:
        shutil.rmtree(directory.parent)
    shutil.move(aside, directory.parent)
    assert store(tier, 2) is StoreOutcome.STORED and load(tier, 1) == payload(1)


def test_a_file_in_the_place_of_a_directory_stays(tmp_path: Path) -> None:
    """It may even have the number that the directory had."""
    directory = tmp_path / "kv"
    tier = shared(directory)
    shutil.rmtree(directory)
    directory.write_text("mine")
    with pytest.raises(TierError, match="Not a directory"):
        store(tier, 1)
    assert directory.read_text() == "mine"
