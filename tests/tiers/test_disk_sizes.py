"""A disk whose chunks differ in size: each takes what it needs, within one budget, over restarts and damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from cargohold.cache.retention import Retention
from cargohold.tiers import LoadOutcome, StoreOutcome
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec, Details, Header, Note, tag_of
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.files import Segment
from cargohold.tiers.disk.root import bytes_in
from cargohold.tiers.disk.slots import Links, SlotPlan, gather, runs_of
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from tests.tiers.common import NAMESPACE, codec, disk_tier, key, payload, slots_per_segment, ticking

PAGE = 4096
SIZES = (7 * PAGE - 100, 5 * PAGE, 3 * PAGE - 4000)
MAX_BYTES = 640 * 1024
NUM_KEYS = 60


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def tier_in(root: Path, *, policy: str = "lru", using: ChunkCodec | None = None) -> DiskTier:
    return disk_tier(root, MAX_BYTES, using=using, chunk_bytes=max(SIZES), chunk_sizes=SIZES, policy=policy)


def store(tier: DiskTier, number: int, parent: int | None = None) -> StoreOutcome:
    before = None if parent is None else key(parent)
    return tier.store(key(number), memoryview(payload(number, size_of(number))), before)


def load(tier: DiskTier, number: int) -> bytes | LoadOutcome:
    into = bytearray(size_of(number))
    outcome = tier.load(key(number), memoryview(into))
    return bytes(into) if outcome is LoadOutcome.LOADED else outcome


def there(tier: DiskTier, count: int = NUM_KEYS) -> list[int]:
    return [number for number, is_there in enumerate(tier.probe([key(at) for at in range(count)])) if is_there]


def headers_in(root: Path) -> list[Path]:
    return sorted(root.glob("*/segment-*.headers"))


# --- how large slots are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_slots_are_whole_pages_and_leave_little_of_a_chunk_empty(seed: int) -> None:
    dice = Random(seed)
    sizes = [dice.randint(1, 400) * dice.choice((576, 4096, 10_000)) for _ in range(dice.randint(1, 6))]
    plan = SlotPlan.of(sizes)
    taken = sum(plan.count_for(size) for size in sizes) * plan.slot_bytes
    assert plan.slot_bytes % PAGE == 0 and plan.most <= 16
    assert plan.count_for(max(sizes)) == plan.most and plan.count_for(min(sizes)) == plan.least
    assert taken <= len(sizes) * -(-max(sizes) // PAGE) * PAGE, "never more than if all were as large as the largest"


def test_chunks_of_nearly_one_size_have_a_slot_each_as_before() -> None:
    for sizes in ([10_000], [10_000, 10_000], [100 * PAGE, 99 * PAGE], [100, 3000]):
        assert SlotPlan.of(sizes) == SlotPlan(-(-max(sizes) // PAGE) * PAGE)


@pytest.mark.parametrize("seed", range(50))
def test_neighbours_are_read_and_written_together_but_not_over_the_end_of_a_file(seed: int) -> None:
    dice = Random(seed)
    per_segment = dice.randint(1, 6)
    slots = sorted(dice.sample(range(30), dice.randint(1, 12)))
    runs = list(runs_of(slots, per_segment))
    assert [slot for first, count in runs for slot in range(first, first + count)] == slots
    assert all(first // per_segment == (first + count - 1) // per_segment for first, count in runs)
    ends = [(first + count, following) for (first, count), (following, _) in pairwise(runs)]
    assert all(end != following or end % per_segment == 0 for end, following in ends)


# --- what is there ----------------------------------------------------------------------------------------------------


def spoil(random: Random, root: Path) -> None:
    """Some bytes of a file are others."""
    path = random.choice([*headers_in(root), *root.glob("*/segment-*.data")])
    with path.open("r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        file.write(random.randbytes(random.choice((1, 200))))


def step(random: Random, tier: DiskTier) -> None:
    number = random.randrange(NUM_KEYS)
    match random.randrange(6):
        case 0:
            tier.remove([key(victim) for victim in random.sample(range(NUM_KEYS), 2)])
        case 1:
            tier.touch([key(other) for other in range(number, number + 3)])
        case 2 | 3:
            found = load(tier, number)
            assert isinstance(found, LoadOutcome) or found == payload(number, size_of(number))
        case _:
            if store(tier, number, number - 3 if number % 12 > 2 else None) is StoreOutcome.STORED:
                assert load(tier, number) == payload(number, size_of(number))


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["plain", "encrypted"])
@pytest.mark.parametrize("policy", ["lru", "arc", "reuse-index"])
def test_what_is_loaded_is_right_and_what_was_there_is_there_after_a_restart(
    tmp_path: Path, policy: str, secret: bytes | None
) -> None:
    random, using, most_kept = Random(policy), codec(secret, ticking()), 0
    tier = tier_in(tmp_path, policy=policy, using=using)
    for turn in range(16):
        for _ in range(50):
            step(random, tier)
        tier.check()
        assert bytes_in(tmp_path) <= MAX_BYTES
        before = there(tier)
        most_kept = max(most_kept, len(before))
        tier.close()
        if is_spoiled := turn % 3 == 2:
            spoil(random, tmp_path)
        tier = tier_in(tmp_path, policy=policy, using=using)
        tier.check()
        assert is_spoiled or there(tier) == before
        lost = [number for number in before if load(tier, number) != payload(number, size_of(number))]
        assert len(lost) <= (2 if is_spoiled else 0), "damage costs no more than the chunks that it hits"
    tier.close()
    assert most_kept > 12


def test_after_hundreds_of_turns_as_much_is_kept_as_at_first(tmp_path: Path) -> None:
    """Prompts' chunks of all groups come and go."""
    tier = tier_in(tmp_path)
    kept = []
    for turn in range(400):
        assert store(tier, turn) is StoreOutcome.STORED
        kept.append(tier.usage())
    late = kept[-200:]
    most = late[0].capacity_bytes or 0
    assert all(usage.num_bytes + 7 / 112 * most > most for usage in late), "slots that nobody can use"
    assert min(usage.num_chunks for usage in late) > 1.3 * 112 // 7, "with slots for the largest chunk there were fewer"
    tier.close()


