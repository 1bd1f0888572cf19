"""``cargohold cache`` on a directory, a shared directory and a server."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cargohold.cli import cache as cache_command
from cargohold.cli.app import app
from cargohold.errors import ConfigError, TierError
from cargohold.tiers import LoadOutcome, Opening, Tier
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec
from cargohold.tiers.disk.files import Segment
from cargohold.tiers.disk.inventory import DiskInventory
from examples.own_tier.folder import FolderConfig
from tests.servers import key_value_server
from tests.tiers.common import CHUNK, codec, disk_tier, key, load, payload, shared_tier, spoil_reads

assert cache_command.cache is not None  # it has added itself to the app

PLACES = ["disk", "directory", "valkey"]


class Place:
    """A medium with a name, on which tiers can be opened."""

    def __init__(self, name: str, open_tier: Callable[[ChunkCodec], Tier]) -> None:
        self.name = name
        self._open = open_tier

    def fill(self, count: int, *, is_closed: bool = True, secret: bytes | None = None, **changes: Any) -> str:
        """Store chunks in a namespace; its id."""
        using = codec(secret, None, **changes)
        self.tier = self._open(using)
        for number in range(count):
            self.tier.store(key(number), memoryview(payload(number)))
        if is_closed:
            self.tier.close()
        return using.namespace.id


def disk_place(directory: Path) -> Place:
    return Place(str(directory), lambda using: disk_tier(directory, "4MiB", using=using))


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Iterator[Place]:
    if kind == "disk":
        yield disk_place(tmp_path)
    elif kind == "directory":
        url = f"file://{tmp_path}"
        yield Place(url, lambda using: shared_tier(url, using, CHUNK))
    else:
        with key_value_server("valkey") as server:
            url = f"valkey://127.0.0.1:{server.port}"
            yield Place(url, lambda using: shared_tier(url, using, CHUNK))


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *words])
    assert result.exit_code == status, result.output
    return result.stdout


def listed(place: Place) -> dict[str, dict[str, object]]:
    return {entry["id"]: entry for entry in json.loads(run("ls", place.name, "--json"))}


@pytest.mark.parametrize("kind", ["disk"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_where_nothing_can_be_written_namespaces_are_listed_all_the_same(
    place: Place, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount for reading only, or a directory of somebody else's. Tests may run as its owner, or as root."""
    name = place.fill(3)
    really_open = os.open

    def open_for_reading(path: Path, flags: int, *rest: int) -> int:
        if flags & (os.O_RDWR | os.O_CREAT | os.O_WRONLY):
            raise OSError(number, os.strerror(number), str(path))
        return really_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_for_reading)
    entry = listed(place)[name]
    assert (entry["chunks"], entry["in_use"]) == (3, False)
    with pytest.raises(TierError, match=f"lock: {os.strerror(number)}"):
        DiskInventory(Path(place.name)).remove(name)


@pytest.mark.parametrize("kind", PLACES)
def test_namespaces_are_listed_with_what_they_hold(place: Place) -> None:
    assert "nothing is stored" in run("ls", place.name).replace("\n", " ")
    first = place.fill(3)
    second = place.fill(5, secret=bytes(32), label="large model", split="rank 1 of 2")
    found = listed(place)
    assert {name: entry["chunks"] for name, entry in found.items()} == {first: 3, second: 5}
    assert all(int(str(entry["bytes"])) > 3 * CHUNK for entry in found.values())
    facts = found[second]["namespace"]
    assert isinstance(facts, dict) and facts["label"] == "large model" and facts["encryption"]
    table = run("ls", place.name)
    for text in (first[:8], second[:8], "tiny", "large model", "rank 1 of 2", "encrypted"):
        assert text in table


def test_a_long_name_of_a_model_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    disk_place(tmp_path).fill(1, label=f"/models/{'x' * 60}/one")
    assert run("ls", str(tmp_path)).count("x") == 60


@pytest.mark.parametrize("label", ["/models/[v1]/x", "model[/oops]", "\x1b]52;c;aGk=\x07", "two\nlines"])
def test_what_a_store_says_is_shown_and_nothing_else(tmp_path: Path, label: str) -> None:
    """Found by forging: brackets were markup, an error where it was wrong, and a terminal did what it was told."""
    disk_place(tmp_path).fill(1, label=label)
    shown = "".join(char if char.isprintable() else "?" for char in label)
    _, line, spare = run("ls", str(tmp_path)).splitlines()
    assert spare.endswith("preallocated for more")
    assert shown in line and line.isprintable()


