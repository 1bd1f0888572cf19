"""Packed chunks: what comes back is what was stored, bit by bit; what lies about itself is damaged, and takes no memory."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from cargohold.errors import ConfigError, TierError
from cargohold.tiers import (
    DiskTierConfig,
    LoadOutcome,
    Opening,
    SharedTierConfig,
    StoreOutcome,
    Tier,
    open_tier,
    require_packages,
)
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec, Header, Packed, unpack_header
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.slots import MOST_PACKED, SlotPlan
from cargohold.tiers.encryption import EncryptionKey
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.packing import NUMBER_TYPES, least_part, pack, unpack
from tests.tiers.common import NAMESPACE, key, ticking

zstandard = pytest.importorskip("zstandard", reason="needs the extra cargohold[packing]")
SIZE = 24 * 4096 + 100
WIDTHS = sorted({number.width for number in NUMBER_TYPES.values()})


@cache
def numbers(number: int, size: int = SIZE, name: str = "bfloat16") -> bytes:
    """Bytes as KV has them: numbers of about one size."""
    drawn = np.random.default_rng(number).normal(size=-(-size // NUMBER_TYPES[name].width)).astype(np.float32)
    if name == "bfloat16":
        return drawn.view(np.uint16)[1::2].tobytes()[:size]
    return drawn.tobytes()[:size]


def codec(secret: bytes | None = None, *, packs: bool = True, **changes: Any) -> ChunkCodec:
    encryption = None if secret is None else EncryptionKey(secret)
    return ChunkCodec(replace(NAMESPACE, **changes), encryption, ticking(), ["bfloat16"] if packs else [])


def disk(root: Path, using: ChunkCodec, max_bytes: str = "16MiB", size: int = SIZE) -> DiskTier:
    opening = Opening(codec=using, chunk_sizes=[size], number_types=["bfloat16"])
    tier = DiskTierConfig(directory=root, max_bytes=max_bytes, reserve_bytes=0).open(opening)
    assert isinstance(tier, DiskTier)
    return tier


def directory(root: Path, using: ChunkCodec) -> Tier:
    return SharedTierConfig(url=f"file://{root}").open(Opening(codec=using, chunk_sizes=[SIZE]))


def store(tier: Tier, number: int, data: bytes | None = None) -> StoreOutcome:
    return tier.store(key(number), memoryview(numbers(number) if data is None else data))


def load(tier: Tier, number: int, size: int = SIZE) -> bytes | LoadOutcome:
    into = bytearray(size)
    outcome = tier.load(key(number), memoryview(into))
    return bytes(into) if outcome is LoadOutcome.LOADED else outcome


# --- what comes back is what was packed -------------------------------------------------------------------------------


def round_trip(data: bytes, width: int) -> int:
    """The bytes that are left of ``data``; what comes back must be as it was."""
    packed = pack(memoryview(data), width)
    if packed is None:
        return len(data)
    assert least_part(len(data)) <= len(packed) < len(data)
    into = memoryview(bytearray(len(data)))
    assert unpack(memoryview(bytes(packed)), width, into) and bytes(into) == data
    return len(packed)


@pytest.mark.parametrize("width", WIDTHS)
@example(data=b"")
@example(data=bytes(5000))
@given(
    data=st.one_of(st.binary(max_size=300), st.builds(lambda one, count: one * count, st.binary(), st.integers(1, 900)))
)
def test_whatever_the_bytes_are_they_come_back(width: int, data: bytes) -> None:
    round_trip(data, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_pattern_of_a_number_comes_back(width: int) -> None:
    """NaNs with payloads, negative zeros and denormals among them; of the widest, every exponent with some of its others."""
    patterns = np.arange(2 ** (8 * min(width, 2)), dtype=np.uint32)
    if width == 4:
        patterns = np.concatenate([patterns << 16, (patterns << 16) | 0xFFFF, (patterns << 16) | patterns])
    data = patterns.astype(f"<u{width}").tobytes()
    for order in (
        data,
        np.random.default_rng(0).permutation(np.frombuffer(data, np.uint8)).tobytes(),
        data[:-1],
        data * 3,
    ):
        round_trip(order, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_noise_does_not_grow(width: int) -> None:
    data = np.random.default_rng(0).bytes(1_000_003)
    assert round_trip(data, width) <= len(data)


@pytest.mark.parametrize(("name", "most"), [("bfloat16", 0.75), ("float32", 0.90)])
def test_numbers_of_about_one_size_get_smaller(name: str, most: float) -> None:
    data = numbers(0, 368_640, name)
    assert round_trip(data, NUMBER_TYPES[name].width) < most * len(data)


def test_a_value_may_be_unpacked_over_itself() -> None:
    data = numbers(1)
    packed = bytes(pack(memoryview(data), 2) or b"")
    memory = memoryview(bytearray(SIZE))
    memory[: len(packed)] = packed
    assert unpack(memory[: len(packed)], 2, memory) and bytes(memory) == data


# --- what lies about itself -------------------------------------------------------------------------------------------


def frame(data: bytes, **options: Any) -> bytes:
    return bytes(zstandard.ZstdCompressor(**options).compress(data))


def claiming_50(data: bytes) -> bytes:
    assert data[4] == 0x20, "a frame whose length follows in one byte"
    return data[:5] + bytes([50]) + data[6:]


BOMBS: dict[str, Callable[[], bytes]] = {
    "claims more than there is room for": lambda: frame(bytes(2**24)),
    "claims nothing": lambda: frame(bytes(2**24), write_content_size=False),
    "claims less than it holds": lambda: claiming_50(frame(bytes(200))),
    "holds less than it claims": lambda: claiming_50(frame(bytes(40))),
    "another behind it": lambda: frame(bytes(49)) + frame(bytes(2**24)),
    "nothing": lambda: b"",
    "no frame": lambda: b"no frame at all",
    "cut off": lambda: frame(np.random.default_rng(0).bytes(50))[:-9],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_no_chunk_and_takes_no_memory(name: str) -> None:
    """What enters has the right checksum: somebody who may write to the store has made it."""
    bomb = BOMBS[name]()
    into = memoryview(bytearray(100))
    tracemalloc.start()
    try:
        assert not unpack(memoryview(bytes(50) + bomb), 2, into)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()
    for width in (0, 9, 255):
        assert not unpack(memoryview(bytes(50) + frame(bytes(50))), width, into)
    assert not unpack(memoryview(bytes(49)), 2, into)


@pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["plain", "encrypted"])
def test_a_payload_is_checked_before_it_is_unpacked_and_after(
    secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, data = codec(secret), numbers(1)
    header_bytes, body = own.encode(key(1), memoryview(data), key(0))
    stored, header = bytes(body), own.header_of(header_bytes, key(1), SIZE)
    assert header is not None and header.packed is not None and header.num_bytes == len(stored) < 0.8 * SIZE

    def decode(stored: bytes, *, is_sealed_anew: bool = False, **changes: Any) -> bytes | None:
        checksum = xxhash.xxh3_128(stored).digest() if is_sealed_anew else header.checksum
        found = unpack_header(replace(header, checksum=checksum, **changes).pack())
        if found is None or own.header_of(found.pack(), key(1), SIZE) is None:
            return None
        into = memoryview(bytearray(SIZE))
        room = own.body_for(found, into)
        room.view[:] = stored[: len(room.view)]
        return bytes(into) if own.decode(found, key(1), room, into) else None

    assert decode(stored) == data
    packed = header.packed
    for wrong in (replace(packed, width=4), replace(packed, width=0), replace(packed, checksum=bytes(16))):
        assert decode(stored, packed=wrong) is None
    for length in (0, len(stored) - 1, SIZE + 1, 2**63):
        assert decode(stored, packed=replace(packed, num_bytes=length)) is None, "not the chunk that is asked for"
    assert decode(stored, num_bytes=SIZE) is None, "nothing packed is as long as before"
    dice = Random(0)
    for _ in range(30):
        at = dice.randrange(len(stored))
        flipped = stored[:at] + bytes([stored[at] ^ (1 << dice.randrange(8))]) + stored[at + 1 :]
        with monkeypatch.context() as patch:
            patch.setattr("cargohold.tiers.chunk_format.unpack", lambda *_: pytest.fail("it was unpacked unchecked"))
            assert decode(flipped) is None
        assert decode(flipped, is_sealed_anew=True) is None


def test_the_header_of_a_packed_chunk_is_fixed_byte_by_byte() -> None:
    header = Header(
        bytes(range(32)),
        b"k" * 36,
        b"p" * 36,
        700,
        b"c" * 16,
        7,
        packed=Packed(1000, b"u" * 16, 2),
        nonce=b"n" * 12,
        tag=b"t" * 16,
    )
    packed = header.pack()
    assert len(packed) == HEADER_BYTES and unpack_header(packed) == header and header.plain_bytes == 1000
    assert packed[:22].hex() == "9343484b560d0a1a03000100ff000000000000000000"[:44]
    assert packed[62:192] == (
        b"\x24"
        + b"k" * 36
        + bytes(12)
        + b"\x24"
        + b"p" * 36
        + bytes(12)
        + (1000).to_bytes(8, "little")
        + b"u" * 16
        + b"\x02"
        + bytes(7)
    )
    assert packed[192:236] == b"n" * 12 + b"t" * 16 + b"c" * 16


def test_keys_that_have_no_room_in_the_header_of_a_packed_chunk_are_kept_plain() -> None:
    for name, parent in ((bytes(60) + bytes(4), b""), (key(1), bytes(64))):
        header = unpack_header(codec().encode(name, memoryview(numbers(1)), parent)[0])
        assert header is not None and header.packed is None and header.num_bytes == SIZE


# --- on a disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBER_TYPES)
@pytest.mark.parametrize("size", [4096, 92_160, 368_640, 737_280, 2_949_120])
def test_slots_are_such_that_little_of_a_packed_chunk_is_lost(name: str, size: int) -> None:
    plan, part = SlotPlan.of_packed([size], [name]), NUMBER_TYPES[name].part
    assert plan.slot_bytes % 4096 == 0 and plan.most <= MOST_PACKED and plan.most * plan.slot_bytes >= size
    assert plan == SlotPlan.with_slots(plan.slot_bytes, [size]), "a later start finds the same"
    assert plan.count_for(least_part(size)) >= plan.least
    if size > 300_000:
        assert plan.count_for(int(part * size)) * plan.slot_bytes <= (part + 0.015) * size


@pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["plain", "encrypted"])
def test_a_disk_holds_more_packed_chunks_and_finds_them_again(tmp_path: Path, secret: bytes | None) -> None:
    counts = {}
    for packs in (False, True):
        root = tmp_path / str(packs)
        tier = disk(root, codec(secret, packs=packs), "8MiB")
        outcomes = {store(tier, number) for number in range(150)}
        assert outcomes == {StoreOutcome.STORED}
        counts[packs] = tier.usage().num_chunks
        noise = np.random.default_rng(9).bytes(SIZE)
        store(tier, 150, noise)
        tier.close()
        tier = disk(root, codec(secret, packs=packs), "8MiB")
        found = [number for number in range(150) if tier.probe([key(number)])[0]]
        assert len(found) >= counts[packs] - 3
        assert all(load(tier, number) == numbers(number) for number in found) and load(tier, 150) == noise
        tier.check()
        tier.close()
        (holding,) = open_inventory(str(root)).holdings()
        assert set(open_inventory(str(root)).verify(holding.id, delete=False)) == {Verification.GOOD}
        assert holding.plain_bytes == (holding.num_chunks or 0) * SIZE * packs
    assert counts[True] > 1.25 * counts[False]


def test_what_is_there_decides_and_either_finds_what_the_other_has_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for first in (False, True):
        root = tmp_path / str(first)
        tier = disk(root, codec(packs=first))
        store(tier, 1)
        before = tier.usage()
        tier.close()
        caplog.clear()
        other = disk(root, codec(packs=not first))
        assert ("its files are for chunks that are not packed" in caplog.text) is not first
        store(other, 2)
        assert load(other, 1) == numbers(1) and load(other, 2) == numbers(2)
        grown = other.usage().num_bytes / before.num_bytes
        assert grown > 2.2 if first else grown == 2, "in slots for packed chunks, a plain one takes more of them"
        other.close()
        assert load(disk(root, codec(packs=first)), 2) == numbers(2)


def test_a_lower_limit_and_prune_know_packed_chunks(tmp_path: Path) -> None:
    tier = disk(tmp_path, codec())
    for number in range(150):
        store(tier, number)
    tier.close()
    tier = disk(tmp_path, codec(), "4MiB")
    kept = [number for number in range(150) if load(tier, number) == numbers(number)]
    tier.close()
    assert kept == list(range(150 - len(kept), 150)) and len(kept) > 45
    inventory = open_inventory(str(tmp_path))
    (holding,) = inventory.holdings()
    assert holding.num_bytes // 2 <= inventory.trim(holding.id, holding.num_bytes // 2) < 0.6 * holding.num_bytes
    tier = disk(tmp_path, codec(), "4MiB")
    left = [number for number in kept if load(tier, number) == numbers(number)]
    assert left == kept[-len(left) :] and len(left) > 0.4 * len(kept)
    tier.check()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_a_disk_that_is_flipped_anywhere_gives_back_what_was_stored_or_nothing(tmp_path: Path, seed: int) -> None:
    dice, using = Random(seed), codec()
    tier = disk(tmp_path, using, "2MiB")
    for number in range(40):
        store(tier, number)
    tier.close()
    for _ in range(6):
        for file in tmp_path.glob("*/segment-*"):
            with file.open("r+b") as stream:
                size = file.stat().st_size
                for _ in range(3):
                    stream.seek(dice.randrange(size))
                    stream.write(dice.randbytes(dice.choice((1, 1, 8, 300))))
        tier = disk(tmp_path, using, "2MiB")
        for number in range(40):
            assert load(tier, number) in (numbers(number), LoadOutcome.ABSENT, LoadOutcome.CORRUPT)
        for number in dice.sample(range(40), 10):
            store(tier, number)
        tier.check()
        tier.close()


# --- in a shared store ------------------------------------------------------------------------------------------------


def test_a_shared_directory_has_packed_and_plain_chunks_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")
    packing, plain = directory(tmp_path, codec()), directory(tmp_path, codec(packs=False))
    store(packing, 1)
    store(plain, 2)
    for tier in (packing, plain):
        assert load(tier, 1) == numbers(1) and load(tier, 2) == numbers(2)
    sizes = sorted(file.stat().st_size for file in tmp_path.rglob("*") if len(file.name) == 72)
    assert sizes[0] < 0.8 * sizes[1] and sizes[1] == SIZE + HEADER_BYTES


BUCKETS = ["s3://bucket", "gs://bucket/kv", "az://container"]


@pytest.mark.parametrize(
    "url", [*BUCKETS, "file:///kv", "redis://127.0.0.1/0", "valkey://127.0.0.1/0", "mooncake://m:1"]
)
def test_by_default_chunks_are_packed_where_room_and_traffic_cost_money(url: str) -> None:
    assert SharedTierConfig(url=url).packs is (url in BUCKETS)
    assert not SharedTierConfig(url=url, pack="none").packs and SharedTierConfig(url=url, pack="exponent").packs
    assert not DiskTierConfig(directory="/kv", max_bytes="1GiB").packs


@pytest.mark.parametrize(("pack", "expected"), [("none", "plain"), ("exponent", "packed")])
@pytest.mark.parametrize("has_old", [False, True])
def test_chunks_are_packed_in_a_shared_directory_whatever_is_there(
    tmp_path: Path, pack: str, expected: str, has_old: bool
) -> None:
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")

    def opened(how: str) -> Tier:
        config = SharedTierConfig(url=f"file://{tmp_path}", pack=how)
        return open_tier(config, NAMESPACE, [SIZE], number_types=["bfloat16"])

    if has_old:
        store(opened("none"), 0)
    store(opened(pack), 1)
    store(opened(pack), 2)
    sizes = {file.stat().st_size for file in tmp_path.rglob(f"*{key(2).hex()}")}
    is_packed = expected == "packed"
    assert (min(sizes) < SIZE) is is_packed
    (holding,) = open_inventory(f"file://{tmp_path}").holdings()
    assert (holding.plain_bytes > holding.num_bytes) is is_packed


def test_packing_without_its_package_is_refused_and_not_done_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert not SharedTierConfig(url="s3://bucket").packs
    with pytest.raises(ConfigError, match=r"packing needs the extra: pip install 'cargohold\[packing\]'"):
        require_packages(DiskTierConfig(directory="x", max_bytes="1GiB", pack="exponent"))


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_an_engine_without_the_package_says_so_and_leaves_packed_chunks_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="needs the extra cargohold[objects]")
    opened = disk if kind == "disk" else directory
    tier = opened(tmp_path, codec())
    store(tier, 1)
    tier.close()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        tier = opened(tmp_path, codec(packs=False))
        with pytest.raises(TierError, match=r"pip install 'cargohold\[packing\]'"):
            load(tier, 1)
        tier.close()
    assert load(opened(tmp_path, codec()), 1) == numbers(1)
