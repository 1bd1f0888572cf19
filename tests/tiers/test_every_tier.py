"""What holds for every tier, whatever its medium: memory, files, object stores, servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cargohold.tiers import LoadOutcome, StoreOutcome, Tier
from cargohold.tiers.chunk_format import ChunkCodec
from tests.servers import key_value_server
from tests.tiers.clouds import CLOUDS
from tests.tiers.common import CHUNK, codec, disk_tier, key, load, payload, shared_tier
from tests.wrapped_tiers import CountingTier, MemoryTier

Open = Callable[[ChunkCodec], Tier]

SECRET = bytes(range(32))
PLAIN = ["memory", "disk", "disk-buffered", "directory", *CLOUDS, "redis", "valkey"]
ENCRYPTED = ["disk-encrypted", "directory-encrypted", "valkey-encrypted"]
PACKED = ["disk-packed", "directory-packed", "s3-packed", "valkey-packed", "disk-packed-encrypted"]
KINDS = PLAIN + ENCRYPTED + PACKED


@pytest.fixture
def using(kind: str) -> ChunkCodec:
    return codec(SECRET if kind.endswith("-encrypted") else None, packs="-packed" in kind)


@pytest.fixture
def open_tier(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Open]:
    """Opens a tier on the same medium, again and again."""
    medium = kind.removesuffix("-encrypted").removesuffix("-packed")
    with ExitStack() as stack:
        opened: list[Tier] = []
        stack.callback(lambda: [tier.close() for tier in opened])
        url = f"file://{tmp_path}/shared"
        if medium in CLOUDS:
            cloud = CLOUDS[medium]
            cloud.sign_in(monkeypatch, request.getfixturevalue(cloud.fixture).port, tmp_path)
            url = cloud.url(tmp_path.name)
        elif medium in {"redis", "valkey"}:
            server = stack.enter_context(key_value_server(medium))
            url = f"{medium}://127.0.0.1:{server.port}/0"

        def open_one(using: ChunkCodec) -> Tier:
            tier: Tier
            if medium == "memory":
                tier = CountingTier(MemoryTier(CHUNK))
            elif medium.startswith("disk"):
                tier = disk_tier(tmp_path / "disk", using=using, direct_io=medium == "disk")
            else:
                tier = shared_tier(url, using, CHUNK)
            opened.append(tier)
            return tier

        yield open_one


@pytest.mark.parametrize("kind", KINDS)
def test_life_of_chunks(open_tier: Open, using: ChunkCodec) -> None:
    tier = open_tier(using)
    keys = [key(number) for number in range(4)]
    assert tier.probe(keys) == [False] * 4
    assert tier.probe([]) == []
    assert load(tier, 0) is LoadOutcome.ABSENT
    for number in range(3):
        parent = keys[number - 1] if number else None
        assert tier.store(keys[number], memoryview(payload(number)), parent) is StoreOutcome.STORED
    assert tier.store(keys[1], memoryview(payload(1))) is StoreOutcome.PRESENT
    assert tier.probe(keys) == [True, True, True, False]
    assert [load(tier, number) for number in range(4)] == [*map(payload, range(3)), LoadOutcome.ABSENT]
    tier.touch(keys)
    assert tier.usage().num_chunks == 3
    least = 3 * CHUNK // 2 if using.number_types else 3 * CHUNK
    assert least <= tier.usage().num_bytes <= 2 * least + 3 * 4096
    tier.remove([keys[1], keys[3]])
    tier.remove([])
    assert tier.probe(keys) == [True, False, True, False]
    assert load(tier, 1) is LoadOutcome.ABSENT
    assert load(tier, 2) == payload(2)
    assert tier.store(keys[1], memoryview(payload(1))) is StoreOutcome.STORED
    assert load(tier, 1) == payload(1)


@pytest.mark.parametrize(
    "kind", ["memory", "disk", "disk-buffered", "directory", *ENCRYPTED[:1], *PACKED[:2], *PACKED[-1:]]
)
def test_sizes_and_places_in_memory_do_not_matter(open_tier: Open, using: ChunkCodec) -> None:
    tier = open_tier(using)
    for number, size in enumerate([1, 4095, 4096, 4097, 8192, CHUNK]):
        memory = bytearray(CHUNK + 3)
        memory[3 : 3 + size] = payload(number, size)
        assert tier.store(key(number), memoryview(memory)[3 : 3 + size]) is StoreOutcome.STORED
        assert load(tier, number, size) == payload(number, size)


@pytest.mark.parametrize("kind", ["memory", "disk", "directory", *PACKED[:2]])
def test_a_chunk_of_another_length_is_not_loaded(open_tier: Open, using: ChunkCodec) -> None:
    tier = open_tier(using)
    tier.store(key(1), memoryview(payload(1)))
    assert load(tier, 1, CHUNK - 1) in {LoadOutcome.ABSENT, LoadOutcome.CORRUPT}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_chunks_outlive_the_process(open_tier: Open, using: ChunkCodec) -> None:
    first = open_tier(using)
    for number in range(3):
        first.store(key(number), memoryview(payload(number)))
    first.close()
    second = open_tier(using)
    assert second.probe([key(number) for number in range(4)]) == [True, True, True, False]
    assert [load(second, number) for number in range(3)] == [payload(number) for number in range(3)]


@pytest.mark.parametrize("change", ["weights", "config", "dtype", "layout", "split", "adapter", "hashing"])
@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_whatever_changes_the_bytes_hides_them(open_tier: Open, change: str) -> None:
    first = open_tier(codec())
    first.store(key(1), memoryview(payload(1)))
    changes: dict[str, Any] = {change: "other"}
    other = open_tier(codec(**changes))
    assert other.probe([key(1)]) == [False]
    assert load(other, 1) is LoadOutcome.ABSENT
    assert load(first, 1) == payload(1)


@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_the_name_of_a_model_does_not_matter(open_tier: Open) -> None:
    first = open_tier(codec())
    first.store(key(1), memoryview(payload(1)))
    first.close()
    assert load(open_tier(codec(label="renamed")), 1) == payload(1)


@pytest.mark.parametrize("kind", ["disk", "directory", "valkey"])
def test_another_encryption_key_or_none_is_a_miss(open_tier: Open) -> None:
    contents = {}
    for number, secret in enumerate([None, SECRET, bytes(32)]):
        tier = open_tier(codec(secret))
        assert tier.probe([key(1)]) == [False]
        tier.store(key(1), memoryview(payload(number)))
        contents[number] = load(tier, 1)
    assert contents == {number: payload(number) for number in range(3)}


@pytest.mark.parametrize("kind", ["disk-encrypted", "directory-encrypted", "disk-packed-encrypted"])
def test_encrypted_chunks_cannot_be_read_in_the_files(open_tier: Open, using: ChunkCodec, tmp_path: Path) -> None:
    tier = open_tier(using)
    secret_text = b"the quick brown fox " * (CHUNK // 20)
    tier.store(key(1), memoryview(secret_text))
    tier.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key(1) in stored
    assert b"quick brown" not in stored


@pytest.mark.parametrize("kind", ["memory", "disk", "directory", "valkey", *PACKED])
def test_many_threads_get_what_belongs_to_their_keys(open_tier: Open, using: ChunkCodec) -> None:
    tier = open_tier(using)
    wrong: list[object] = []

    def work(seed: int) -> None:
        into = bytearray(CHUNK)
        for step in range(60):
            number = (step * seed) % 7
            tier.store(key(number), memoryview(payload(number)))
            if tier.load(key(number), memoryview(into)) is LoadOutcome.LOADED and bytes(into) != payload(number):
                wrong.append(number)
            if step % 5 == 0:
                tier.remove([key((number + 1) % 7)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for number in range(7):
        tier.store(key(number), memoryview(payload(number)))
        assert load(tier, number) == payload(number)
