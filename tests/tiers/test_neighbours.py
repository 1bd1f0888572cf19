"""A disk tier in a directory that others use too: what is not certainly a shard of ours is never deleted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cargohold.errors import ConfigError, TierError
from cargohold.tiers import DiskTierConfig, Opening, SharedTierConfig, StoreOutcome, Tier
from cargohold.tiers.disk.inventory import DiskInventory
from cargohold.tiers.disk.root import Owner, bytes_in, delete_shard, owner_of, shards_in
from cargohold.tiers.kinds import open_inventory
from examples.own_tier.folder import FolderConfig
from tests.tiers.common import CHUNK, NAMESPACE, codec, disk_tier, key, load, needs_root, payload, run_as_nobody

MIB = 1024**2
OTHER = codec(weights="other")


def shared_tier(root: Path) -> Tier:
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")
    return SharedTierConfig(url=f"file://{root}").open(Opening(codec=OTHER, chunk_sizes=[CHUNK]))


def folder_tier(root: Path) -> Tier:
    return FolderConfig(path=str(root)).open(Opening(codec=OTHER, chunk_sizes=[CHUNK]))


def fill(tier: Tier, count: int) -> list[StoreOutcome]:
    return [tier.store(key(number), memoryview(payload(number))) for number in range(count)]


@pytest.mark.parametrize("neighbour", [shared_tier, folder_tier])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_disk_tier_that_needs_room_leaves_the_chunks_of_others(
    tmp_path: Path, neighbour: Callable[[Path], Tier], when: str
) -> None:
    """Found by review: a disk tier deleted a live shared store to make room, namespace by namespace, without a word."""
    other = neighbour(tmp_path)
    tier = disk_tier(tmp_path, MIB) if when == "meanwhile" else None
    assert fill(other, 60) == [StoreOutcome.STORED] * 60
    tier = tier or disk_tier(tmp_path, MIB)
    fill(tier, 100)
    tier.close()
    disk_tier(tmp_path, 600_000).close()  # the budget is exceeded now
    assert all(load(other, number) == payload(number) for number in range(60))
    assert bytes_in(tmp_path) <= MIB, "what others have counts"


def test_no_shard_takes_the_place_of_a_namespace_of_a_shared_store(tmp_path: Path) -> None:
    shared = shared_tier(tmp_path)
    fill(shared, 3)
    expected = f"a shared store has its chunks there, in {tmp_path / OTHER.namespace.id}"
    with pytest.raises(ConfigError, match=expected):
        disk_tier(tmp_path, using=OTHER)
    assert load(shared, 1) == payload(1)
    assert {path.name for path in (tmp_path / OTHER.namespace.id).iterdir()} == {"namespace.json", "00"}


def test_where_a_shared_store_was_deleted_a_disk_tier_can_start(tmp_path: Path) -> None:
    fill(shared_tier(tmp_path), 3)
    open_inventory(f"file://{tmp_path}").remove(OTHER.namespace.id)
    tier = disk_tier(tmp_path, using=OTHER)
    assert fill(tier, 3) == [StoreOutcome.STORED] * 3


def test_no_shared_store_takes_the_place_of_a_shard(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, using=OTHER)
    fill(tier, 3)
    with pytest.raises(ConfigError, match=f"a disk tier has its chunks there, in {OTHER.namespace.id}"):
        shared_tier(tmp_path)
    assert not list(tmp_path.glob("*/namespace.json"))


SHARD = ["lock", "shard.json", "segment-00000.data", "segment-00000.headers", "segment-00000.uses"]


@pytest.mark.parametrize(
    ("names", "owner"),
    [
        (SHARD, Owner.OURS),
        ([*SHARD, "shard.json.new", "segment-00127.data"], Owner.OURS),
        # what a process leaves that is killed while it makes a shard, or deletes one
        (["lock"], Owner.OURS),
        (["lock", "shard.json.new"], Owner.OURS),
        (["segment-00003.uses"], Owner.OURS),
        (["shard.json"], Owner.OURS),
        # a version before last uses were written
        (["lock", "shard.json", "segment-00000.data", "segment-00000.headers"], Owner.OURS),
        ([], Owner.NOBODY),
        (["namespace.json"], Owner.SHARED),
        (["namespace.json#1"], Owner.SHARED),
        (["ab/"], Owner.SHARED),
        ([*SHARD, "namespace.json"], Owner.SHARED),
        ([*SHARD, "notes.txt"], Owner.OTHERS),
        ([*SHARD, "photos/"], Owner.OTHERS),
        ([*SHARD, "segment-notes.data"], Owner.OTHERS),
        (["segment-00000.data/"], Owner.OTHERS),
        (["lock/"], Owner.OTHERS),
        ([key(0).hex()], Owner.OTHERS),
    ],
)
def test_whose_a_folder_is_is_known_by_what_is_in_it(tmp_path: Path, names: list[str], owner: Owner) -> None:
    inventory = DiskInventory(tmp_path)
    folder = tmp_path / NAMESPACE.id
    folder.mkdir()
    for name in names:
        path = folder / name
        path.mkdir() if name.endswith("/") else path.write_bytes(b"")
    assert owner_of(folder) is owner
    assert list(shards_in(tmp_path)) == ([folder] if owner is Owner.OURS else [])
    if owner in (Owner.SHARED, Owner.OTHERS):
        for touch in (inventory.remove, lambda name: list(inventory.verify(name, delete=True))):
            with pytest.raises(TierError, match="files that are not a disk tier's, so it is left alone"):
                touch(folder.name)
        assert len(list(folder.iterdir())) == len(names)


def test_a_folder_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert owner_of(tmp_path / "none") is owner_of(tmp_path / "file") is Owner.NOBODY


@needs_root
def test_a_folder_that_cannot_be_listed_may_be_a_shard_and_stays() -> None:
    with tempfile.TemporaryDirectory() as place:  # everybody can reach it
        root = Path(place)
        root.chmod(0o755)
        folder = root / NAMESPACE.id
        folder.mkdir(mode=0o711)
        (folder / "lock").write_bytes(b"")

        def action() -> None:
            assert owner_of(folder) is Owner.HIDDEN
            assert list(shards_in(root)) == [folder]
            with pytest.raises(PermissionError):
                delete_shard(folder)

        assert run_as_nobody(action) == 0


@pytest.mark.parametrize("names", [["lock"], ["segment-00000.data"], SHARD])
def test_what_a_killed_process_left_of_a_shard_makes_room(tmp_path: Path, names: list[str]) -> None:
    left = tmp_path / OTHER.namespace.id
    left.mkdir()
    for name in names:
        (left / name).write_bytes(bytes(2 * MIB // len(names)))
    tier = disk_tier(tmp_path, MIB)
    assert not left.exists()
    assert fill(tier, 10) == [StoreOutcome.STORED] * 10


def test_an_empty_folder_is_left_and_can_become_a_shard(tmp_path: Path) -> None:
    for folder in (tmp_path / OTHER.namespace.id, tmp_path / NAMESPACE.id):
        folder.mkdir()
    tier = disk_tier(tmp_path, MIB)
    fill(tier, 100)
    assert (tmp_path / OTHER.namespace.id).is_dir()
    tier.close()
    assert [holding.id for holding in open_inventory(str(tmp_path)).holdings()] == [NAMESPACE.id]


def test_what_comes_into_a_shard_while_it_is_deleted_stays(tmp_path: Path) -> None:
    disk_tier(tmp_path).close()
    shard = tmp_path / NAMESPACE.id
    (shard / "namespace.json").write_text("{}")
    with pytest.raises(OSError, match="not empty"):
        delete_shard(shard)
    assert [path.name for path in shard.iterdir()] == ["namespace.json"]


def test_a_shard_is_not_deleted_through_a_link(tmp_path: Path) -> None:
    disk_tier(tmp_path / "kv").close()
    (tmp_path / "link").symlink_to(tmp_path / "kv" / NAMESPACE.id)
    before = set((tmp_path / "link").iterdir())
    with pytest.raises(OSError, match="Not a directory"):
        delete_shard(tmp_path / "link")
    assert set((tmp_path / "link").iterdir()) == before


def test_files_in_a_shard_that_only_look_like_segments_are_not_deleted(tmp_path: Path) -> None:
    disk_tier(tmp_path).close()
    strange = tmp_path / NAMESPACE.id / "segment-notes.txt"
    strange.write_text("mine")
    (tmp_path / NAMESPACE.id / "shard.json").unlink()  # so that all segments are deleted
    disk_tier(tmp_path).close()
    assert strange.read_text() == "mine"


# --- cargohold cache ---------------------------------------------------------------------------------------------------


def test_the_path_of_a_shared_store_is_refused_with_its_url(tmp_path: Path) -> None:
    root = tmp_path / "kv store#1"
    fill(SharedTierConfig(url=f"file://{tmp_path}/kv%20store%231").open(Opening(codec=OTHER, chunk_sizes=[CHUNK])), 3)
    with pytest.raises(ConfigError, match=f"it is a shared store; name it as (file://{tmp_path}/.*)$") as caught:
        open_inventory(str(root))
    assert list(root.iterdir()) == [root / OTHER.namespace.id], "no lock is left there"
    url = caught.value.expected.rpartition(" ")[2]
    assert [holding.num_chunks for holding in open_inventory(url).holdings()] == [3]


def test_where_a_shared_store_and_a_disk_tier_lie_only_the_disk_tiers_shards_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(shared_tier(tmp_path), 3)
    disk_tier(tmp_path).close()
    caplog.clear()
    inventory = open_inventory(str(tmp_path))
    assert [holding.id for holding in inventory.holdings()] == [NAMESPACE.id]
    (line,) = caplog.messages
    assert OTHER.namespace.id in line and f"file://{tmp_path}" in line


# --- the home directory ------------------------------------------------------------------------------------------------


def test_a_directory_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = DiskTierConfig(directory="~/kv", max_bytes="2MiB", reserve_bytes=0)
    for one in (config, config.of_replica(1)):
        one.require_place()
        fill(one.open(Opening(codec=codec(), chunk_sizes=[CHUNK])), 1)
    assert {path.parent for path in tmp_path.rglob(NAMESPACE.id)} == {tmp_path / "kv", tmp_path / "kv" / "replica-1"}
    assert len(open_inventory("~/kv").holdings()) == 2