# --- restarts, and what is not whole ----------------------------------------------------------------------------------


def test_a_directory_whose_slots_are_as_large_as_the_largest_chunk_is_set_aside_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So an earlier version has left it."""
    for sizes in ((), SIZES, ()):
        caplog.clear()
        is_first = not any(tmp_path.iterdir())
        tier = disk_tier(tmp_path, MAX_BYTES, using=codec(), chunk_bytes=max(SIZES), chunk_sizes=sizes)
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == (not is_first) and all("they do not fit the chunks" in line for line in said)
        assert there(tier) == []
        for number in range(12):
            assert store(tier, number) is StoreOutcome.STORED
        assert all(load(tier, number) == payload(number, size_of(number)) for number in range(12))
        assert bytes_in(tmp_path) <= MAX_BYTES
        tier.close()


class Stopped(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("num_writes", range(1, 12))
def test_a_process_that_ends_while_it_writes_leaves_a_whole_chunk_or_none(
    tmp_path: Path, num_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_in(tmp_path)
    for number in range(60):  # full: what is written next lies in pieces, where others were
        store(tier, number)
    left = iter(range(num_writes))
    for name in ("write_header", "write_payload", "write_links"):
        really = getattr(Segment, name)

        def write(*args: object, really: object = really) -> None:
            if next(left, None) is None:
                raise Stopped
            really(*args)  # type: ignore[operator]  # the method

        monkeypatch.setattr(Segment, name, write)
    with suppress(Stopped):
        store(tier, 60)
    monkeypatch.undo()
    kept = there(tier)
    del tier  # as after kill -9
    again = tier_in(tmp_path)
    again.check()
    assert set(kept) <= set(there(again)), "what was not touched is there"
    found = [load(again, number) for number in range(61)]
    assert all(
        isinstance(one, LoadOutcome) or one == payload(number, size_of(number)) for number, one in enumerate(found)
    )
    assert LoadOutcome.CORRUPT not in found, "nothing half written counts"
    again.close()


@pytest.mark.parametrize(
    ("begin", "other"),
    [(0, bytes(8)), (0, bytes(4)), (0, b"\xff" * 4), (4, bytes(4))],
    ids=["none", "elsewhere", "the end", "another chunk's"],
)
@pytest.mark.parametrize("at", range(6))
def test_a_chunk_that_lacks_one_of_its_links_is_not_there_and_its_slots_are_free(
    tmp_path: Path, at: int, begin: int, other: bytes
) -> None:
    tier = tier_in(tmp_path)
    assert store(tier, 0) is StoreOutcome.STORED
    tier.close()
    with headers_in(tmp_path)[0].open("r+b") as file:
        file.seek(HEADER_BYTES * slots_per_segment(tmp_path) + 8 * at + begin)
        file.write(other)
    tier = tier_in(tmp_path)
    assert there(tier) == [] and tier.usage().num_bytes == 0
    tier.check()
    assert store(tier, 0) is StoreOutcome.STORED and load(tier, 0) == payload(0, size_of(0))
    tier.close()
    assert list(open_inventory(str(tmp_path)).verify(NAMESPACE.id, delete=False)) == [Verification.GOOD]


def links_of(header: Header, slots: Sequence[int]) -> bytes:
    tag = tag_of(header.pack())
    return b"".join(struct.pack("<II", following, tag) for following in (*slots[1:], 2**32 - 1))


def test_a_slot_is_of_one_chunk_and_a_chunk_of_no_more_slots_than_any_has() -> None:
    """Headers may be forged, or left from other chunks."""
    plan = SlotPlan(PAGE, 1, 3)
    sizes = (3 * PAGE, PAGE, 4 * PAGE)
    large, small, longer = headers = [
        Header(bytes(32), key(at), b"", size, bytes(16), 1) for at, size in enumerate(sizes)
    ]
    first_slots = (0, 1, 4)
    links = b""
    for header, first, size in zip(headers[::2], first_slots[::2], sizes[::2], strict=True):
        links += links_of(header, range(first, first + size // PAGE)) + bytes(8) * (first == 0)
    segment: Any = SimpleNamespace(read_links=lambda: links)
    whole, left = gather(zip(headers, first_slots, strict=True), Links([segment], 8), plan)
    assert whole == [(large, (0, 1, 2))] and left == [1, 4]
    assert gather([(small, 3)], Links([segment], 8), plan) == ([(small, (3,))], [])
    assert Links([segment], 8).follow(longer, 4, 4) == (4, 5, 6, 7)


def test_leases_and_tokens_of_a_chunk_in_several_slots_outlive_a_restart(tmp_path: Path) -> None:
    room = codec(details_bytes=1280)
    clock = ticking()
    for _ in range(2):
        tier = disk_tier(tmp_path, MAX_BYTES, using=room, chunk_bytes=max(SIZES), chunk_sizes=SIZES)
        for number in range(6):
            details = Details(bytes([number]) * 1000)
            note = Note(details, Retention(90, clock() / 1e9 + 3600))
            tier.store(key(number), memoryview(payload(number, size_of(number))), None, note)
        listed = tier.list_chunks(b"", 100, with_details=True)
        assert {name: found.tokens for name, found in zip(listed.keys, listed.details, strict=True)} == {
            key(number): bytes([number]) * 1000 for number in range(6)
        }
        tier.close()
    description = json.loads(next(tmp_path.glob("*/shard.json")).read_text())
    assert description["details_bytes"] < 1280, "the room is shared out over a chunk's slots"


# --- cargohold cache --------------------------------------------------------------------------------------------------


def test_cargohold_cache_counts_chunks_verifies_all_of_each_and_makes_room(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    for number in range(12):
        store(tier, number)
    tier.close()
    inventory = open_inventory(str(tmp_path))
    (holding,) = inventory.holdings()
    taken = sum(-(-size_of(number) // PAGE) * PAGE for number in range(12))
    assert holding.num_chunks == 12 and holding.num_bytes >= taken
    assert list(inventory.verify(holding.id, delete=False)) == [Verification.GOOD] * 12
    data = min(tmp_path.glob("*/segment-*.data"))
    with data.open("r+b") as file:
        file.seek(3 * PAGE)  # in the middle of the first chunk
        file.write(b"damage")
    assert sorted(finding.value for finding in inventory.verify(holding.id, delete=True)) == ["damaged", *["good"] * 11]
    assert inventory.trim(holding.id, 9 * PAGE) >= 9 * PAGE
    tier = tier_in(tmp_path)
    kept = there(tier)
    assert 8 <= len(kept) <= 10
    assert all(load(tier, number) == payload(number, size_of(number)) for number in kept)
    tier.close()
