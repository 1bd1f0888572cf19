"""Damage of any kind is found; keys for encryption are handled with care."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cargohold.errors import ConfigError
from cargohold.tiers import LoadOutcome, Namespace, StoreOutcome, Tier, digest_weights
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec, Header, unpack_header
from cargohold.tiers.encryption import KEY_BYTES, EncryptionKey, read_key
from tests.tiers.common import NAMESPACE, codec, disk_tier, key, load, payload, shared_tier

SECRET = bytes(range(32))
SMALL = 200


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_header_is_taken_for_that_of_its_own_chunk_alone(secret: bytes | None) -> None:
    using = codec(secret)
    header, _ = using.encode(key(1), memoryview(payload(1, SMALL)), key(0))
    found = using.header_of(header, key(1), SMALL)
    assert found is not None and (found.key, found.parent, found.num_bytes) == (key(1), key(0), SMALL)
    assert using.header_of(header, key(2), SMALL) is None
    assert using.header_of(header, key(1), SMALL + 1) is None
    assert using.header_of(header[:-1], key(1), SMALL) is None
    assert codec(secret, weights="others").header_of(header, key(1), SMALL) is None
    assert codec(SECRET if secret is None else None).header_of(header, key(1), SMALL) is None
    swapped = replace(found, nonce=b"" if found.is_encrypted else bytes([1] * 12))
    assert using.header_of(swapped.pack(), key(1), SMALL) is None, "encrypted or not, as we are"


class Damaged:
    """A tier with one chunk, whose stored bytes can be changed behind its back."""

    def __init__(self, directory: Path, kind: str, using: ChunkCodec) -> None:
        self.tier: Tier
        if kind == "disk":
            self.tier = disk_tier(directory, using=using, chunk_bytes=SMALL, max_bytes="1MiB")
        else:
            self.tier = shared_tier(f"file://{directory}", using, SMALL)
        self._stored_bytes = len(using.encode(key(1), memoryview(payload(1, SMALL)), None)[1])
        assert self.tier.store(key(1), memoryview(payload(1, SMALL))) is StoreOutcome.STORED
        self._places = list(self._find(directory, kind))
        self.num_bits = 8 * sum(length for _, length in self._places)

    def _find(self, directory: Path, kind: str) -> Iterator[tuple[Path, int]]:
        if kind == "disk":
            (headers,) = directory.glob("*/segment-00000.headers")
            yield headers, HEADER_BYTES
            yield headers.with_suffix(".data"), self._stored_bytes
        else:
            (value,) = directory.glob(f"*/*/{key(1).hex()}")
            yield value, HEADER_BYTES + self._stored_bytes

    def damage(self, bit: int) -> None:
        for path, length in self._places:
            if bit < 8 * length:
                with path.open("r+b") as file:
                    data = flipped(file.read(length), bit)
                    file.seek(0)
                    file.write(data)
                return
            bit -= 8 * length
        raise AssertionError


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["disk", "directory"])
@pytest.mark.parametrize("packs", [False, True], ids=["unpacked", "packed"])
def test_every_flipped_bit_is_found_and_the_next_store_repairs_it(
    tmp_path: Path, kind: str, secret: bytes | None, packs: bool
) -> None:
    chunk = Damaged(tmp_path, kind, codec(secret, packs=packs))
    assert (chunk.num_bits < 8 * (HEADER_BYTES + SMALL)) is packs
    for bit in range(0, chunk.num_bits, 7):  # every byte, every position in turn
        chunk.damage(bit)
        assert load(chunk.tier, 1, SMALL) is LoadOutcome.CORRUPT, f"bit {bit}"
        assert chunk.tier.probe([key(1)]) == [False], "a bad chunk is not there any more"
        assert chunk.tier.store(key(1), memoryview(payload(1, SMALL))) is StoreOutcome.STORED
        assert load(chunk.tier, 1, SMALL) == payload(1, SMALL)


def test_a_swapped_chunk_is_found(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, chunk_bytes=SMALL, max_bytes="1MiB")
    for number in (1, 2):
        tier.store(key(number), memoryview(payload(number, SMALL)))
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    data = headers.read_bytes()
    with headers.open("r+b") as file:
        file.write(data[HEADER_BYTES : 2 * HEADER_BYTES] + data[:HEADER_BYTES])
    assert load(tier, 1, SMALL) is LoadOutcome.CORRUPT
    assert load(tier, 2, SMALL) is LoadOutcome.CORRUPT


def test_headers_and_payloads_damaged_while_nobody_looked(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, chunk_bytes=SMALL, max_bytes="1MiB")
    for number in range(3):
        tier.store(key(number), memoryview(payload(number, SMALL)))
    tier.close()
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    with headers.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        file.write(b"?")
    data = headers.with_suffix(".data")
    with data.open("r+b") as file:
        file.seek(2 * 4096 + 5)
        file.write(b"?")
    tier = disk_tier(tmp_path, chunk_bytes=SMALL, max_bytes="1MiB")
    assert tier.probe([key(number) for number in range(3)]) == [True, False, True]
    assert load(tier, 0, SMALL) == payload(0, SMALL)
    assert load(tier, 2, SMALL) is LoadOutcome.CORRUPT
    tier.check()
    tier.close()
    tier = disk_tier(tmp_path, chunk_bytes=SMALL, max_bytes="1MiB")
    assert tier.probe([key(number) for number in range(3)]) == [True, False, False]


@pytest.mark.parametrize("newer", [0, 1])
def test_of_a_chunk_that_was_left_in_two_slots_the_newer_one_counts(tmp_path: Path, newer: int) -> None:
    tier = disk_tier(tmp_path, chunk_bytes=SMALL, max_bytes="1MiB")
    for number in range(2):
        tier.store(key(number), memoryview(payload(number, SMALL)))
    tier.close()
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    for slot in range(2):
        stored_ns = 1_700_000_000_000_000_100 + (slot == newer)
        header, body = codec(time_ns=repeat(stored_ns).__next__).encode(key(7), memoryview(payload(slot, SMALL)), None)
        with headers.open("r+b") as file:
            file.seek(slot * HEADER_BYTES)
            file.write(header)
        with headers.with_suffix(".data").open("r+b") as file:
            file.seek(slot * 4096)
            file.write(body)
    for _ in range(2):
        tier = disk_tier(tmp_path, chunk_bytes=SMALL, max_bytes="1MiB")
        assert tier.usage().num_chunks == 1
        assert load(tier, 7, SMALL) == payload(newer, SMALL)
        tier.check()
        tier.close()


def test_encrypted_chunks_are_authenticated() -> None:
    """A checksum is no protection against somebody who can compute one."""
    own = codec(SECRET)
    (header_bytes, body), (_, other_body) = (
        own.encode(key(1), memoryview(payload(number, SMALL)), None) for number in (1, 2)
    )
    header = own.header_of(header_bytes, key(1), SMALL)
    assert header is not None

    def decode(stored: bytes, **changes: Any) -> bytes | None:
        forged = replace(header, checksum=xxhash.xxh3_128(stored).digest(), **changes)
        found = own.header_of(forged.pack(), forged.key, SMALL)
        assert found is not None, "nothing is wrong with the header"
        into = memoryview(bytearray(SMALL))
        room = own.body_for(found, into)
        room.view[:] = stored
        return bytes(into) if own.decode(found, forged.key, room, into) else None

    assert decode(bytes(body)) == payload(1, SMALL)
    assert decode(flipped(bytes(body), 99)) is None
    assert decode(bytes(body), tag=flipped(header.tag, 3)) is None
    assert decode(bytes(body), nonce=flipped(header.nonce, 3)) is None
    assert decode(bytes(body), key=key(2)) is None, "the bytes of one chunk under the name of another"
    assert decode(bytes(other_body)) is None


headers = st.builds(
    Header,
    namespace=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=1, max_size=64),
    parent=st.binary(max_size=64),
    num_bytes=st.integers(0, 2**64 - 1),
    checksum=st.binary(min_size=16, max_size=16),
    stored_ns=st.integers(0, 2**64 - 1),
)


@given(headers, st.integers(0, 8 * HEADER_BYTES - 1))
def test_headers_come_back_as_they_were_or_not_at_all(header: Header, bit: int) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == header
    assert unpack_header(flipped(packed, bit)) is None
    assert unpack_header(packed[:-1]) is None
    assert unpack_header(bytes(HEADER_BYTES)) is None


@given(st.data())
def test_namespaces_differ_when_any_field_but_the_label_does(data: st.DataObject) -> None:
    fields = [name for name in NAMESPACE.__dataclass_fields__ if name != "label"]
    values = {name: data.draw(st.sampled_from(["", "a", "b", "ab"])) for name in fields}
    other = {name: data.draw(st.sampled_from(["", "a", "b", "ab"])) for name in fields}
    digests = {Namespace(label=label, **facts).digest for label, facts in (("x", values), ("y", other))}  # type: ignore[arg-type]  # by name
    assert len(digests) == (1 if values == other else 2)


def test_weights_are_told_apart_by_their_bytes_and_not_by_their_order() -> None:
    first = {"a": b"123", "b": b"45"}
    digest = digest_weights((name, memoryview(data)) for name, data in first.items())
    assert digest == digest_weights((name, memoryview(first[name])) for name in reversed(first))
    for other in ({"a": b"124", "b": b"45"}, {"a": b"1234", "b": b"5"}, {"a": b"123", "c": b"45"}, {"a": b"123"}):
        assert digest != digest_weights((name, memoryview(data)) for name, data in other.items())


# --- keys for encryption --------------------------------------------------------------------------------------------------


def test_a_key_may_be_written_as_it_is_or_in_hexadecimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, text = tmp_path / "raw", tmp_path / "hex"
    raw.write_bytes(SECRET)
    text.write_text(SECRET.hex() + "\n")
    for path in (raw, text):
        path.chmod(0o600)
    monkeypatch.setenv("KV_KEY", SECRET.hex())
    ids = {read_key(source).id for source in (f"file:{raw}", f"file:{text}", "env:KV_KEY")}
    assert len(ids) == 1
    assert SECRET.hex() not in repr(read_key(f"file:{raw}")) and SECRET.hex()[:16] not in ids


def test_a_key_in_the_environment_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: all but text ended with a UnicodeEncodeError."""
    secret = bytes(range(256 - KEY_BYTES, 256))
    monkeypatch.setitem(os.environb, b"KV_KEY", secret)
    assert read_key("env:KV_KEY").id == EncryptionKey(secret).id


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("env:CARGOHOLD_NO_SUCH_VARIABLE", "is not set"),
        ("file:/no/such/file", "cannot be read"),
        ("0123", "file:PATH or env:NAME"),
        ("env:", "file:PATH or env:NAME"),
        ("env:KV_SHORT", "no key of 32 bytes"),
        ("env:KV_NO_HEX", "no key of 32 bytes"),
        ("env:KV_HALF", "no key of 32 bytes, or 64 digits, is there; `openssl rand -hex 32` makes one"),
    ],
)
def test_keys_that_are_none_are_refused_by_name(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SHORT", "abcd")
    monkeypatch.setenv("KV_NO_HEX", "x" * 64)
    monkeypatch.setenv("KV_HALF", SECRET[:16].hex())  # was taken for 32 bytes as they are
    with pytest.raises(ConfigError, match=reason) as caught:
        read_key(source)
    assert caught.value.key == "encryption_key"


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my key"
    path.write_bytes(SECRET)
    os.chmod(path, 0o640)  # noqa: PTH101
    with pytest.raises(ConfigError, match=f"chmod 600 '{path}'"):
        read_key(f"file:{path}")


@pytest.mark.parametrize("place", [0, 8], ids=["magic", "version"])
def test_a_sound_header_of_another_kind_or_version_is_none(place: int) -> None:
    packed = Header(bytes(32), key(1), b"", 10, bytes(16), 0).pack()
    assert unpack_header(packed) is not None
    changed = flipped(packed, 8 * place)[:-8]
    assert unpack_header(changed + xxhash.xxh3_64_intdigest(changed).to_bytes(8, "little")) is None
