"""One block of a pool."""

from __future__ import annotations


class KVCacheBlock:
    """A block's bookkeeping; its bytes live elsewhere, in the row ``block_id`` of the KV tensors.

    A plain class with slots: pools hold many, and the free queue links them in place.

    Attributes:
        block_id: index in the pool and in the KV tensors.
        ref_cnt: number of references held. Zero means that the block is in the free queue, unless it is the null block.
        is_null: whether it is the null block, block 0 of a device pool.
        block_hash: digest of the prefix that it holds; ``None`` unless it is in the prefix cache.
        group_id: KV-cache group whose KV it holds; ``None`` unless it is in the prefix cache.
        prev_free, next_free: neighbours in the free queue, owned by ``FreeQueue``.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "is_null", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int, *, is_null: bool = False) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = is_null
        self.block_hash: bytes | None = None
        self.group_id: int | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = "" if self.block_hash is None else f", {self.block_hash.hex()[:8]} of group {self.group_id}"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{cached})"
