"""What the connector notes of the device pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cargohold.cache.manager import offload_key
from cargohold.connector.kernel.device import DeviceChunks


class Pool:
    """A block pool of which a test says which blocks are free."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[Any] = [
            SimpleNamespace(block_id=at, block_hash=bytes([at] * 32), group_id=0, ref_cnt=1) for at in range(num_blocks)
        ]
        self.free: list[int] = []

    def iter_free_blocks(self) -> Any:
        return (self.blocks[at] for at in self.free)

    def get_block(self, block_id: int) -> Any:
        return self.blocks[block_id]


def test_blocks_that_become_free_where_few_were_are_seen_before_they_are_evicted() -> None:
    """Found by a seed: once no block was free, none that was given back was looked at until a request ended."""
    pool: Any = Pool(4)
    device = DeviceChunks(pool)
    keys = [offload_key(block.block_hash, 0) for block in pool.blocks]
    device.note(keys, range(4))
    device.watch(2)
    pool.free = [2, 3]  # a window has left them behind
    device.watch(2)
    pool.blocks[2].block_hash, pool.free = None, [3]
    assert device.take_lost() == {keys[2]: 2}


@pytest.mark.parametrize("holds", ["the same", "another connector's"])
def test_a_chunk_is_lost_unless_the_other_block_noted_to_hold_it_still_does(holds: str) -> None:
    """Found by seed 71001674: only the block that was noted last counted, and what it held now was not looked at."""
    pool: Any = Pool(4)
    device = DeviceChunks(pool)
    key = offload_key(pool.blocks[2].block_hash, 0)
    pool.blocks[3].block_hash = pool.blocks[2].block_hash
    device.note([key, key], [2, 3])
    if holds != "the same":
        pool.blocks[3].block_hash = bytes([9] * 32)
    pool.free = [2]
    device.watch(1)
    pool.blocks[2].block_hash, pool.free = None, []
    assert device.take_lost() == ({} if holds == "the same" else {key: 2})