def test_the_directories_of_further_replicas_are_part_of_their_place(tmp_path: Path) -> None:
    """An engine's data-parallel replicas have the same namespaces, each in a directory of its own."""
    directories = {"": tmp_path, "replica-1/": tmp_path / "replica-1", "replica-10/": tmp_path / "replica-10"}
    names = {}
    for path, directory in directories.items():
        names[path] = path + disk_place(directory).fill(3 + len(path))
    whole = disk_place(tmp_path)
    found = listed(whole)
    assert {name: entry["chunks"] for name, entry in found.items()} == {name: 3 + len(at) for at, name in names.items()}
    assert f"replica-1/{names[''][:8]}" in run("ls", whole.name)
    assert f"{3 * 3 + 10 + 11} chunks are good, 0 damaged" in run("verify", whole.name)
    data = min((tmp_path / "replica-1").rglob("segment-*.data"))
    data.write_bytes(b"damage" + data.read_bytes()[6:])
    assert "1 damaged and deleted" in run("verify", whole.name, "--delete", status=1)
    assert "12 chunks are good, 0 damaged" in run("verify", whole.name, "replica-1/")
    run("rm", whole.name, "replica-10/")
    assert sorted(listed(whole)) == sorted([names[""], names["replica-1/"]])
    run("prune", whole.name, "--max-bytes", "4KiB")
    assert not listed(whole)


@pytest.mark.parametrize("kind", PLACES)
def test_good_chunks_are_good(place: Place) -> None:
    place.fill(3)
    place.fill(2, secret=bytes(32))
    assert "5 chunks are good, 0 damaged" in run("verify", place.name)


def test_a_look_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")
    run("ls", str(tmp_path))
    run("ls", f"file://{tmp_path}/not/there", status=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["disk"])
def test_no_progress_is_shown_where_nobody_watches(place: Place) -> None:
    place.fill(3)
    for words in (["verify"], ["ls"], ["prune", "--max-days", "1"], ["rm", "--all"]):
        assert CliRunner().invoke(app, ["cache", *words, place.name]).stderr == ""


