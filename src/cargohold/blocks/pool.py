"""A pool of fixed-size blocks: reference counts, a hash index, an eviction order. Used for the device and for host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from cargohold.blocks.block import KVCacheBlock
from cargohold.blocks.free_queue import FreeQueue
from cargohold.errors import BlockNotHeldError, NullBlockError, OutOfBlocksError
from cargohold.protocol import KVCacheBlockView

RemovedCallback = Callable[[bytes, int], None]


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, each free or referenced, each in the prefix cache or not.

    ::

                     allocate                     free_blocks (last reference)
        free, empty ----------> referenced  -------------------------------------> free, cached: tail of the queue
             ^                      |  ^                                             |      |
             |                      |  +---------------------- touch ----------------+      |
             |                      +-- cache_block: its prefix can be found by hash        |
             +------------------------------------ allocate evicts from the head -----------+

    All operations are O(1) per block. Several blocks may hold the same prefix (two requests computed it at the same time);
    the index keeps all of them, and ``lookup`` returns the one cached first.

    Args:
        num_blocks: size of the pool, the null block included.
        has_null_block: whether block 0 is the null block, which is never allocated, touched or freed.
        on_removed: called with the hash and group of a prefix when the last block that holds it leaves the prefix cache.
    """

    def __init__(
        self, num_blocks: int, *, has_null_block: bool = True, on_removed: RemovedCallback | None = None
    ) -> None:
        if num_blocks < 1 + has_null_block:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give")
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._blocks[0].is_null = has_null_block
        self._free = FreeQueue(block for block in self._blocks if not block.is_null)
        # Prefix -> the blocks that hold it, oldest first. A dict serves as an ordered set.
        self._index: dict[tuple[bytes, int], dict[int, KVCacheBlock]] = {}
        self._on_removed = on_removed

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, the null block included."""
        return len(self._blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that can be allocated when none is referenced."""
        return len(self._blocks) - self._blocks[0].is_null

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without references, cached ones included."""
        return len(self._free)

    @property
    def num_cached_prefixes(self) -> int:
        """Number of different prefixes that ``lookup`` can find."""
        return len(self._index)

    @property
    def null_block(self) -> KVCacheBlock:
        """The null block: the placeholder for positions whose KV is not kept."""
        assert self._blocks[0].is_null, "this pool was made without a null block"
        return self._blocks[0]

    def get_block(self, block_id: int) -> KVCacheBlock:
        """Return the block with that id. Raises ``IndexError`` if there is none."""
        if block_id < 0:
            raise IndexError(f"block {block_id} does not exist")
        return self._blocks[block_id]

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take ``num_blocks`` blocks from the head of the free queue, each with one reference; their KV is evicted.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocksError(num_blocks, len(self._free))
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """Take one reference on each block; free ones leave the free queue.

        Raises:
            NullBlockError: the null block is among them; nothing was changed.
        """
        own = self._own(blocks, "touch")
        for block in own:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlockView], *, evict_first: bool = False) -> None:
        """Give back one reference on each block, in order.

        Blocks whose count reaches zero go to the tail of the free queue in the order given, so the first is evicted first;
        with ``evict_first`` to its head, in the same order.

        Raises:
            BlockNotHeldError: a block is given back more often than it is referenced; nothing was changed.
            NullBlockError: the null block is among them; nothing was changed.
        """
        own = self._own(blocks, "free")
        self._check_held(own)
        for block in reversed(own) if evict_first else own:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if evict_first:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Do ``touch`` for the blocks with these ids. Raises ``IndexError`` if there is none with one of them."""
        self.touch([self.get_block(block_id) for block_id in block_ids])

    def free_ids(self, block_ids: Sequence[int]) -> None:
        """Do ``free_blocks`` for the blocks with these ids. Raises ``IndexError`` if there is none with one of them."""
        self.free_blocks([self.get_block(block_id) for block_id in block_ids])

    def lookup(self, block_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """Return a block that holds the prefix ``block_hash`` for a group, or ``None``. Takes no reference."""
        holders = self._index.get((block_hash, group_id))
        return None if holders is None else next(iter(holders.values()))

    def contains(self, block_hash: bytes, group_id: int) -> bool:
        """Whether ``lookup`` would find a block."""
        return (block_hash, group_id) in self._index

    def cache_block(self, block: KVCacheBlock, block_hash: bytes, group_id: int) -> bool:
        """Let ``block``, which must be full and referenced, be found by its prefix from now on.

        Returns:
            ``True`` if the prefix is new to the cache; ``False`` if another block holds it already.
        """
        if block.is_null:
            raise NullBlockError("cache")
        assert block.ref_cnt > 0 and block.block_hash is None, f"{block} cannot enter the cache"
        block.block_hash, block.group_id = block_hash, group_id
        holders = self._index.setdefault((block_hash, group_id), {})
        holders[block.block_id] = block
        return len(holders) == 1

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Take ``block`` out of the prefix cache, for instance because its KV is not what its hash says. No-op if not in it."""
        if block.block_hash is not None:
            self._forget(block)

    def iter_free_blocks(self, after: KVCacheBlockView | None = None) -> Iterator[KVCacheBlock]:
        """Walk the free queue in eviction order; see ``SchedulerContext.iter_free_blocks``."""
        return self._free.walk(None if after is None else self._blocks[after.block_id])

    def reset_cache(self) -> bool:
        """Forget every cached prefix. Return ``False``, and forget none, while a block is referenced."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self._blocks:
            if block.block_hash is not None:
                self._forget(block)
        return True

    def check(self) -> None:
        """Verify that nothing is lost or counted twice. Raises ``AssertionError`` naming the first block that is wrong.

        Walks the whole pool: for tests, simulations and idle moments.
        """
        free = {block.block_id for block in self._free.walk()}
        assert len(free) == len(self._free), "the free queue's length is wrong"
        for block in self._blocks:
            expected = block.ref_cnt == 0 and not block.is_null
            assert (block.block_id in free) == expected, f"{block} is {'' if expected else 'not '}meant to be free"
            assert block.ref_cnt >= 0, f"{block} has a negative count"
            if block.block_hash is not None:
                assert block.group_id is not None, f"{block} is cached without a group"
                holders = self._index.get((block.block_hash, block.group_id), {})
                assert holders.get(block.block_id) is block, f"{block} is cached but cannot be found"
        indexed = sum(len(holders) for holders in self._index.values())
        cached = sum(block.block_hash is not None for block in self._blocks)
        assert indexed == cached, f"{indexed} blocks indexed, {cached} cached"

    def _own(self, blocks: Iterable[KVCacheBlockView], operation: str) -> Sequence[KVCacheBlock]:
        own = [self._blocks[block.block_id] for block in blocks]
        if any(block.is_null for block in own):
            raise NullBlockError(operation)
        return own

    def _check_held(self, blocks: Sequence[KVCacheBlock]) -> None:
        if all(block.ref_cnt > 0 for block in blocks) and len(set(blocks)) == len(blocks):
            return
        for block, given_back in Counter(blocks).items():
            if given_back > block.ref_cnt:
                raise BlockNotHeldError(block.block_id, block.ref_cnt, given_back)

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None and block.group_id is not None
        key = (block.block_hash, block.group_id)
        holders = self._index[key]
        del holders[block.block_id]
        block.block_hash = block.group_id = None
        if not holders:
            del self._index[key]
            if self._on_removed is not None:
                self._on_removed(*key)
