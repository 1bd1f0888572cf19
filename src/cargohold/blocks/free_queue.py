"""The free queue: free blocks in eviction order, with removal from the middle in constant time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cargohold.blocks.block import KVCacheBlock
from cargohold.errors import StaleCursorError


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

    def walk(self, after: KVCacheBlock | None = None) -> Iterator[KVCacheBlock]:
        """Yield blocks in eviction order, behind ``after`` if given.

        Raises:
            StaleCursorError: from this call if ``after`` is not in the queue; from the walk if the block to come next has
                left the queue since the last one was yielded.
        """
        start = self._head if after is None else after
        if start.next_free is None:
            raise StaleCursorError(start.block_id)
        return self._walk_from(start)

    def _walk_from(self, start: KVCacheBlock) -> Iterator[KVCacheBlock]:
        block = start.next_free
        while block is not self._head:
            if block is None or block.next_free is None:
                raise StaleCursorError(-1 if block is None else block.block_id)
            # The caller may take this block out of the queue before asking for the next one.
            behind = block.next_free
            yield block
            block = behind
