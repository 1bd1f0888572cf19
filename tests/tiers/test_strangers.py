"""What somebody can do who may write to a tier's medium: everything he leaves there ends in a miss or a clear error.

Without encryption he can plant KV, as the documentation says; that is no subject of tests.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cargohold.cache.policies import find_policy
from cargohold.errors import ConfigError, TierError
from cargohold.tiers import LoadOutcome, StoreOutcome, Tier
from cargohold.tiers.chunk_format import HEADER_BYTES, Header, tag_of, unpack_header
from cargohold.tiers.disk.files import Segment
from cargohold.tiers.disk.slot_index import SlotIndex, restore_index
from cargohold.tiers.disk.slots import Links, SlotPlan
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from tests.tiers.common import CHUNK, NAMESPACE, codec, disk_tier, in_thread, key, load, payload, shared_tier

SECRET = bytes(range(32))
WAIT_S = 20.0
GIB = 1024**3


def fill(tier: Tier, count: int) -> None:
    for number in range(count):
        parent = key(number - 1) if number else None
        assert tier.store(key(number), memoryview(payload(number)), parent) is StoreOutcome.STORED


def shard_of(root: Path, secret: bytes | None = None) -> Path:
    return root / codec(secret).namespace.id


def directory_tier(root: Path, secret: bytes | None = None, max_bytes: int | None = None) -> Tier:
    return shared_tier(f"file://{root}", codec(secret), CHUNK, max_bytes=max_bytes)


def in_time(action: Callable[[], object]) -> None:
    """Do something that might never end."""
    in_thread(action, WAIT_S, "it hangs")


def rewrite_header(headers: Path, slot: int, **changes: object) -> None:
    with headers.open("r+b") as file:
        file.seek(slot * HEADER_BYTES)
        found = unpack_header(file.read(HEADER_BYTES))
        assert found is not None
        file.seek(slot * HEADER_BYTES)
        file.write(replace(found, **changes).pack())  # type: ignore[arg-type]  # by name


# --- with encryption --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forge", "expected"),
    [
        (lambda own, other: other, LoadOutcome.CORRUPT),
        (lambda own, other: renamed(other, key=key(1)), LoadOutcome.CORRUPT),
        (lambda own, other: renamed(own, nonce=b"", tag=b""), LoadOutcome.CORRUPT),
        (lambda own, other: renamed(own, num_bytes=2**63), LoadOutcome.CORRUPT),
        (lambda own, other: own[:-1], LoadOutcome.CORRUPT),
        (lambda own, other: own + b"x", LoadOutcome.CORRUPT),
        (lambda own, other: b"", LoadOutcome.CORRUPT),
        (lambda own, other: renamed(own, parent=key(9), stored_ns=2**64 - 1), payload(1)),
    ],
    ids=[
        "another",
        "another by this name",
        "as if plain",
        "length",
        "shorter",
        "longer",
        "nothing",
        "what decides nothing",
    ],
)
def test_an_encrypted_chunk_is_the_one_that_was_stored_under_its_key(
    tmp_path: Path, forge: Callable[[bytes, bytes], bytes], expected: object
) -> None:
    tier = directory_tier(tmp_path, SECRET)
    fill(tier, 3)
    first, second = (next(tmp_path.glob(f"*/*/{key(number).hex()}")) for number in (1, 2))
    first.write_bytes(forge(first.read_bytes(), second.read_bytes()))
    assert load(tier, 1) == expected


def renamed(value: bytes, **changes: object) -> bytes:
    header = unpack_header(value[:HEADER_BYTES])
    assert header is not None
    return replace(header, **changes).pack() + value[HEADER_BYTES:]  # type: ignore[arg-type]  # by name


def test_an_old_value_of_a_chunk_is_as_good_as_a_new_one(tmp_path: Path) -> None:
    tier = directory_tier(tmp_path, SECRET)
    fill(tier, 1)
    (path,) = tmp_path.glob(f"*/*/{key(0).hex()}")
    old = path.read_bytes()
    tier.remove([key(0)])
    fill(tier, 1)
    assert path.read_bytes()[HEADER_BYTES:] != old[HEADER_BYTES:], "never the same nonce"
    path.write_bytes(old)
    assert load(tier, 0) == payload(0)


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("cycle", [1, 2])
def test_a_chunk_that_says_it_is_its_own_ancestor_hangs_nobody(
    tmp_path: Path, cycle: int, secret: bytes | None
) -> None:
    """Found by forging: the walk along the prefix never ended, and took all memory."""
    tier = disk_tier(tmp_path, using=codec(secret))
    fill(tier, 3)
    tier.close()
    (headers,) = tmp_path.glob("*/segment-00000.headers")
    rewrite_header(headers, 3 - cycle, parent=key(2))
    tier = disk_tier(tmp_path, using=codec(secret))
    for number in range(100, 150):  # so that a child makes its prefix count as used again
        tier.store(key(number), memoryview(payload(number)))
    in_time(lambda: tier.store(key(3), memoryview(payload(3)), key(2)))
    assert load(tier, 3) == payload(3)
    tier.check()


KEYS = st.sampled_from([key(number) for number in range(6)])
FORGED = st.builds(
    Header,
    namespace=st.sampled_from([codec().namespace.digest] * 4 + [bytes(32)]),
    key=st.one_of(KEYS, KEYS, KEYS, st.binary(min_size=1, max_size=64)),
    parent=st.one_of(KEYS, st.binary(max_size=64)),
    num_bytes=st.one_of(st.integers(0, 3 * CHUNK), st.integers(0, 2**64 - 1)),
    checksum=st.just(bytes(16)),
    stored_ns=st.one_of(st.just(7), st.integers(0, 50), st.integers(0, 2**64 - 1)),
).map(Header.pack)
SPOILED = st.tuples(FORGED, st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)).map(
    lambda drawn: drawn[0][: drawn[1]] + bytes([drawn[2]]) + drawn[0][drawn[1] + 1 :]
)


def forged(number: int) -> bytes:
    return Header(codec().namespace.digest, key(number), key(0), 0, bytes(16), 7).pack()


class Linked(Segment):
    """A segment of which only the links are read."""

    def __init__(self, links: bytes) -> None:
        self._of_all = links

    def read_links(self) -> bytes:
        return self._of_all


@pytest.mark.parametrize("plan", [SlotPlan(CHUNK), SlotPlan(CHUNK, 1, 3), SlotPlan(CHUNK, 2, 3)], ids=str)
@pytest.mark.parametrize("policy", ["lru", "fifo", "arc", "reuse-index"])
@example(
    # The second header's chunk has the slot of the third, and is there twice: both reasons to wipe that slot.
    found=[forged(1), forged(1), forged(0)],
    uses=[0] * 12,
    linked=[(2, 0), (3, 0), (2**32 - 1, 0), (2**32 - 1, 0), (0, 0)] + [(2**32 - 1, 0)] * 7,
)
@given(
    found=st.lists(st.one_of(FORGED, SPOILED, st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)), max_size=12),
    uses=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=12, max_size=12),
    linked=st.lists(
        st.tuples(st.one_of(st.integers(0, 12), st.just(2**32 - 1)), st.integers(0, 11)), min_size=12, max_size=12
    ),
)
def test_whatever_headers_say_an_engine_starts_and_goes_on(
    policy: str, plan: SlotPlan, found: list[bytes], uses: list[int], linked: list[tuple[int, int]]
) -> None:
    """Found by forging: with the policy ``reuse-index``, a key of another length ended the start."""
    index = SlotIndex(12, find_policy(policy), plan)
    index.add_slots(12)
    tags = [tag_of(header) for header in found] or [0]
    links = b"".join(struct.pack("<II", at, tags[whose % len(tags)]) for at, whose in linked)
    bad = restore_index(
        index, [b"".join(found)], Links([Linked(links)], 12), np.array(uses, dtype=np.int64), codec(), plan
    )
    assert len(bad) + index.num_ready <= len(found)
    index.check()
    known = [header.key for data in found if (header := unpack_header(data)) and index.contains(header.key)]
    if {len(name) for name in known} <= {len(key(0))}:
        for number in range(6, 40):
            slot = index.reserve(key(number), key(number % 7), plan.count_for(number % 4 * CHUNK))
            if isinstance(slot, int):
                index.commit(slot)
        index.check()


def test_headers_with_impossible_keys_are_none() -> None:
    import xxhash  # noqa: PLC0415  # for this alone

    packed = bytearray(Header(bytes(32), key(1), key(0), 10, bytes(16), 0).pack())
    for place, lengths in ((62, (0, 65, 255)), (127, (65, 255))):
        for length in lengths:
            forged = packed.copy()
            forged[place] = length
            check = xxhash.xxh3_64_intdigest(bytes(forged[:-8])).to_bytes(8, "little")
            assert unpack_header(bytes(forged[:-8]) + check) is None, (place, length)


# --- files and links --------------------------------------------------------------------------------------------------


def nested(path: Path) -> None:
    path.write_text("[" * 10 * sys.getrecursionlimit())


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 * GIB)


def text(path: Path) -> None:
    path.write_bytes(b'{"namespace": {"label": "\xff"}}')


@pytest.mark.parametrize("spoil", [nested, pipe, huge, text])
@pytest.mark.parametrize("whose", ["own", "another's"])
def test_whatever_a_description_says_an_engine_starts(
    tmp_path: Path, spoil: Callable[[Path], None], whose: str
) -> None:
    """Found by forging: ``RecursionError``, ``MemoryError``, or a start that never ended."""
    disk_tier(tmp_path).close()
    place = shard_of(tmp_path) if whose == "own" else tmp_path / ("0" * 32)
    place.mkdir(exist_ok=True)
    spoil(place / "shard.json")

    def look_and_start() -> None:
        assert place.name in {holding.id for holding in open_inventory(str(tmp_path)).holdings()}
        fill(disk_tier(tmp_path), 3)

    in_time(look_and_start)


@pytest.mark.parametrize("spoil", [nested, huge, text])
def test_whatever_the_description_in_a_shared_directory_says_it_is_listed(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    tier = directory_tier(tmp_path)
    fill(tier, 2)
    (description,) = tmp_path.glob("*/namespace.json")
    spoil(description)
    (holding,) = open_inventory(f"file://{tmp_path}").holdings()
    assert (holding.num_chunks, holding.facts) == (2, {})


LINKS = ["shard.json", "shard.json.new", "lock", "segment-00000.data", "segment-00000.headers", "segment-00000.uses"]


@pytest.mark.parametrize("name", [*LINKS, "../.lock"])
def test_nothing_is_written_through_links(tmp_path: Path, name: str) -> None:
    """Found by forging: a link in place of one of its files made an engine write to any other file of its user."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    root = tmp_path / "kv"
    shard_of(root).mkdir(parents=True)
    (shard_of(root) / name).symlink_to(precious)
    (root / ("f" * 32)).mkdir()
    with suppress(ConfigError, TierError):
        fill(disk_tier(root), 3)
    assert precious.read_text() == "mine"