@pytest.mark.parametrize("kind", ["disk"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls"], ["listing"]),
        (["prune", "--max-bytes", "4KiB"], ["listing", "deleting"]),
        (["rm", "--all"], ["listing", "deleting"]),
    ],
)
def test_who_waits_at_a_terminal_is_told_for_what(
    place: Place, words: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill(3)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(cache_command, "errors", terminal)
    run(*words, place.name)
    assert all(what in terminal.file.getvalue() for what in told)  # type: ignore[attr-defined]  # the one above


@pytest.mark.parametrize("kind", ["disk"])
def test_a_terminal_without_escape_codes_gets_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.fill(3)
    monkeypatch.setenv("TERM", "dumb")
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(cache_command, "errors", terminal)
    assert "\x1b" not in run("ls", place.name)
    assert "\x1b" not in terminal.file.getvalue()  # type: ignore[attr-defined]  # the one above


def test_an_empty_store_is_told_without_its_password() -> None:
    with key_value_server("valkey") as server:
        shown = run("ls", f"valkey://127.0.0.1:{server.port}?username=default&password=hunter2")
    assert "nothing is stored in valkey://" in shown and "hunter2" not in shown


def damage(kind: str, directory: Path) -> None:
    pattern, offset = ("*/segment-00000.data", 20) if kind == "disk" else (f"*/*/{key(0).hex()}", HEADER_BYTES + 20)
    (path,) = directory.glob(pattern)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_damaged_chunks_are_found_and_deleted_if_wished(place: Place, kind: str, tmp_path: Path) -> None:
    place.fill(3)
    damage(kind, tmp_path)
    assert "2 chunks are good, 1 damaged\n" in run("verify", place.name, status=1)
    assert "2 chunks are good, 1 damaged and deleted" in run("verify", "--delete", place.name, status=1)
    assert json.loads(run("verify", "--json", place.name)) == {
        "good": 2,
        "damaged": 0,
        "deleted": False,
        "in_use": [],
        "failed": [],
    }
    place.fill(0, is_closed=False)
    assert [load(place.tier, number) for number in range(3)] == [LoadOutcome.ABSENT, payload(1), payload(2)]


@pytest.mark.parametrize("kind", PLACES)
def test_namespaces_are_deleted_by_the_start_of_their_id(place: Place) -> None:
    first, second = place.fill(3), place.fill(2, weights="other")
    run("rm", place.name, first[:6])
    assert list(listed(place)) == [second]
    run("rm", place.name, "--all")
    assert listed(place) == {}


@pytest.mark.parametrize("kind", ["disk"])
def test_what_is_in_use_is_shown_and_left_alone(place: Place) -> None:
    name = place.fill(3, is_closed=False)
    assert listed(place)[name]["in_use"] is True
    assert "is in use and was not looked at" in run("verify", place.name, status=1)
    for words in (["prune", "--max-bytes", "4KiB"], ["prune", "--max-days", "0"]):
        pruned = CliRunner().invoke(app, ["cache", *words, place.name])
        assert pruned.exit_code == 1 and pruned.stderr == f"cargohold: tier disk: {name} is in use\n"
        assert pruned.stdout.startswith("deleted 0 B; ")
    assert run("prune", place.name, "--max-bytes", "1GiB").startswith("deleted 0 B; "), "it is not in the way"
    result = CliRunner().invoke(app, ["cache", "rm", place.name, name])
    assert result.exit_code == 1 and result.stderr == f"cargohold: tier disk: {name} is in use\n"
    assert result.stdout == "deleted 0 namespaces, 0 B\n"
    assert load(place.tier, 1) == payload(1)
    assert listed(place)[name]["chunks"] == 3


@pytest.mark.parametrize("kind", ["disk"])
def test_what_is_in_use_keeps_nobody_from_deleting_the_rest(place: Place) -> None:
    """Found by review: all that came after it was left, and what had gone before was not told."""
    used = place.fill(3, is_closed=False)
    user = place.tier
    first, second = place.fill(3, weights="first"), place.fill(3, weights="second")
    result = CliRunner().invoke(app, ["cache", "rm", place.name, first, used, second])
    assert result.exit_code == 1 and result.stderr == f"cargohold: tier disk: {used} is in use\n"
    assert result.stdout.startswith("deleted 2 namespaces, ")
    assert result.stdout.endswith(f": {first[:8]}, {second[:8]}\n")
    assert set(listed(place)) == {used} and load(user, 1) == payload(1)


@pytest.mark.parametrize("kind", ["disk"])
@pytest.mark.parametrize(
    "limit", [["--max-days", "1"], ["--max-bytes", "4KiB"], ["--max-days", "1", "--max-bytes", "4KiB"]]
)
def test_what_cannot_be_deleted_keeps_nobody_from_pruning_the_rest(
    place: Place, limit: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [place.fill(3, weights=str(age)) for age in range(3)]
    for age, name in enumerate(names):
        os.utime(tmp_path / name / "lock", (age + 1, age + 1))
    really_remove = DiskInventory.remove

    def remove(inventory: DiskInventory, name: str) -> None:
        if name == names[1]:
            raise TierError("disk", f"{name} is in use")
        really_remove(inventory, name)

    monkeypatch.setattr(DiskInventory, "remove", remove)
    result = CliRunner().invoke(app, ["cache", "prune", place.name, *limit])
    assert result.exit_code == 1 and result.stderr == f"cargohold: tier disk: {names[1]} is in use\n"
    assert f" of {names[0][:8]}, {names[2][:8]}; " in result.stdout
    assert set(listed(place)) == {names[1]}


@pytest.mark.parametrize("kind", ["disk"])
@pytest.mark.parametrize("bad", ["segment-00000.headers", "shard.json"])
def test_one_bad_namespace_hides_no_other(
    place: Place, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: with one bad place on the disk, every command ended with "Input/output error"."""
    name, other = place.fill(3), place.fill(5, weights="other")
    with monkeypatch.context() as patch:
        spoil_reads(patch, tmp_path / name / bad)
        remark = f"{tmp_path / name / bad}: Input/output error"
        found = listed(place)
        assert found[other]["chunks"] == 5 and found[other]["remark"] == ""
        assert found[name]["chunks"] == (3 if bad == "shard.json" else None) and found[name]["remark"] == remark
        shown = CliRunner().invoke(app, ["cache", "ls", place.name])
        assert shown.stderr == f"{name[:8]}: {remark}\n"
        assert ("unknown" in shown.stdout) == (bad != "shard.json")
        assert "5 chunks are good, 0 damaged\n" in run("verify", place.name, other)
        looked = CliRunner().invoke(app, ["cache", "verify", place.name])
        assert looked.exit_code == 1 and looked.stdout.startswith("5 chunks are good, ")
        assert looked.stderr == (f"cargohold: tier disk: {remark}\n" if bad == "shard.json" else "")
        run("rm", place.name, name)
        run("prune", place.name, "--max-bytes", "4KiB")
    assert not listed(place)


@pytest.mark.parametrize("kind", ["disk"])
def test_a_lock_that_cannot_be_opened_may_be_held(place: Place, tmp_path: Path) -> None:
    name, other = place.fill(3), place.fill(5, weights="other")
    lock = tmp_path / name / "lock"
    lock.unlink()
    lock.symlink_to("/etc/passwd")
    assert "perhaps in use" in run("ls", place.name)
    looked = CliRunner().invoke(app, ["cache", "verify", place.name])
    assert looked.stdout == f"5 chunks are good, 0 damaged\n{name[:8]} is perhaps in use and was not looked at\n"
    assert looked.stderr == f"{name[:8]}: {lock} is not a regular file\n"
    run("prune", place.name, "--max-bytes", "4KiB", status=1)
    assert set(listed(place)) == {name}
    assert run("rm", place.name, "--all", status=1) == "deleted 0 namespaces, 0 B\n"
    assert other not in listed(place)


@pytest.mark.parametrize("kind", ["disk"])
def test_without_a_description_nothing_can_be_verified(place: Place, tmp_path: Path) -> None:
    """Found by review: of 50 chunks that were there, none was good and none damaged, and all seemed well."""
    name = place.fill(3)
    description = tmp_path / name / "shard.json"
    description.unlink()
    told = f"{description} is missing or damaged, so no chunk can be verified"
    assert listed(place)[name]["remark"] == told
    looked = CliRunner().invoke(app, ["cache", "verify", place.name])
    assert (looked.exit_code, looked.stderr) == (1, f"cargohold: tier disk: {told}\n")
    found = json.loads(run("verify", place.name, "--json", status=1))
    assert (found["good"], found["damaged"], found["failed"]) == (0, 0, [name])
    (tmp_path / name / "segment-00000.headers").write_bytes(b"")
    assert listed(place)[name]["remark"] == "", "nothing is there that could be verified"
    run("verify", place.name)


@pytest.mark.parametrize("kind", PLACES)
def test_one_is_no_plural(place: Place) -> None:
    place.fill(1)
    assert "1 chunk is good, 0 damaged\n" in run("verify", place.name)
    assert "deleted 1 namespace, " in run("rm", place.name, "--all")


@pytest.mark.parametrize("kind", ["valkey"])
def test_where_nobody_knows_what_was_used_when_nothing_is_pruned_for_that(place: Place) -> None:
    """Found by review: nothing was deleted, and all seemed well."""
    run("prune", place.name, "--max-days", "0")
    place.fill(1)
    for more in ([], ["--max-bytes", "4KiB"]):
        result = CliRunner().invoke(app, ["cache", "prune", place.name, "--max-days", "0", *more])
        assert result.exit_code == 2
        assert "--max-days=0.0 is not possible: this store does not record when it was used" in result.stderr
    assert len(listed(place)) == 1
    run("prune", place.name, "--max-bytes", "4KiB")
    assert not listed(place)


@pytest.mark.parametrize("kind", ["disk"])
def test_old_namespaces_are_pruned(place: Place, tmp_path: Path) -> None:
    names = [place.fill(3, weights=str(age)) for age in range(3)]
    for age, name in enumerate(names):
        when = time.time() - 86400 * (age + 0.5)
        os.utime(tmp_path / name / "lock", (when, when))
    run("verify", place.name)  # a look is no use
    run("prune", place.name, "--max-days", "2")
    assert set(listed(place)) == set(names[:2])
    run("prune", place.name, "--max-bytes", str(listed(place)[names[0]]["bytes"]))
    assert set(listed(place)) == {names[0]}
    assert "deleted 0 B" in run("prune", place.name, "--max-bytes", "1GiB")


SLOT = 12 * 1024
"""Bytes that a chunk takes on a disk: whole pages."""


def space(directory: Path) -> int:
    """Bytes that files take on the disk, whatever their size."""
    return sum(512 * path.lstat().st_blocks for path in directory.rglob("*") if path.is_file())


def test_room_without_chunks_is_given_back_before_a_chunk_is_deleted(tmp_path: Path) -> None:
    """Found by use: a few chunks in files that were preallocated for many were all deleted, though they fit."""
    place = disk_place(tmp_path)
    name = place.fill(5)
    limit = 8 * SLOT
    assert int(str(listed(place)[name]["bytes"])) < limit < space(tmp_path)
    words = ["prune", place.name, "--max-bytes", str(limit)]
    done = run(*words)
    assert done.startswith("deleted 0 B; gave back ") and done.endswith(" are left\n")
    assert space(tmp_path) <= limit
    assert run(*words) == done.split(";")[0] + ";" + done.split(";")[2]
    assert "5 chunks are good, 0 damaged" in run("verify", place.name)
    place.fill(100, is_closed=False)  # where the room was
    assert [load(place.tier, number) for number in range(100)] == [payload(number) for number in range(100)]


def test_of_a_namespace_on_a_disk_what_was_used_last_is_kept_with_all_before_it(tmp_path: Path) -> None:
    """In a prefix the later chunk goes first: nobody finds it without the one before."""
    place = disk_place(tmp_path)
    name = place.fill(0, is_closed=False)
    for first in (0, 10, 20):
        for number in range(first, first + 4):
            parent = key(number - 1) if number > first else None
            place.tier.store(key(number), memoryview(payload(number)), parent)
    place.tier.touch([key(0), key(1)])
    place.tier.close()
    words = ["prune", place.name, "--max-bytes", str(int(str(listed(place)[name]["bytes"])) - 6 * SLOT)]
    assert run(*words).startswith(f"deleted 72 KiB of {name[:8]}; ")
    place.fill(0, is_closed=False)
    here = [number for number in range(24) if load(place.tier, number) == payload(number)]
    assert here == [0, 1, 20, 21, 22, 23]


def test_where_files_cannot_have_holes_nothing_is_deleted_but_whole_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (place := disk_place(tmp_path)).fill(5), place.fill(5, weights="other")
    os.utime(tmp_path / old / "lock", (1, 1))

    def give_back(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Segment, "give_back", give_back)
    held = int(str(listed(place)[old]["bytes"]))
    result = CliRunner().invoke(app, ["cache", "prune", place.name, "--max-bytes", str(held - SLOT)])
    assert result.exit_code == 1 and "this file system cannot give back a part of a file" in result.stderr
    assert result.stdout.startswith("deleted ") and set(listed(place)) == {new}
    assert "5 chunks are good, 0 damaged" in run("verify", place.name)


@pytest.mark.parametrize("kind", ["directory"])
def test_the_oldest_chunks_of_a_shared_store_are_pruned_one_by_one(place: Place, tmp_path: Path) -> None:
    name = place.fill(6)
    for number in range(6):
        os.utime(tmp_path / name / "00" / key(number).hex(), (1000 + number, 1000 + number))
    run("prune", place.name, "--max-bytes", str(3 * (CHUNK + HEADER_BYTES) + 2000))
    place.fill(0, is_closed=False)
    assert [n for n in range(6) if load(place.tier, n) == payload(n)] == [3, 4, 5]


@pytest.mark.parametrize("kind", ["directory"])
def test_what_is_not_ours_is_not_touched(place: Place, tmp_path: Path) -> None:
    place.fill(2)
    foreign = [tmp_path / "photos" / "00" / "abcd", tmp_path / "letter.txt", tmp_path / ("0" * 32) / "notes"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    run("rm", place.name, "--all")
    assert listed(place) == {}
    assert [path.read_text() for path in foreign] == ["mine"] * 3


COMMANDS = [["ls"], ["verify"], ["verify", "--delete"], ["prune", "--max-bytes", "4KiB"], ["prune", "--max-days", "0"]]
COMMANDS += [["rm", "--all"]]


@pytest.mark.parametrize("kind", ["directory"])
@pytest.mark.parametrize("words", COMMANDS)
def test_a_shared_directory_by_its_path_alone_is_refused_with_its_url(
    place: Place, words: list[str], tmp_path: Path
) -> None:
    """Found by review: its namespaces passed for a disk's, and all were deleted while an engine used them."""
    place.fill(3, is_closed=False)
    result = CliRunner().invoke(app, ["cache", *words, str(tmp_path)])
    assert result.exit_code == 2
    shared = f"it is a shared store; name it as {place.name}"
    assert result.stderr == f"cargohold: PLACE={str(tmp_path)!r} is not possible: {shared}\n"
    assert [load(place.tier, number) for number in range(3)] == [payload(number) for number in range(3)]
    assert not list(tmp_path.rglob("*lock"))
    run(*words, place.name)


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("has_shard", [False, True])
def test_the_folders_of_a_third_partys_tier_are_left_alone(tmp_path: Path, words: list[str], has_shard: bool) -> None:
    using = codec()
    tier = FolderConfig(path=str(tmp_path)).open(Opening(codec=using, chunk_sizes=[CHUNK]))
    for number in range(3):
        tier.store(key(number), memoryview(payload(number)))
    if has_shard:
        disk_place(tmp_path).fill(1, weights="other")
    result = CliRunner().invoke(app, ["cache", *words, str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert using.namespace.id[:8] not in result.stdout
    assert using.namespace.id in result.stderr and "left alone" in result.stderr
    assert [load(tier, number) for number in range(3)] == [payload(number) for number in range(3)]
    assert len(list((tmp_path / using.namespace.id).iterdir())) == 3


@pytest.mark.parametrize("kind", ["disk"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["ls", "/no/such/directory"], "there is no such directory"),
        (["ls", __file__], "it is not a directory"),
        (["ls", "file:///no/such/directory"], "there is no such directory"),
        (["ls", "ftp://:secret@host"], "PLACE='ftp://host' is not possible: the scheme must be one of"),
        (["ls", "redis://:secret@[::1"], "PLACE='redis://[::1' is not possible: it must be a URL"),
        (["ls", "file://kv"], "PLACE='file://kv' is not possible: it must be file:///absolute/path"),
        (["rm", "file:kv", "--all"], "PLACE='file:kv' is not possible: it must be file:///absolute/path"),
        (["rm", "PLACE"], "cargohold: name what to delete: one or more ids, or --all"),
        (["rm", "PLACE", "--all", "ab"], "cargohold: give either ids or --all, not both"),
        (["rm", "PLACE", "zz"], "ID='zz' is not possible: it matches no namespace; stored here: "),
        (["rm", "PLACE", ""], "it must be the start of exactly one namespace's id; these match: "),
        (["prune", "PLACE"], "cargohold: prune needs --max-bytes or --max-days"),
        (["prune", "PLACE", "--max-bytes", "lots"], "such as 2GiB"),
    ],
)
def test_impossible_wishes_are_refused_by_name(place: Place, words: list[str], reason: str) -> None:
    place.fill(1)
    result = CliRunner().invoke(app, ["cache", *(place.name if word == "PLACE" else word for word in words)])
    assert result.exit_code == 2
    assert reason in result.stderr and len(result.stderr.splitlines()) == 1
    assert isinstance(result.exception, SystemExit) and not isinstance(result.exception, ConfigError)
    assert len(listed(place)) == 1


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["rm", "--all"], ["prune", "--max-bytes", "4KiB"]])
def test_no_place_is_not_the_current_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: with a variable that was not set, ``rm "$KV" --all`` deleted what lay in the current directory."""
    here = disk_place(tmp_path)
    here.fill(1)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["cache", words[0], "", *words[1:]])
    assert result.exit_code == 2
    assert result.stderr.startswith("cargohold: PLACE='' is not possible: it must be a directory")
    assert listed(here)
    assert run("ls", ".", "--json") == run("ls", here.name, "--json")


@pytest.mark.parametrize(
    ("package", "place", "extra"), [("redis", "valkey://h", "redis"), ("obstore", "s3://b", "objects")]
)
def test_a_missing_package_is_named_with_its_extra(package: str, place: str, extra: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from cargohold.cli import main; sys.exit(main())"
    run = subprocess.run(
        [sys.executable, "-c", script, "cache", "ls", place], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert f"PLACE='{place}'" in line and f"pip install 'cargohold[{extra}]'" in line
