"""The format of stored chunks, fixed byte by byte: other versions, and engines on other machines, read what one has written."""

from __future__ import annotations

import os
from array import array
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache.retention import HELD, NO_RETENTION, NORMAL, Retention
from cargohold.tiers import LoadOutcome, Namespace
from cargohold.tiers.chunk_format import (
    HEADER_BYTES,
    MAX_DETAILS_BYTES,
    TOKEN_TYPE,
    ChunkCodec,
    Details,
    Header,
    Note,
    details_check,
    pack_tokens,
    room_for_details,
    unpack_header,
    unpack_tokens,
)
from cargohold.tiers.encryption import EncryptionKey
from cargohold.tiers.inventory import Verification, check_value
from tests.tiers.common import disk_tier, load, payload, shared_tier

NAMESPACE = Namespace("any", "w", "c", "bfloat16", "l", "rank 0 of 1", details_bytes=512)
SECRET = bytes(range(32))
PARENT, KEY, OTHER_KEY = (bytes(range(first, first + 32)) + bytes(4) for first in (0, 32, 64))
RAISED = Retention(80, 1_900_000_000.0, b"tenant-7")
DETAILS = Details(pack_tokens(array(TOKEN_TYPE, (1, 2, 128_255))), b"\x80")

MAGIC_VERSION = "9343484b560d0a1a0200"
KEYS = (
    "24202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f00000000" + 28 * "00" +
    "24000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000000" + 28 * "00"
)  # fmt: skip  # as the table in chunk_format.py
PLAIN = (
    MAGIC_VERSION + "0000500074656e616e742d370700000000000000"
    "8938f79513c3a672f15fce3ff82df2b66470e293555eda857d9bd68cb48b50fd" + KEYS +
    28 * "00" + "f3d6e72eb800dea99613f8bbf13ce4e50000b49376e2fa1800b33f710b1e32083f9d7131"
)  # fmt: skip
PLAIN_DETAILS = "3d00000003000000" + 32 * "00" + "0100000002000000fff4010080b85213aae51ec452"
SEALED = (
    MAGIC_VERSION + "0100500074656e616e742d370700000000000000"
    "d1ceba4c7a4b6a9eba90f5869f15fcf9b27a43b31e07aa4bebd8f9c44220f918" + KEYS +
    "6465666768696a6b6c6d6e6f52649a59cf67acb150d080f9e0996ecf9508d0433098ac2f29ec2e5357b8e9c1"
    "0000b49376e2fa1800b33f71fb2b5c14ab0fff90"
)  # fmt: skip
SEALED_DETAILS = (
    "3d000000030000006465666768696a6b6c6d6e6fa8eaa912f1b9b51ef179bf9ff8a8dadc0000000"
    "00ff3d28e26d0dc0b3ae09000bd39353759c2a589cf"
)  # fmt: skip


def codec(secret: bytes | None = None, **changes: int) -> ChunkCodec:
    key = None if secret is None else EncryptionKey(secret)
    return ChunkCodec(replace(NAMESPACE, **changes), key, lambda: 1_800_000_000_000_000_000)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("secret", "header", "body", "details"),
    [(None, PLAIN, b"payload".hex(), PLAIN_DETAILS), (SECRET, SEALED, "8f053123377aa4", SEALED_DETAILS)],
    ids=["plain", "encrypted"],
)
def test_stored_bytes_are_those_of_the_documented_format(
    monkeypatch: pytest.MonkeyPatch, secret: bytes | None, header: str, body: str, details: str
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(100, 100 + count)))
    using = codec(secret)
    packed, encoded = using.encode(KEY, memoryview(b"payload"), PARENT, RAISED)
    assert (packed.hex(), encoded.hex()) == (header, body)
    assert using.encode_details(KEY, DETAILS).hex() == details


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_bytes_written_by_this_format_are_read_for_ever(secret: bytes | None) -> None:
    using, data = codec(secret), bytes.fromhex(SEALED if secret else PLAIN)
    header = using.header_of(data, KEY, len(b"payload"))
    assert header is not None and (header.parent, header.retention) == (PARENT, RAISED)
    into = memoryview(bytearray(7))
    body = using.body_for(header, into)
    body.view[:] = bytes.fromhex("8f053123377aa4") if secret else b"payload"
    assert using.decode(header, KEY, body, into) and bytes(into) == b"payload"
    assert using.decode_details(KEY, bytes.fromhex(SEALED_DETAILS if secret else PLAIN_DETAILS)) == DETAILS


def test_chunks_of_the_format_before_are_misses() -> None:
    """They have the version in the same place, and lie in namespaces of other names."""
    assert unpack_header(bytes.fromhex(PLAIN.replace(MAGIC_VERSION, "9343484b560d0a1a0100"))) is None
    assert NAMESPACE.describe()["format"] == "2"


