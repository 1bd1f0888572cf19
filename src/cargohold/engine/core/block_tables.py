"""Which blocks of the device pool hold which request's tokens, group by group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cargohold.blocks import BlockPool, KVCacheBlock
from cargohold.protocol import KVCacheGroup


@dataclass(slots=True)
class BlockTable:
    """One request's blocks of one group.

    ::

        0           num_skipped                                    len(blocks)
        |  null ... null  |  held, in the prefix cache  |  held, not yet  |
                                                        num_cached

    Attributes:
        group: the group.
        blocks: one per ``group.block_tokens`` tokens from the start of the request, null where the KV is not kept.
        ids: their ids; kept beside them because workers and connectors need the ids alone, every step.
        num_skipped: leading blocks that are null.
        num_cached: leading blocks that need not be offered to the prefix cache again.
    """

    group: KVCacheGroup
    blocks: list[KVCacheBlock] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    num_skipped: int = 0
    num_cached: int = 0

    def append(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks at the end; their references become the table's."""
        for block in blocks:
            self.blocks.append(block)
            self.ids.append(block.block_id)

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks to add so that ``num_tokens`` tokens fit."""
        return max(0, -(-num_tokens // self.group.block_tokens) - len(self.blocks))

    def skip(self, num_computed_tokens: int, null_block: KVCacheBlock) -> list[KVCacheBlock]:
        """Put null blocks where no query from ``num_computed_tokens`` on will look; returns the blocks they replace.

        The references on the blocks returned pass to the caller.
        """
        end = min(self.group.num_skipped_tokens(num_computed_tokens) // self.group.block_tokens, len(self.blocks))
        if end <= self.num_skipped:
            return []
        replaced = [block for block in self.blocks[self.num_skipped : end] if not block.is_null]
        for at in range(self.num_skipped, end):
            self.blocks[at] = null_block
            self.ids[at] = null_block.block_id
        self.num_skipped = end
        return replaced

    def held_blocks(self) -> list[KVCacheBlock]:
        """The blocks that are not null, last first: the order in which they should be evicted."""
        return [block for block in reversed(self.blocks) if not block.is_null]

    def has_uncached_blocks(self, num_computed_tokens: int) -> bool:
        """Whether ``num_computed_tokens`` computed tokens fill a block that was not offered to the prefix cache."""
        return num_computed_tokens // self.group.block_tokens > self.num_cached

    def cache_full_blocks(self, pool: BlockPool, hashes: Sequence[bytes], num_computed_tokens: int) -> list[int]:
        """Let the prefix cache find the blocks that ``num_computed_tokens`` computed tokens fill.

        Args:
            hashes: the prefix hash at the end of each block.

        Returns:
            Indices of the blocks whose prefix is new to the cache, ascending.
        """
        num_full = min(num_computed_tokens // self.group.block_tokens, len(self.blocks))
        new: list[int] = []
        for at in range(self.num_cached, num_full):
            block = self.blocks[at]
            # Null blocks hold nothing; loaded or shared blocks may be in the cache already.
            if not block.is_null and block.block_hash is None and pool.cache_block(block, hashes[at], self.group.index):
                new.append(at)
        self.num_cached = max(self.num_cached, num_full)
        return new
