"""vLLM's block pool as the scheduler context of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

from cargohold.errors import NullBlockError, StaleCursorError
from cargohold.protocol import BlockIds, KVCacheBlockView, KVCacheGroup, RequestView

_GROUP_BYTES = 4
"""vLLM's block hashes end with their group's index, big-endian."""


class BlockView:
    """One of vLLM's blocks, as the contract shows blocks.

    Args:
        block: vLLM's own.
        groups: the KV-cache groups.

    Attributes:
        block_id: index in the KV tensors.
    """

    __slots__ = ("_groups", "block", "block_id")

    def __init__(self, block: Any, groups: Sequence[KVCacheGroup]) -> None:
        self.block = block
        self.block_id: int = block.block_id
        self._groups = groups

    @property
    def ref_cnt(self) -> int:
        """References held."""
        return int(self.block.ref_cnt)

    @property
    def is_null(self) -> bool:
        """True for the null block alone."""
        return bool(self.block.is_null)

    @property
    def block_hash(self) -> bytes | None:
        """Digest of the prefix it holds; ``None`` if that ends inside the block: then it holds no whole block's KV."""
        key = self.block.block_hash
        if key is None:
            return None
        num_tokens = getattr(self.block, "block_hash_num_tokens", None)
        if num_tokens is not None and num_tokens % self._groups[_group_of(key)].block_tokens:
            return None
        return bytes(key[:-_GROUP_BYTES])

    @property
    def group_id(self) -> int | None:
        """KV-cache group whose KV it holds."""
        key = self.block.block_hash
        return None if key is None else _group_of(key)


class BlockIdTable(Sequence[int]):
    """The ids of a block table, made of what is asked for: of a long table, a step needs the end alone.

    Args:
        blocks: vLLM's own.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        return int(self._blocks[at].block_id)

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        """To another process it goes as a list."""
        return list, (self[:],)


class BlockTables(Protocol):
    """Where the blocks of a request are looked up."""

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """Blocks per group, vLLM's own, nulls in their places; empty tables if the request holds none."""
        ...


class ManagerTables:
    """The tables of vLLM's KV-cache manager (since 0.30)."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """See ``BlockTables``."""
        tables: Sequence[Sequence[Any]] = self._manager.get_blocks(request_id).blocks
        return tables


class NotedTables:
    """Tables as they were handed over at allocation, for versions that do not give the manager away.

    The manager changes these very lists as blocks come and go, so they are always current.
    """

    def __init__(self, num_groups: int) -> None:
        self._tables: dict[str, Sequence[Sequence[Any]]] = {}
        self._empty: Sequence[Sequence[Any]] = ((),) * num_groups

    def note(self, request_id: str, blocks: Sequence[Sequence[Any]]) -> None:
        """The request has these tables until it is noted again or forgotten."""
        self._tables[request_id] = blocks

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """See ``BlockTables``."""
        return self._tables.get(request_id, self._empty)


class PoolContext:
    """vLLM's pool and requests; see ``cargohold.protocol.SchedulerContext``.

    Args:
        pool: vLLM's block pool.
        groups: the KV-cache groups.
        tables: the requests' block tables.
        waiting: the requests that wait, in the order in which they will be tried.

    Attributes:
        shows_free_blocks: whether there is anything in the free queue for whoever walks it.
    """

    def __init__(
        self,
        pool: Any,
        groups: Sequence[KVCacheGroup],
        tables: BlockTables,
        waiting: Callable[[], Iterable[RequestView]],
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._tables = tables
        self._waiting = waiting
        self.shows_free_blocks = True
        # Made when they are asked for first; vLLM's blocks stay the same ones.
        self._views: list[BlockView | None] = [None] * len(pool.blocks)

    def get_block(self, block_id: int) -> BlockView:
        """The block with that id. Raises ``IndexError`` where there is none."""
        if block_id < 0:
            raise IndexError(f"block {block_id} does not exist")
        view = self._views[block_id]
        if view is None:
            view = self._views[block_id] = BlockView(self._pool.blocks[block_id], self._groups)
        return view

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """Take one reference on each."""
        self._pool.touch(self._own(blocks, "touch"))

    def free_blocks(self, blocks: Iterable[KVCacheBlockView], *, evict_first: bool = False) -> None:
        """Give one reference back on each. Whether they were taken here is for whoever calls to know."""
        own = self._own(blocks, "free")
        if not evict_first:
            self._pool.free_blocks(own)
            return
        # vLLM puts cached blocks at the tail; these are kept elsewhere and can go first.
        for block in own:
            block.ref_cnt -= 1
        freed = {block.block_id: block for block in own if block.ref_cnt == 0}
        self._pool.free_block_queue.prepend_n(list(freed.values()))

    def iter_free_blocks(self, after: KVCacheBlockView | None = None) -> Iterator[BlockView]:
        """Walk the free queue in eviction order."""
        queue = self._pool.free_block_queue
        start = queue.fake_free_list_head if after is None else self._pool.blocks[after.block_id]
        if after is not None and not _is_free(start):
            raise StaleCursorError(after.block_id)
        if not self.shows_free_blocks:
            return iter(())
        return self._walk(start.next_free_block, queue.fake_free_list_tail)

    def get_request_blocks(self, request_id: str) -> tuple[list[BlockView], ...]:
        """The request's block table per group."""
        tables = self._tables.blocks(request_id)
        return tuple([BlockView(block, self._groups) for block in table] for table in tables)

    def waiting_requests(self) -> Iterable[RequestView]:
        """Requests not running yet, in the order in which they will be tried."""
        return self._waiting()

    def _walk(self, block: Any, tail: Any) -> Iterator[BlockView]:
        while block is not tail:
            following = block.next_free_block
            yield BlockView(block, self._groups)
            if following is not tail and not _is_free(following):
                raise StaleCursorError(following.block_id)
            block = following

    def would_free(self, held: Mapping[int, int]) -> bool:
        """Whether some block would become free if so many references were given back, by block id."""
        blocks = self._pool.blocks
        return any(blocks[block_id].ref_cnt == count for block_id, count in held.items())

    def _own(self, blocks: Iterable[KVCacheBlockView], operation: str) -> list[Any]:
        all_blocks = self._pool.blocks
        own = [block.block if isinstance(block, BlockView) else all_blocks[block.block_id] for block in blocks]
        if any([block.is_null for block in own]):  # noqa: C419  # quicker than a generator, and nearly always all of them
            raise NullBlockError(operation)
        return own


def block_ids(tables: Iterable[Iterable[Any]]) -> BlockIds:
    """Ids of vLLM's blocks."""
    return tuple([block.block_id for block in table] for table in tables)


def _is_free(block: Any) -> bool:
    return block.ref_cnt == 0 and block.next_free_block is not None


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
