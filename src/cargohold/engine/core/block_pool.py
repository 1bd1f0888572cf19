"""A pool of fixed-size blocks: references, the index of cached prefixes, and the order of eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import cast

from cargohold.errors import BlockNotHeldError, NullBlockError, OutOfBlocksError
from cargohold.protocol import NULL_BLOCK_ID


class KVCacheBlock:
    """A block's bookkeeping; its bytes live elsewhere, in the row ``block_id`` of the KV tensors.

    A plain class with slots: pools hold many, and the free queue links them in place.

    Attributes:
        block_id: index in the pool and in the KV tensors.
        ref_cnt: number of references held. Zero means that the block is in the free queue, unless it is the null block.
        is_null: whether it is the null block, block 0 of its pool.
        prefix: digest of the prefix that it holds, and the KV-cache group; ``None`` unless it is in the prefix cache.
        prev_free, next_free: neighbours in the free queue, owned by ``FreeQueue``.
    """

    __slots__ = ("block_id", "is_null", "next_free", "prefix", "prev_free", "ref_cnt")

    def __init__(self, block_id: int, *, is_null: bool = False) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = is_null
        self.prefix: tuple[bytes, int] | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = "" if self.prefix is None else f", {self.prefix[0].hex()[:8]} of group {self.prefix[1]}"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{cached})"


class FreeQueue:
    """A doubly linked list through the blocks themselves.

    ``head <-> first victim <-> ... <-> last victim <-> head``: the sentinel closes the ring, so no end is special.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._head.prev_free = self._head.next_free = self._head
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def append(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the tail, so that it is evicted last of all free blocks."""
        last = self._head.prev_free
        assert last is not None and block.next_free is None, "the block is in the queue already"
        last.next_free = block
        block.prev_free, block.next_free = last, self._head
        self._head.prev_free = block
        self._len += 1

    def prepend(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the head, so that it is evicted first of all free blocks."""
        first = self._head.next_free
        assert first is not None and block.next_free is None, "the block is in the queue already"
        first.prev_free = block
        block.prev_free, block.next_free = self._head, first
        self._head.next_free = block
        self._len += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out of the queue, from any position."""
        before, behind = block.prev_free, block.next_free
        assert before is not None and behind is not None, "the block is not in the queue"
        before.next_free, behind.prev_free = behind, before
        block.prev_free = block.next_free = None
        self._len -= 1

    def popleft(self) -> KVCacheBlock:
        """Take out and return the next victim. The queue must not be empty."""
        block = self._head.next_free
        assert block is not None and block is not self._head, "the queue is empty"
        self.remove(block)
        return block

    def first(self, num_blocks: int) -> list[KVCacheBlock]:
        """Return the next victims, the first one first; fewer than ``num_blocks`` if fewer are free."""
        victims: list[KVCacheBlock] = []
        block = self._head.next_free
        while block is not None and block is not self._head and len(victims) < num_blocks:
            victims.append(block)
            block = block.next_free
        return victims


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, each free or referenced, each in the prefix cache or not.

    ::

                     allocate                     free_ids (last reference)
        free, empty ----------> referenced  -------------------------------------> free, cached: tail of the queue
             ^                      |  ^                                             |      |
             |                      |  +-------------------- touch_ids --------------+      |
             |                      +-- cache_block: its prefix can be found by hash        |
             +------------------------------------ allocate evicts from the head -----------+

    All operations are O(1) per block. Several blocks may hold the same prefix (two requests computed it at the same time);
    the index keeps all of them, and ``lookup`` returns the one cached first.

    Args:
        num_blocks: size of the pool. Block 0 is the null block, which is never allocated, touched or freed.
        on_removed: called with the hash and group of a prefix when the last block that holds it leaves the prefix cache.
    """

    def __init__(self, num_blocks: int, *, on_removed: Callable[[bytes, int], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give")
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._blocks[0].is_null = True
        self._free = FreeQueue(self._blocks[1:])
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
        return len(self._blocks) - 1

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
            if block.prefix is not None:
                self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each of the blocks with these ids; free ones leave the free queue.

        Raises:
            IndexError: there is none with one of them; nothing was changed.
            NullBlockError: the null block is among them; nothing was changed.
        """
        for block in self._own(block_ids, "touch"):
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_ids(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Give back one reference on each of the blocks with these ids, in order.

        Blocks whose count reaches zero go to the tail of the free queue in the order given, so the first is evicted first;
        with ``evict_first`` to its head, in the same order. Those that are not in the prefix cache go to its head in any case:
        nothing is lost with them.

        Raises:
            BlockNotHeldError: a block is given back more often than it is referenced; nothing was changed.
            IndexError: there is none with one of the ids; nothing was changed.
            NullBlockError: the null block is among them; nothing was changed.
        """
        own = self._own(block_ids, "free")
        self._check_held(own)
        for block in reversed(own) if evict_first else own:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if evict_first or block.prefix is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def next_victims(self, num_blocks: int) -> list[int]:
        """Return the ids of the free blocks that are evicted next, the first one first."""
        return [block.block_id for block in self._free.first(num_blocks)]

    def contents(self, block_ids: Sequence[int]) -> list[tuple[bytes, int] | None]:
        """Return what blocks hold in the prefix cache: the digest of a prefix, and its KV-cache group."""
        return [self._blocks[block_id].prefix for block_id in block_ids]

    @staticmethod
    def prefixes_of(contents: Sequence[Hashable]) -> Sequence[tuple[bytes, int] | None]:
        """Return what blocks hold; see ``contents``."""
        return cast("Sequence[tuple[bytes, int] | None]", contents)

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
        assert block.ref_cnt > 0 and block.prefix is None, f"{block} cannot enter the cache"
        block.prefix = (block_hash, group_id)
        holders = self._index.setdefault(block.prefix, {})
        holders[block.block_id] = block
        return len(holders) == 1

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Take ``block`` out of the prefix cache, for instance because its KV is not what its hash says. No-op if not in it."""
        if block.prefix is not None:
            self._forget(block)

    def reset_cache(self) -> bool:
        """Forget every cached prefix. Return ``False``, and forget none, while a block is referenced."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self._blocks:
            if block.prefix is not None:
                self._forget(block)
        return True

    def check(self) -> None:
        """Verify that nothing is lost or counted twice. Raises ``AssertionError`` naming the first block that is wrong.

        Walks the whole pool: for tests, simulations and idle moments.
        """
        free = {block.block_id for block in self._free.first(len(self._blocks))}
        assert len(free) == len(self._free), "the free queue's length is wrong"
        for block in self._blocks:
            expected = block.ref_cnt == 0 and not block.is_null
            assert (block.block_id in free) == expected, f"{block} is {'' if expected else 'not '}meant to be free"
            assert block.ref_cnt >= 0, f"{block} has a negative count"
            if block.prefix is not None:
                holders = self._index.get(block.prefix, {})
                assert holders.get(block.block_id) is block, f"{block} is cached but cannot be found"
        indexed = sum(len(holders) for holders in self._index.values())
        cached = sum(block.prefix is not None for block in self._blocks)
        assert indexed == cached, f"{indexed} blocks indexed, {cached} cached"

    def _own(self, block_ids: Sequence[int], operation: str) -> Sequence[KVCacheBlock]:
        if min(block_ids, default=1) < 0:
            raise IndexError(f"block {min(block_ids)} does not exist")
        if NULL_BLOCK_ID in block_ids:
            raise NullBlockError(operation)
        return [self._blocks[block_id] for block_id in block_ids]

    def _check_held(self, blocks: Sequence[KVCacheBlock]) -> None:
        if min([block.ref_cnt for block in blocks], default=1) > 0 and len(set(blocks)) == len(blocks):
            return
        for block, given_back in Counter(blocks).items():
            if given_back > block.ref_cnt:
                raise BlockNotHeldError(block.block_id, block.ref_cnt, given_back)

    def _forget(self, block: KVCacheBlock) -> None:
        prefix, block.prefix = block.prefix, None
        assert prefix is not None
        holders = self._index[prefix]
        del holders[block.block_id]
        if not holders:
            del self._index[prefix]
            if self._on_removed is not None:
                self._on_removed(*prefix)
