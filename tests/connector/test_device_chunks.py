"""What the connector notes of the device pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cargohold.cache.manager import offload_key
from cargohold.connector.kernel.device import DeviceChunks


class Pool:
    """A block pool of which a test says what blocks hold, and which of them are free."""

    def __init__(self, num_blocks: int) -> None:
        self.held: list[Any] = [(bytes([at] * 32), 0) for at in range(num_blocks)]
        self.free: list[int] = []

    def next_victims(self, num_blocks: int) -> list[int]:
        return self.free[:num_blocks]

    def contents(self, block_ids: Sequence[int]) -> list[Any]:
        return [self.held[at] for at in block_ids]

    def prefixes_of(self, contents: Any) -> Any:
        return contents


def test_blocks_that_become_free_where_few_were_are_seen_before_they_are_evicted() -> None:
    """Found by a seed: once no block was free, none that was given back was looked at until a request ended."""
    pool: Any = Pool(4)
    device = DeviceChunks(pool, 1)
    keys = [offload_key(*prefix) for prefix in pool.held]
    device.note(keys, range(4))
    device.watch(2)
    pool.free = [2, 3]  # a window has left them behind
    device.watch(2)
    pool.held[2], pool.free = None, [3]
    assert device.take_lost() == {keys[2]: 2}


@pytest.mark.parametrize("holds", ["the same", "another connector's"])
def test_a_chunk_is_lost_unless_the_other_block_noted_to_hold_it_still_does(holds: str) -> None:
    """Found by seed 71001674: only the block that was noted last counted, and what it held now was not looked at."""
    pool: Any = Pool(4)
    device = DeviceChunks(pool, 1)
    key = offload_key(*pool.held[2])
    pool.held[3] = pool.held[2]
    device.note([key, key], [2, 3])
    if holds != "the same":
        pool.held[3] = (bytes([9] * 32), 0)
    pool.free = [2]
    device.watch(1)
    pool.held[2], pool.free = None, []
    assert device.take_lost() == ({} if holds == "the same" else {key: 2})


def test_a_block_that_two_requests_share_loses_what_it_held_once() -> None:
    """Found by seed 78000085: what all requests of a step offer is noted at once, and both offered the block."""
    pool: Any = Pool(3)
    device = DeviceChunks(pool, 1)
    old, new = (offload_key(bytes([at] * 32), 0) for at in (1, 2))
    device.note([old], [1])
    assert device.note([new, new], [1, 1]) == [old]
    assert old not in device and new in device