@given(level=st.integers(0, HELD), until=st.integers(1, 2**32 - 1), tenant=st.binary(min_size=8, max_size=8))
def test_what_hints_ask_comes_back_as_it_was(level: int, until: int, tenant: bytes) -> None:
    asked = Retention(level, float(until) if level > NORMAL else inf, tenant) if level != NORMAL else NO_RETENTION
    header = unpack_header(Header(bytes(32), KEY, b"", 10, bytes(16), 0, retention=asked).pack())
    assert header is not None and header.retention == asked


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=120).map(tuple), extras=st.binary(max_size=20), data=st.data()
)
def test_details_come_back_as_they_were_or_not_at_all(
    secret: bytes | None, tokens: tuple[int, ...], extras: bytes, data: st.DataObject
) -> None:
    using, packed = codec(secret, details_bytes=600), pack_tokens(array(TOKEN_TYPE, tokens))
    assert tuple(unpack_tokens(packed)) == tokens
    stored = using.encode_details(KEY, Details(packed, extras))
    assert len(stored) <= 600
    if not tokens and not extras:
        assert stored == b"", "nothing costs nothing"
        return
    assert using.decode_details(KEY, stored) == Details(packed, extras)
    assert using.decode_details(KEY, stored + bytes(100)) == Details(packed, extras), "as in a table"
    assert using.decode_details(OTHER_KEY, stored) is None, "an earlier chunk's, in the same place"
    assert codec(bytes(32)).decode_details(KEY, stored) is None
    changed = bytearray(stored)
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    assert using.decode_details(KEY, changed) is None
    assert using.decode_details(KEY, stored[: data.draw(st.integers(0, len(stored) - 1))]) is None


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_room_for_details_suffices_for_the_tokens_and_hashes_of_a_chunk(num_tokens: int, num_blocks: int) -> None:
    room = room_for_details(num_tokens, num_blocks)
    stored = codec(details_bytes=room).encode_details(KEY, Details(bytes(4 * num_tokens), bytes(36 * num_blocks)))
    assert room % 256 == 0 and len(stored) <= room <= MAX_DETAILS_BYTES
    assert stored or room == MAX_DETAILS_BYTES


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4])
def test_the_number_of_tokens_in_encrypted_details_cannot_be_changed(num_tokens: int) -> None:
    using = codec(SECRET)
    changed = bytearray(using.encode_details(KEY, DETAILS))
    changed[4:8] = num_tokens.to_bytes(4, "little")
    changed[-8:] = details_check(using.namespace.digest, KEY, bytes(changed[:-8])).to_bytes(
        8, "little"
    )  # as anybody could
    assert using.decode_details(KEY, changed) is None


def test_details_without_room_are_left_out() -> None:
    assert codec(details_bytes=0).encode_details(KEY, DETAILS) == b""
    assert codec(details_bytes=len(PLAIN_DETAILS) // 2 - 1).encode_details(KEY, DETAILS) == b""


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_a_value_with_details_is_a_chunk_and_one_with_other_bytes_behind_it_is_damaged(
    tmp_path: Path, secret: bytes | None
) -> None:
    using, number = codec(secret), 5
    tier = shared_tier(f"file://{tmp_path}", using, 200)
    chunk = number.to_bytes(32, "big") + bytes(4)
    tier.store(chunk, memoryview(payload(number, 200)))
    (file,) = tmp_path.glob(f"*/*/{chunk.hex()}")
    value = file.read_bytes()
    own, foreign = (using.encode_details(key, DETAILS) for key in (chunk, OTHER_KEY))
    for behind, is_good in ((own, True), (foreign, False), (own + b"\0", False), (b"\0", False), (own[:-1], False)):
        file.write_bytes(value + behind)
        pieces = [memoryview(value + behind)[at : at + 256] for at in range(0, len(value + behind), 256)]
        found = check_value(pieces, using.namespace.id, chunk)
        assert found is (Verification.GOOD if is_good else Verification.DAMAGED)
        assert load(tier, number, 200) == (payload(number, 200) if is_good else LoadOutcome.CORRUPT)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_what_is_known_of_a_chunk_is_stored_behind_a_value(tmp_path: Path, secret: bytes | None) -> None:
    using, number = codec(secret), 5
    tier = shared_tier(f"file://{tmp_path}", using, 200)
    chunk = number.to_bytes(32, "big") + bytes(4)
    tier.store(
        chunk, memoryview(payload(number, 200)), None, Note(DETAILS, Retention(80, 100_000_000.5, RAISED.tenant))
    )
    (file,) = tmp_path.glob(f"*/*/{chunk.hex()}")
    value = file.read_bytes()
    header = unpack_header(value[:HEADER_BYTES])
    assert header is not None and header.retention == RAISED
    assert using.decode_details(chunk, value[HEADER_BYTES + 200 :]) == DETAILS
    assert (DETAILS.tokens in value) is (secret is None)
    assert load(tier, number, 200) == payload(number, 200)
    assert check_value([memoryview(value)], using.namespace.id, chunk) is Verification.GOOD
    assert tier.usage().num_bytes == len(value)


def test_a_disk_keeps_room_for_details_and_loads_as_without(tmp_path: Path) -> None:
    for room in (256, 512):
        tier = disk_tier(tmp_path, using=codec(details_bytes=room), chunk_bytes=200)
        tier.store(KEY, memoryview(payload(1, 200)))
        tier.close()
        tier = disk_tier(tmp_path, using=codec(details_bytes=room), chunk_bytes=200)
        into = bytearray(200)
        assert tier.load(KEY, memoryview(into)) is LoadOutcome.LOADED and bytes(into) == payload(1, 200)
        tier.check()
        tier.close()
