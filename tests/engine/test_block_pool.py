"""The block pool against a naive model, and its rules one by one."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cargohold.engine.core.block_pool import BlockPool
from cargohold.errors import BlockNotHeldError, NullBlockError, OutOfBlocksError
from cargohold.protocol import BlockPoolView
from tests.effort import examples

NUM_BLOCKS = 8
HASHES = [bytes([number]) * 4 for number in range(4)]


class PoolMachine(RuleBasedStateMachine):
    """Random operations on a pool and on lists and dicts that mean the same."""

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[tuple[bytes, int]] = []
        self.pool = BlockPool(NUM_BLOCKS, on_removed=lambda block_hash, group: self.removed.append((block_hash, group)))
        self.free = list(range(1, NUM_BLOCKS))
        self.references: Counter[int] = Counter()
        self.cached: dict[int, tuple[bytes, int]] = {}  # oldest first
        self.expected_removed: list[tuple[bytes, int]] = []

    def forget(self, block_id: int) -> None:
        prefix = self.cached.pop(block_id)
        if prefix not in self.cached.values():
            self.expected_removed.append(prefix)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert [block.block_id for block in self.pool.allocate(count)] == taken
        for block_id in taken:
            self.references[block_id] = 1
            if block_id in self.cached:
                self.forget(block_id)

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def touch(self, ids: list[int]) -> None:
        if 0 in ids:
            with pytest.raises(NullBlockError):
                self.pool.touch_ids(ids)
            return
        self.pool.touch_ids(ids)
        self.references.update(ids)
        self.free = [block_id for block_id in self.free if block_id not in ids]

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4), evict_first=st.booleans())
    def free_any(self, ids: list[int], evict_first: bool) -> None:
        if 0 in ids:
            with pytest.raises(NullBlockError):
                self.pool.free_ids(ids)
        elif any(count > self.references[block_id] for block_id, count in Counter(ids).items()):
            with pytest.raises(BlockNotHeldError) as raised:
                self.pool.free_ids(ids)
            assert raised.value.given_back > raised.value.held == self.references[raised.value.block_id]
        else:
            self.pool.free_ids(ids, evict_first=evict_first)
            for block_id in reversed(ids) if evict_first else ids:
                self.references[block_id] -= 1
                if not self.references[block_id]:
                    is_first = evict_first or block_id not in self.cached
                    self.free.insert(0 if is_first else len(self.free), block_id)

    @precondition(lambda self: +self.references)
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES), group=st.integers(0, 1))
    def cache(self, data: st.DataObject, block_hash: bytes, group: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(+self.references)))
        if block_id not in self.cached:
            is_new = (block_hash, group) not in self.cached.values()
            assert self.pool.cache_block(self.pool.get_block(block_id), block_hash, group) == is_new
            self.cached[block_id] = (block_hash, group)

    @rule(block_id=st.integers(1, NUM_BLOCKS - 1))
    def uncache(self, block_id: int) -> None:
        self.pool.uncache_block(self.pool.get_block(block_id))
        if block_id in self.cached:
            self.forget(block_id)

    @rule()
    def reset(self) -> None:
        could = self.pool.reset_cache()
        assert could == (not +self.references)
        if could:
            self.expected_removed += dict.fromkeys(self.cached.values())
            self.cached.clear()
            self.removed.sort()
            self.expected_removed.sort()

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        assert self.pool.next_victims(NUM_BLOCKS) == self.free
        assert self.pool.num_free_blocks == len(self.free)
        for block_id in range(1, NUM_BLOCKS):
            assert self.pool.get_block(block_id).ref_cnt == self.references[block_id]
        for block_hash in HASHES:
            for group in (0, 1):
                holders = [at for at, prefix in self.cached.items() if prefix == (block_hash, group)]
                found = self.pool.lookup(block_hash, group)
                assert (found and found.block_id) == (holders[0] if holders else None)
        assert self.removed == self.expected_removed


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = examples(25, stateful_step_count=40)


def test_satisfies_the_contract_as_it_is() -> None:
    pool = BlockPool(3)
    assert isinstance(pool, BlockPoolView)


def test_the_first_block_freed_is_the_first_evicted() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for at, block in enumerate(blocks[:3]):
        pool.cache_block(block, bytes([at]) * 32, 0)
    pool.free_ids([blocks[at].block_id for at in (2, 0, 3, 1)])
    assert pool.allocate(4) == [blocks[3], blocks[2], blocks[0], blocks[1]], "before those that hold something"


def test_what_blocks_hold_is_read_by_their_ids() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    pool.cache_block(first, bytes(32), 1)
    assert pool.prefixes_of(pool.contents([1, 2, 0])) == [(bytes(32), 1), None, None]
    assert pool.next_victims(1) == [3]
    pool.free_ids([second.block_id, first.block_id])
    assert pool.next_victims(9) == [2, 3, 4, 1]


@pytest.mark.parametrize("block_id", [-1, 3])
def test_an_unknown_block_id_is_an_error(block_id: int) -> None:
    with pytest.raises(IndexError):
        BlockPool(3).get_block(block_id)
