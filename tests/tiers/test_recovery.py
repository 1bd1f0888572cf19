"""What the headers of all slots say after a restart: which chunks are there, and in which order the policy hears of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cargohold.cache.policies import find_policy
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.disk import slot_index as recovery
from cargohold.tiers.disk.slot_index import SlotIndex, restore_index
from cargohold.tiers.disk.slots import Links, SlotPlan
from tests.tiers.common import CHUNK, codec, key, payload

FREE = bytes(HEADER_BYTES)


class Watched(SlotIndex):
    """Notes what it is told."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, find_policy("lru"))
        self.add_slots(capacity)
        self.told: list[tuple[str, list[bytes]]] = []

    def restore(self, keys: Sequence[bytes], places: Sequence[tuple[int, ...]], parent: bytes) -> None:
        self.told.append(("stored", list(keys)))
        super().restore(keys, places, parent)

    def touch(self, keys: Sequence[bytes]) -> list[int]:
        self.told.append(("used", list(keys)))
        return super().touch(keys)


def header(number: int, stored_ns: int, parent: int | None = None, weights: str = "w") -> bytes:
    using = codec(time_ns=lambda: stored_ns, weights=weights)
    return using.encode(key(number), memoryview(payload(number)), None if parent is None else key(parent))[0]


def restored(*headers: bytes, uses: Sequence[int] = (), now_ns: int = 1000) -> tuple[Watched, list[int]]:
    """The index, and the slots to be wiped. Segments have two slots."""
    index = Watched(len(headers))
    tables = [b"".join(headers[at : at + 2]) for at in range(0, len(headers), 2)]
    table = np.zeros(len(headers), dtype=np.int64)
    table[: len(uses)] = uses
    bad = restore_index(
        index, tables, Links([None], len(headers)), table, codec(time_ns=lambda: now_ns), SlotPlan(CHUNK)
    )
    index.check()
    return index, bad


def test_of_an_empty_disk_nothing_is_wiped() -> None:
    index, bad = restored(FREE, FREE, FREE)
    assert (index.num_ready, bad) == (0, [])


def test_what_is_damaged_or_of_another_namespace_is_wiped_and_its_slot_free() -> None:
    damaged = bytearray(header(1, 10))
    damaged[60] ^= 1
    index, bad = restored(FREE, header(0, 10), bytes(damaged), header(2, 10, weights="others"), header(3, 10))
    assert bad == [2, 3]
    assert [index.contains(key(number)) for number in range(4)] == [True, False, False, True]
    assert {index.reserve(key(number), None) for number in range(4, 7)} == {0, 2, 3}


def test_of_a_chunk_that_is_there_several_times_the_newest_counts() -> None:
    index, bad = restored(header(0, 10), header(0, 30), header(1, 20), header(0, 20))
    assert sorted(bad) == [0, 3]
    assert (index.pin(key(0)), index.pin(key(1))) == (1, 2)


def test_the_policy_hears_of_all_that_happened_in_order() -> None:
    headers = [header(0, 10), header(5, 40), header(2, 12, 1), header(1, 11, 0), header(3, 30, 0), header(4, 20)]
    index, _ = restored(*headers, uses=[25, 40, 35, 25, 50])
    keys = [key(number) for number in range(6)]
    assert index.told == [
        ("stored", keys[:3]),
        ("stored", keys[4:5]),
        ("used", keys[:2]),
        ("stored", keys[3:4]),
        ("used", keys[2:3]),
        ("stored", keys[5:6]),
        ("used", keys[3:4]),
    ]


@pytest.mark.parametrize("num_uses", [6, 7, 20, 21, 22])
def test_the_policy_hears_of_very_many_uses_in_few_words(num_uses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_MOST_USES", 7)
    headers = [header(number, number + 1) for number in range(num_uses)]
    index, _ = restored(*headers, uses=range(100, 100 + num_uses))
    used = [keys for what, keys in index.told if what == "used"]
    assert len(used) <= 7
    assert [one for keys in used for one in reversed(keys)] == [key(number) for number in range(num_uses)]
    assert num_uses > 7 or len(used) == num_uses
