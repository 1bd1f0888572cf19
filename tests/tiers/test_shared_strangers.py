"""What somebody can do who may write to a shared store: what he leaves in a chunk's place costs that chunk alone."""

from __future__ import annotations

import os
import shutil
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cargohold.tiers import LoadOutcome, SharedTierConfig, StoreOutcome, Tier
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.opening import open_tier
from tests.servers import Server, key_value_server
from tests.tiers.common import CHUNK, NAMESPACE, in_thread, key, load, payload
from tests.tiers.shared import store

WAIT_S = 20.0
MIB = 1024**2


def filled(url: str, count: int) -> Tier:
    tier = open_tier(SharedTierConfig(url=url), NAMESPACE, [CHUNK])
    for number in range(count):
        assert store(tier, number) is StoreOutcome.STORED
    return tier


# --- directories ------------------------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def plug(path: Path) -> None:
    path.unlink()
    # The name of a socket must be short.
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    os.close(descriptor)


def link_to(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return link


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_folder(path: Path) -> None:
    folder(path)
    (path / "letter").write_text("mine")


def file_for_its_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("mine")


def pipe_for_its_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    os.mkfifo(path.parent)


def loop_for_its_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.symlink_to(path.parent.name)


REPLACED: dict[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "socket": plug,
    "link to itself": lambda path: link_to(path.name)(path),
    "link to nothing": link_to("/no/such/file"),
    "link without end": link_to("/dev/zero"),
}
LEFT: dict[str, Callable[[Path], None]] = {
    "folder": folder,
    "full folder": full_folder,
    "file for its folder": file_for_its_folder,
    "pipe for its folder": pipe_for_its_folder,
    "loop for its folder": loop_for_its_folder,
}


@pytest.mark.parametrize("what", [*REPLACED, *LEFT])
def test_what_is_no_file_in_the_place_of_a_chunk_is_a_miss(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: a pipe held every thread that asked for the chunk, for good; the others failed whole requests."""
    other = int.from_bytes(b"\1" + bytes(31), "big")  # in another folder
    tier = filled(f"file://{tmp_path}", 1)
    assert store(tier, other) is StoreOutcome.STORED
    (path,) = tmp_path.glob(f"*/*/{key(0).hex()}")
    (REPLACED | LEFT)[what](path)

    def use() -> None:
        assert tier.probe([key(0), key(other)]) == [False, True]
        assert load(tier, 0) is LoadOutcome.ABSENT
        assert store(tier, 0) is (StoreOutcome.STORED if what in REPLACED else StoreOutcome.REFUSED)
        assert load(tier, 0) == (payload(0) if what in REPLACED else LoadOutcome.ABSENT)
        tier.remove([key(0)])
        (holding,) = open_inventory(f"file://{tmp_path}").holdings()
        assert holding.num_chunks == 1
        assert load(tier, other) == payload(other)

    in_thread(use, WAIT_S, "it hangs")
    assert (f"{key(0).hex()} cannot be stored: " in caplog.text) == (what in LEFT)
    if what == "full folder":
        assert (path / "letter").read_text() == "mine"


def test_a_link_in_the_place_of_a_chunk_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    tier = filled(f"file://{tmp_path}/kv", 1)
    (path,) = tmp_path.glob(f"kv/*/*/{key(0).hex()}")
    shutil.copyfile(path, precious)
    link_to(str(precious))(path)
    assert load(tier, 0) is LoadOutcome.ABSENT
    assert store(tier, 0) is StoreOutcome.STORED and load(tier, 0) == payload(0)
    assert precious.stat().st_size > CHUNK and not path.is_symlink()


def test_a_pipe_in_the_place_of_a_description_holds_nobody(tmp_path: Path) -> None:
    """Found by use: ``cargohold cache ls`` never ended."""
    url = f"file://{tmp_path}"
    filled(url, 2)
    pipe(tmp_path / NAMESPACE.id / "namespace.json")

    def look_and_start() -> None:
        (holding,) = open_inventory(url).holdings()
        assert (holding.num_chunks, holding.facts) == (2, {})
        filled(url, 0)
        (holding,) = open_inventory(url).holdings()
        assert holding.facts == NAMESPACE.describe()

    in_thread(look_and_start, WAIT_S, "it hangs")


def test_pipes_that_take_the_place_of_chunks_during_a_look_hold_nobody(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    filled(url, 3)
    findings = open_inventory(url).verify(NAMESPACE.id, delete=True)
    assert next(findings) is Verification.GOOD
    for path in tmp_path.glob("*/00/*"):
        pipe(path)
    rest: list[Verification] = []
    in_thread(lambda: rest.extend(findings), WAIT_S, "it hangs")
    assert rest == []


# --- Redis and Valkey -------------------------------------------------------------------------------------------------


@contextmanager
def served() -> Iterator[tuple[str, Server]]:
    with key_value_server("valkey") as server:
        yield f"valkey://127.0.0.1:{server.port}", server


@contextmanager
def memory_below(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_a_value_larger_than_any_chunk_is_not_fetched() -> None:
    """Found by use: four of them took 3 GiB; the server makes such a value from a command of a few bytes."""
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with served() as (url, server), redis.Redis(port=server.port) as client, closing(filled(url, 2)) as tier:
        client.setrange(b"cargohold:%b:%b" % (NAMESPACE.id.encode(), key(0)), 64 * MIB, "x")
        with memory_below(8 * MIB):
            assert load(tier, 0) is LoadOutcome.CORRUPT
        assert tier.probe([key(0), key(1)]) == [False, True]
        assert load(tier, 1) == payload(1)
        assert store(tier, 0) is StoreOutcome.STORED and load(tier, 0) == payload(0)


def test_an_answer_may_be_longer_than_a_chunk_if_it_answers_many_questions() -> None:
    with served() as (url, _), closing(filled(url, 1)) as tier:
        keys = [key(number) for number in range(50_000)]
        assert sum(tier.probe(keys)) == 1


def test_a_look_at_values_takes_memory_for_a_piece_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    monkeypatch.setattr("cargohold.tiers.stores.redis.PIECE_BYTES", 4096)
    with served() as (url, server), redis.Redis(port=server.port) as client, closing(filled(url, 3)) as tier:
        inventory = open_inventory(url)
        assert list(inventory.verify(NAMESPACE.id, delete=True)) == [Verification.GOOD] * 3
        client.setrange(b"cargohold:%b:%b" % (NAMESPACE.id.encode(), key(0)), 16 * MIB, "x")
        with memory_below(4 * MIB):
            findings = list(inventory.verify(NAMESPACE.id, delete=True))
        assert sorted(finding.value for finding in findings) == ["damaged", "good", "good"]
        assert tier.probe([key(number) for number in range(3)]) == [False, True, True]


def test_nothing_in_the_place_of_a_chunk_is_a_damaged_one() -> None:
    """Found by use: every load of the chunk failed, for good."""
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with served() as (url, server), redis.Redis(port=server.port) as client, closing(filled(url, 2)) as tier:
        name = b"cargohold:%b:%b" % (NAMESPACE.id.encode(), key(0))

        def spoil(name: bytes) -> None:
            client.set(name, "")

        spoil(name)
        spoil(b"cargohold:" + NAMESPACE.id.encode())
        inventory = open_inventory(url)
        (holding,) = inventory.holdings()
        assert (holding.num_chunks, holding.facts) == (2, {})
        assert load(tier, 0) is LoadOutcome.CORRUPT
        assert store(tier, 0) is StoreOutcome.STORED and load(tier, 0) == payload(0)
        spoil(name)
        findings = list(inventory.verify(NAMESPACE.id, delete=True))
        assert {Verification.GOOD, Verification.DAMAGED} == set(findings) and len(findings) == 2
        assert tier.probe([key(0), key(1)]) == [False, True]
