"""A restart does not forget what was used last, whatever becomes of the files that say so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.tiers import StoreOutcome
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk import slot_index as recovery
from tests.tiers.common import codec, disk_tier, key, load, payload, ticking

NUM_CHUNKS = 60
USED = list(range(0, NUM_CHUNKS, 3))


class SteppingTime:
    """A time of day that moves when told to, and a nanosecond with every look."""

    def __init__(self) -> None:
        self.ns = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.ns += 1
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


def open_tier(directory: Path, time_ns: Callable[[], int], policy: str = "lru") -> DiskTier:
    return disk_tier(directory, "1MiB", using=codec(time_ns=time_ns), policy=policy)


def store(tier: DiskTier, numbers: range) -> None:
    for number in numbers:
        assert tier.store(key(number), memoryview(payload(number))) is StoreOutcome.STORED


def present(tier: DiskTier, numbers: list[int]) -> list[int]:
    return [number for number, is_there in zip(numbers, tier.probe([key(n) for n in numbers]), strict=True) if is_there]


def store_and_use(tier: DiskTier) -> None:
    store(tier, range(NUM_CHUNKS))
    for number in reversed(USED):
        tier.touch([key(number)])


def test_what_was_used_last_stays_after_a_restart(tmp_path: Path) -> None:
    time_ns = ticking()
    tier = open_tier(tmp_path, time_ns)
    store_and_use(tier)
    capacity = tier.usage().capacity_bytes or 0
    num_slots = NUM_CHUNKS * capacity // tier.usage().num_bytes
    tier.close()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(100, 100 + num_slots - 10))  # all but ten of the old ones make room
    assert present(tier, list(range(NUM_CHUNKS))) == USED[:10], "the last that were used"
    tier.check()


def test_what_was_stored_after_a_use_is_newer(tmp_path: Path) -> None:
    time_ns = ticking()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(30))
    tier.touch([key(number) for number in range(10)])
    store(tier, range(30, NUM_CHUNKS))
    num_slots = NUM_CHUNKS * (tier.usage().capacity_bytes or 0) // tier.usage().num_bytes
    tier.close()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(100, 100 + num_slots - 35))
    assert present(tier, list(range(NUM_CHUNKS))) == [*range(5), *range(30, NUM_CHUNKS)], "of the used, the first stay"
    store(tier, range(200, 205))
    assert present(tier, list(range(NUM_CHUNKS))) == list(range(30, NUM_CHUNKS))


def test_a_process_that_is_killed_loses_the_uses_of_some_seconds(tmp_path: Path) -> None:
    time_ns = SteppingTime()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(NUM_CHUNKS))
    tier.touch([key(0)])
    time_ns.advance(1)
    tier.touch([key(1)])
    time_ns.advance(10)
    tier.touch([key(2)])
    tier.touch([key(3)])
    saved = {file: file.read_bytes() for file in tmp_path.glob("*/*.uses")}
    num_slots = NUM_CHUNKS * (tier.usage().capacity_bytes or 0) // tier.usage().num_bytes
    tier.close()
    for file, data in saved.items():
        file.write_bytes(data)  # as it was without the end
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(100, 100 + num_slots - 3))
    assert present(tier, list(range(NUM_CHUNKS))) == [0, 1, 2]


def test_a_new_chunk_in_the_slot_of_another_does_not_inherit_its_uses(tmp_path: Path) -> None:
    time_ns = ticking()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(NUM_CHUNKS))
    num_slots = NUM_CHUNKS * (tier.usage().capacity_bytes or 0) // tier.usage().num_bytes
    tier.touch([key(0)])
    tier.remove([key(0)])
    store(tier, range(60, 61))  # in the same slot: it was the last to become free
    tier.touch([key(number) for number in range(1, NUM_CHUNKS)])
    tier.close()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(100, 100 + num_slots - NUM_CHUNKS + 1))
    assert present(tier, [59, 60]) == [59]


@pytest.mark.parametrize("damage", ["random", "short", "gone", "future"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nonsense_about_uses_costs_no_chunk(tmp_path: Path, damage: str, policy: str) -> None:
    time_ns = ticking()
    tier = open_tier(tmp_path, time_ns, policy)
    store_and_use(tier)
    tier.close()
    files = list(tmp_path.glob("*/*.uses"))
    assert files
    for file in files:
        size = file.stat().st_size
        match damage:
            case "random":
                file.write_bytes(os.urandom(size))
            case "short":
                file.write_bytes(file.read_bytes()[:13])
            case "gone":
                file.unlink()
            case "future":
                file.write_bytes((2**63 - 1).to_bytes(8, "little") * (size // 8))
    tier = open_tier(tmp_path, time_ns, policy)
    tier.check()
    assert [load(tier, number) for number in range(NUM_CHUNKS)] == [payload(number) for number in range(NUM_CHUNKS)]
    tier.touch([key(1)])
    tier.close()
    assert present(open_tier(tmp_path, time_ns, policy), list(range(NUM_CHUNKS))) == list(range(NUM_CHUNKS))


def test_a_use_in_the_future_is_none(tmp_path: Path) -> None:
    time_ns = ticking()
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(NUM_CHUNKS))
    num_slots = NUM_CHUNKS * (tier.usage().capacity_bytes or 0) // tier.usage().num_bytes
    tier.close()
    for file in tmp_path.glob("*/segment-00000.uses"):
        file.write_bytes((time_ns() + 10**15).to_bytes(8, "little"))
    tier = open_tier(tmp_path, time_ns)
    store(tier, range(100, 100 + num_slots - NUM_CHUNKS + 1))
    assert present(tier, list(range(NUM_CHUNKS))) == list(range(1, NUM_CHUNKS))


def test_very_many_uses_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_MOST_USES", 7)
    test_what_was_used_last_stays_after_a_restart(tmp_path)


def test_a_disk_that_takes_no_uses_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path, ticking())
    store(tier, range(3))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    tier.touch([key(1)])
    assert "cannot save which chunks were used last" in caplog.text
    assert load(tier, 1) == payload(1)
    tier.close()


def test_a_disk_that_takes_no_uses_does_not_fill_the_log_and_has_them_when_it_takes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by review: 8640 warnings a day. And what was used meanwhile was saved only if it was used again."""
    time = SteppingTime()
    tier = open_tier(tmp_path, time)
    store(tier, range(3))

    def fail(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for _ in range(1000):
            time.advance(10.0)
            tier.touch([key(0)])
    assert caplog.text.count("cannot save which chunks were used last") == 7 + 7, "8, 16, ... and 512"
    tier.close()
    tier = open_tier(tmp_path, time)
    assert tier._uses.snapshot()[0] > time.ns - 10**9, "closing has saved it"
