"""Walks the free queue ahead of eviction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cargohold.protocol import KVCacheBlockView, SchedulerContext


class FreeQueueScout:
    """Finds blocks that must be saved so that those that will be evicted next are *safe*: empty, or kept elsewhere.

    ::

        free queue   | safe | safe | safe | not safe | ? | ? | ...
                      next                ^ cursor: behind the last block known to be safe
                      victim

    Allocation takes blocks from the left, so the stretch of safe blocks shrinks by as many, and the scout walks on from its
    cursor until the stretch is ``lookahead`` long again. Safe blocks that are used again leave the stretch; if the block at the
    cursor does, the walk goes on behind the safe block before it.

    Args:
        context: the engine's block pool.
        is_kept: tells whether a block's KV is kept elsewhere, ready to be loaded.
        lookahead: number of blocks ahead of eviction to keep safe.
    """

    def __init__(self, context: SchedulerContext, is_kept: Callable[[KVCacheBlockView], bool], lookahead: int) -> None:
        self._context = context
        self._is_kept = is_kept
        self._lookahead = lookahead
        # The safe blocks up to the cursor, with their block hashes when they were found safe.
        self._safe: deque[tuple[KVCacheBlockView, bytes | None]] = deque()

    def find_unsafe(self, limit: int) -> list[KVCacheBlockView]:
        """Return the blocks within the lookahead that are not safe, next victim first; at most ``limit``.

        The caller is expected to take them out of the free queue and to save them.
        """
        while self._safe and not self._is_still_there(*self._safe[0]):
            self._safe.popleft()
        if any(block.ref_cnt for block, _ in self._safe):
            # Blocks that are used again will return to the tail of the queue.
            self._safe = deque(entry for entry in self._safe if not entry[0].ref_cnt)
        if limit < 1 or len(self._safe) >= self._lookahead:
            return []
        unsafe: list[KVCacheBlockView] = []
        # All safe blocks are without references here, so they are in the queue, and the cursor is not stale.
        for block in self._context.iter_free_blocks(after=self._safe[-1][0] if self._safe else None):
            if block.block_hash is None or self._is_kept(block):
                # Behind an unsafe block there is a hole in the stretch, until that block is saved and put back at the head.
                if not unsafe:
                    self._safe.append((block, block.block_hash))
            else:
                unsafe.append(block)
            if len(self._safe) + len(unsafe) >= self._lookahead or len(unsafe) >= limit:
                break
        return unsafe

    def note_saved(self, block: KVCacheBlockView) -> None:
        """Note that a block was saved and put back at the head of the queue."""
        if block.ref_cnt == 0:
            self._safe.appendleft((block, block.block_hash))

    @staticmethod
    def _is_still_there(block: KVCacheBlockView, block_hash: bytes | None) -> bool:
        return block.ref_cnt == 0 and block.block_hash == block_hash
