"""vLLM's block pool and block tables, as the contract shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

from cargohold.errors import NullBlockError, StaleCursorError
from cargohold.integrations.vllm.groups import Groups
from cargohold.protocol import NULL_BLOCK_ID, BlockIds, KVCacheBlockView, KVCacheGroup, RequestView

GROUP_BYTES = 4
"""vLLM's block hashes end with their group's index, big-endian."""


class BlockView:
    """A view of one of vLLM's blocks; see ``cargohold.protocol.KVCacheBlockView``.

    Args:
        block: vLLM's block object.
        groups: our group for each of vLLM's; ``None`` for those that are left out.
        key_of: the hash by which a block is stored, by vLLM's hash; ``None`` if it must not be.

    Attributes:
        block_id: index in the KV tensors.
    """

    __slots__ = ("_groups", "_key_of", "block", "block_id")

    def __init__(
        self, block: Any, groups: Sequence[KVCacheGroup | None], key_of: Callable[[bytes], bytes | None] = bytes
    ) -> None:
        self.block = block
        self.block_id: int = block.block_id
        self._groups = groups
        self._key_of = key_of

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
        """Hash of the prefix that ends with the block; ``None`` if it has none, or one that ends inside the block.

        In the latter case, the block does not hold a whole block's KV.
        """
        key, group = self.block.block_hash, self._group
        if group is None:
            return None
        num_tokens = getattr(self.block, "block_hash_num_tokens", None)
        if num_tokens is not None and num_tokens % group.block_tokens:
            return None
        return self._key_of(key[:-GROUP_BYTES])

    @property
    def group_id(self) -> int | None:
        """KV-cache group whose KV it holds."""
        return None if self._group is None else self._group.index

    @property
    def _group(self) -> KVCacheGroup | None:
        key = self.block.block_hash
        return None if key is None else self._groups[int.from_bytes(key[-GROUP_BYTES:], "big")]


class BlockIdTable(Sequence[int]):
    """The ids in a block table, read from vLLM's blocks on access: of a long table, a step needs only the end.

    Args:
        blocks: vLLM's block objects.
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
        """Pickle as a plain list."""
        return list, (self[:],)


class BlockTables(Protocol):
    """Looks up the block tables of requests."""

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """The request's table per group: vLLM's block objects, null blocks included; empty tables if it holds no blocks."""