def test_nothing_is_made_where_a_link_leads(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    (root / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"\.lock is not a regular file"):
        disk_tier(root)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["lock", "segment-00000.headers"])
def test_at_a_pipe_nobody_waits(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Found by forging: who opens one to read waits until somebody opens it to write."""
    other = tmp_path / ("0" * 32)
    other.mkdir()
    os.mkfifo(other / name)
    (other / "segment-00000.data").write_bytes(bytes(2 * 1024**2))

    def look_and_start() -> None:
        (holding,) = open_inventory(str(tmp_path)).holdings()
        assert holding.remark.startswith(f"{other / name} is not a regular file")
        assert (holding.num_chunks, holding.is_in_use) == ((0, True) if name == "lock" else (None, False))
        disk_tier(tmp_path)

    in_time(look_and_start)
    assert other.exists() == (name == "lock"), "who knows whether somebody uses it"
    told = f"{other} cannot be deleted to make room: {other / 'lock'} is not a regular file"
    assert (told in caplog.text) == (name == "lock")


def test_a_number_that_is_none_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    disk_tier(tmp_path).close()
    (shard_of(tmp_path) / "segment-\N{SUPERSCRIPT TWO}.data").write_text("")
    fill(disk_tier(tmp_path), 3)


@pytest.mark.parametrize("at", ["namespace", "folder"])
def test_nothing_is_deleted_where_links_lead(tmp_path: Path, at: str) -> None:
    """Found by forging: the objects of a git repository are called as chunks are."""
    foreign = tmp_path / "repository" / "objects" / "ab" / ("cd" * 19)
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(5 * CHUNK))
    os.utime(foreign, (1, 1))
    root = tmp_path / "kv"
    place = root / ("0" * 32)
    if at == "namespace":
        root.mkdir()
        place.symlink_to(foreign.parent.parent)
    else:
        place.mkdir(parents=True)
        (place / "ab").symlink_to(foreign.parent)
    tier = directory_tier(root, max_bytes=5 * CHUNK)
    fill(tier, 6)
    inventory = open_inventory(f"file://{root}")
    inventory.trim(place.name, 1)
    inventory.remove(place.name)
    assert foreign.exists()
    assert load(tier, 5) == payload(5)


# --- any bytes --------------------------------------------------------------------------------------------------------


def spoiled(random: Random, data: bytes) -> bytes:
    """Bits flipped, bytes put in, taken out, cut off or repeated."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 2, 20])):
        at, other = (random.randrange(len(changed) + 1) for _ in range(2))
        what = random.randrange(5)
        if what == 0 and changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
        elif what == 1:
            changed[at:at] = random.randbytes(random.randrange(300))
        elif what == 2:
            changed[at : at + 8] = random.choice([bytes(8), b"\xff" * 8, b"[[[[{{{{", b"99999999"])
        elif what == 3:
            changed[at : at + 200] = changed[other : other + 200]
        else:
            del changed[at : at + random.choice([1, 300, len(changed)])]
    return bytes(changed)


@pytest.mark.parametrize("kind", ["disk", "directory"])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_files_hold_is_a_chunk_or_a_miss(tmp_path: Path, kind: str, seed: int) -> None:
    random = Random(seed)
    secret = random.choice([None, SECRET])
    policy = random.choice(["lru", "fifo", "arc", "reuse-index"])

    def open_tier() -> Tier:
        if kind == "disk":
            return disk_tier(tmp_path, using=codec(secret), policy=policy)
        return directory_tier(tmp_path, secret, max_bytes=1024**2)

    first = open_tier()
    fill(first, 6)
    first.touch([key(1)])
    first.close()
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file() and random.random() < 0.5:
            path.write_bytes(spoiled(random, path.read_bytes()))
    inventory = open_inventory(str(tmp_path) if kind == "disk" else f"file://{tmp_path}")
    for holding in inventory.holdings():
        with suppress(TierError):  # it says so if nothing can be verified
            assert set(inventory.verify(holding.id, delete=False)) <= set(Verification)
    again = open_tier()
    for number in range(6):
        assert load(again, number) in {payload(number), LoadOutcome.ABSENT, LoadOutcome.CORRUPT}
        assert again.store(key(number), memoryview(payload(number))) is not StoreOutcome.REFUSED
        assert load(again, number) == payload(number)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_a_value_larger_than_any_chunk_is_not_fetched(tmp_path: Path) -> None:
    """Found by forging: it was read into memory whatever its size."""
    tier = directory_tier(tmp_path)
    fill(tier, 2)
    (path,) = tmp_path.glob(f"*/*/{key(0).hex()}")
    with path.open("r+b") as file:
        file.truncate(1000 * GIB)
    in_time(lambda: check_corrupt(tier))
    assert not path.exists() and load(tier, 1) == payload(1)


def check_corrupt(tier: Tier) -> None:
    assert load(tier, 0) is LoadOutcome.CORRUPT


def test_a_look_at_chunks_takes_memory_for_a_piece_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by forging: a slot as large as somebody says was read at once."""
    monkeypatch.setattr("cargohold.tiers.disk.inventory.PIECE_BYTES", 4096)
    sizes = []
    really_read = os.preadv

    def read(file: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return really_read(file, buffers, offset)

    fill(disk_tier(tmp_path, using=codec()), 3)
    monkeypatch.setattr(os, "preadv", read)
    findings = list(open_inventory(str(tmp_path)).verify(NAMESPACE.id, delete=False))
    assert findings == [Verification.GOOD] * 3
    assert len(sizes) == 3 * 3 and max(sizes) <= 4096
    description = json.loads((shard_of(tmp_path) / "shard.json").read_text())
    assert description["slot_bytes"] > 2 * 4096


# --- whose directory it is --------------------------------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody can reach."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def told(caplog: pytest.LogCaptureFixture, open_tier: Callable[[Path], Tier], root: Path) -> list[str]:
    """What is said when a tier is opened there."""
    caplog.clear()
    open_tier(root).close()
    return [record.getMessage() for record in caplog.records if "set encryption_key" in record.getMessage()]


PLAIN: dict[str, Callable[[Path], Tier]] = {"disk": disk_tier, "directory": directory_tier}
ENCRYPTED: dict[str, Callable[[Path], Tier]] = {
    "disk": lambda root: disk_tier(root, using=codec(SECRET)),
    "directory": lambda root: directory_tier(root, SECRET),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_directory_that_everybody_can_write_to_is_told_at_the_start(
    public: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: nothing was said, and whoever made the directory could read and replace all KV."""
    root = public / "kv"
    root.mkdir()
    for mode in (0o700, 0o770, 0o1777):
        root.chmod(mode)
        assert not [line for line in told(caplog, PLAIN[kind], root) if "can be written by everyone" in line], oct(mode)
    root.chmod(0o777)
    (line,) = (line for line in told(caplog, PLAIN[kind], root) if "can be written by everyone" in line)
    assert str(root) in line and "chmod 700" in line
    assert told(caplog, ENCRYPTED[kind], root) == []
    public.chmod(0o700)
    assert told(caplog, PLAIN[kind], root) == [], "nobody else gets there"


@pytest.mark.parametrize("kind", PLAIN)
def test_what_everybody_can_write_to_within_the_directory_is_told(
    public: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(caplog, PLAIN[kind], public / "kv") == []
    (public / "kv").chmod(0o711)
    shard_of(public / "kv").chmod(0o777)
    lines = [line for line in told(caplog, PLAIN[kind], public / "kv") if "can be written by everyone" in line]
    assert len(lines) == 1 and str(shard_of(public / "kv")) in lines[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
def test_a_directory_of_another_user_is_told_at_the_start(public: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in (public, shard_of(public)):
        assert told(caplog, PLAIN["disk"], public) == []
        os.chown(place, 12345, -1)
        (line,) = told(caplog, PLAIN["disk"], public)
        assert f"{place} belongs to user 12345" in line
        assert told(caplog, ENCRYPTED["disk"], public) == []
        os.chown(place, 0, -1)
    os.chown(public, 12345, -1)
    (shard_of(public) / "shard.json").unlink()
    assert told(caplog, PLAIN["directory"], public) == [], "engines of several users share it"


def test_a_shared_directory_that_everybody_can_read_is_told_at_the_start(
    public: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: chunks had the rights that the process gives files, mostly all to read."""
    root = public / "kv"
    root.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        (line,) = told(caplog, PLAIN["directory"], root)
        assert f"{root} can be read by everyone" in line
        root.chmod(0o750)
        assert told(caplog, PLAIN["directory"], root) == []
        root.chmod(0o755)
        os.umask(0o077)
        shutil.rmtree(shard_of(root))
        assert told(caplog, PLAIN["directory"], root) == []
    finally:
        os.umask(before)