class ManagerTables:
    """The tables of vLLM's KV-cache manager (since 0.30)."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """See ``BlockTables``."""
        tables: Sequence[Sequence[Any]] = self._manager.get_blocks(request_id).blocks
        return tables


class NotedTables:
    """Tables noted when blocks are allocated, for versions of vLLM that do not hand their KV-cache manager to connectors.

    The manager changes these very lists as blocks come and go, so they are always current.

    Attributes:
        records: what is known of requests, by id; each has its tables.
    """

    def __init__(self, num_groups: int) -> None:
        self.records: Mapping[str, Any] = {}
        self._empty: Sequence[Sequence[Any]] = ((),) * num_groups

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """See ``BlockTables``."""
        record = self.records.get(request_id)
        tables: Sequence[Sequence[Any]] = () if record is None else record.blocks
        return tables or self._empty


class PoolContext:
    """vLLM's pool and requests; see ``cargohold.protocol.SchedulerContext``.

    Args:
        pool: vLLM's block pool.
        groups: the KV-cache groups.
        tables: the requests' block tables, of all groups of vLLM's.
        waiting: the requests that wait, in the order in which they will be tried.
        key_of: see ``BlockView``.

    Attributes:
        shows_free_blocks: whether ``iter_free_blocks`` yields the free blocks; while this is ``False``, it yields none.
    """

    def __init__(
        self,
        pool: Any,
        groups: Groups,
        tables: BlockTables,
        waiting: Callable[[], Iterable[RequestView]],
        key_of: Callable[[bytes], bytes | None] = bytes,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._key_of = key_of
        self._tables = tables
        self._waiting = waiting
        self.shows_free_blocks = True
        # Each view is made on first access, and then kept: vLLM never replaces its block objects.
        self._views: list[BlockView | None] = [None] * len(pool.blocks)

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that vLLM's prefix cache can find; 0 in a version that does not tell."""
        return len(getattr(self._pool.cached_block_hash_to_block, "_cache", ()))

    def get_block(self, block_id: int) -> BlockView:
        """The block with that id. Raises ``IndexError`` where there is none."""
        if block_id < 0:
            raise IndexError(f"block {block_id} does not exist")
        view = self._views[block_id]
        if view is None:
            view = self._views[block_id] = BlockView(self._pool.blocks[block_id], self._groups.by_number, self._key_of)
        return view

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each."""
        self._pool.touch(self._with_ids(block_ids, "touch"))

    def free_ids(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block. The caller must have taken it; that is not checked here."""
        self._pool.free_blocks(self._with_ids(block_ids, "free"))

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """Take one reference on each."""
        self._pool.touch(self._own(blocks, "touch"))

    def free_blocks(self, blocks: Iterable[KVCacheBlockView], *, evict_first: bool = False) -> None:
        """Give back one reference on each block. The caller must have taken it; that is not checked here."""
        own = self._own(blocks, "free")
        if not evict_first:
            self._pool.free_blocks(own)
            return
        # vLLM puts cached blocks at the tail of the free queue; these are also kept elsewhere, and can be evicted first.
        for block in own:
            block.ref_cnt -= 1
        freed = {block.block_id: block for block in own if block.ref_cnt == 0}
        self._pool.free_block_queue.prepend_n(list(freed.values()))

    def iter_free_blocks(self, after_block: KVCacheBlockView | None = None) -> Iterator[BlockView]:
        """Walk the free queue in eviction order."""
        queue = self._pool.free_block_queue
        start = queue.fake_free_list_head if after_block is None else self._pool.blocks[after_block.block_id]
        if after_block is not None and not _is_free(start):
            raise StaleCursorError(after_block.block_id)
        if not self.shows_free_blocks:
            return iter(())
        return self._walk(start.next_free_block, queue.fake_free_list_tail)

    def get_request_blocks(self, request_id: str) -> tuple[list[BlockView], ...]:
        """The request's block table per group."""
        tables = self._groups.select(self._tables.blocks(request_id))
        return tuple([BlockView(block, self._groups.by_number, self._key_of) for block in table] for table in tables)

    def waiting_requests(self) -> Iterable[RequestView]:
        """Requests not running yet, in the order in which they will be tried."""
        return self._waiting()

    def _walk(self, block: Any, tail: Any) -> Iterator[BlockView]:
        while block is not tail:
            following = block.next_free_block
            yield BlockView(block, self._groups.by_number, self._key_of)
            if following is not tail and not _is_free(following):
                raise StaleCursorError(following.block_id)
            block = following

    def would_free(self, held: Mapping[int, int]) -> bool:
        """Whether some block would become free if the references in ``held``, counted by block id, were given back."""
        blocks = self._pool.blocks
        return any(blocks[block_id].ref_cnt == count for block_id, count in held.items())

    def _with_ids(self, block_ids: Sequence[int], operation: str) -> list[Any]:
        if min(block_ids, default=1) <= NULL_BLOCK_ID:
            if NULL_BLOCK_ID in block_ids:
                raise NullBlockError(operation)
            raise IndexError(f"block {min(block_ids)} does not exist")
        blocks = self._pool.blocks
        return [blocks[block_id] for block_id in block_ids]

    def _own(self, blocks: Iterable[KVCacheBlockView], operation: str) -> list[Any]:
        all_blocks = self._pool.blocks
        own = [block.block if isinstance(block, BlockView) else all_blocks[block.block_id] for block in blocks]
        if any([block.is_null for block in own]):  # noqa: C419  # quicker than a generator, and nearly always all of them
            raise NullBlockError(operation)
        return own


def block_ids(tables: Iterable[Sequence[Any]]) -> BlockIds:
    """Ids of vLLM's blocks, read when they are asked for."""
    return tuple([BlockIdTable(table) for table in tables])


def _is_free(block: Any) -> bool:
    return block.ref_cnt == 0 and block.next_free_block is not None
