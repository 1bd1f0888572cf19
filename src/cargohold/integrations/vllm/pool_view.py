"""vLLM's block pool and block tables, as the contract shows them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast, overload

from cargohold.errors import NullBlockError
from cargohold.integrations.vllm.groups import Groups
from cargohold.protocol import NULL_BLOCK_ID, BlockIds, RequestView

GROUP_BYTES = 4
"""vLLM's block hashes end with their group's index, big-endian."""
_NO_KEY: Final = b"\xff" * GROUP_BYTES
"""Stands for the key of a block that has none."""


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
        keys_of: returns the hashes by which blocks are stored, by vLLM's hashes; ``None`` for those that must not be.

    Attributes:
        shows_free_blocks: whether ``next_victims`` returns the free blocks; while this is ``False``, it returns none.
    """

    def __init__(
        self,
        pool: Any,
        groups: Groups,
        tables: BlockTables,
        waiting: Callable[[], Iterable[RequestView]],
        keys_of: Callable[[list[bytes]], Sequence[bytes | None]] = list,
    ) -> None:
        self._pool = pool
        self._blocks = pool.blocks  # vLLM never replaces its block objects
        self._groups = groups
        self._keys_of = keys_of
        self._tables = tables
        self._waiting = waiting
        self.shows_free_blocks = True
        # By the last bytes of vLLM's keys.
        self._group_of = {at.to_bytes(GROUP_BYTES, "big"): group for at, group in enumerate(groups.by_number)}
        self._group_of[_NO_KEY] = None
        # Of such models, the hash of a block may be that of a prefix that ends inside it, if it holds no more.
        self._has_fine_hashes = any(pool.hash_block_size < group.block_tokens for group in groups.in_pool)

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that vLLM's prefix cache can find; 0 in a version that does not tell."""
        return len(getattr(self._pool.cached_block_hash_to_block, "_cache", ()))

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each."""
        self._pool.touch(self._own(block_ids, "touch"))

    def free_ids(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Give back one reference on each block. The caller must have taken it; that is not checked here."""
        own = self._own(block_ids, "free")
        if not evict_first:
            self._pool.free_blocks(own)
            return
        # vLLM puts cached blocks at the tail of the free queue; these are also kept elsewhere, and can be evicted first.
        for block in own:
            block.ref_cnt -= 1
        freed = {block.block_id: block for block in own if block.ref_cnt == 0}
        self._pool.free_block_queue.prepend_n(list(freed.values()))

    def next_victims(self, num_blocks: int) -> list[int]:
        """Return the free blocks that are evicted next, the first one first."""
        queue = self._pool.free_block_queue
        victims: list[int] = []
        if not self.shows_free_blocks:
            return victims
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        while block is not tail and len(victims) < num_blocks:
            victims.append(block.block_id)
            block = block.next_free_block
        return victims

    def contents(self, block_ids: Sequence[int]) -> list[bytes | None]:
        """Return vLLM's key for what each block holds; ``None`` if it has none, or one that ends inside the block.

        In the latter case, the block does not hold a whole block's KV.
        """
        blocks = self._blocks
        keys = [blocks[block_id].block_hash for block_id in block_ids]
        if self._has_fine_hashes:
            return [key if self._is_whole(key, blocks[at]) else None for at, key in zip(block_ids, keys, strict=True)]
        return keys

    def prefixes_of(self, contents: Sequence[Hashable]) -> list[tuple[bytes, int] | None]:
        """Return the hash under which what each of vLLM's keys is for is stored, and our group's index."""
        keys = [key or _NO_KEY for key in cast("Sequence[bytes | None]", contents)]
        hashes, group_of = self._keys_of([key[:-GROUP_BYTES] for key in keys]), self._group_of
        return [
            None if block_hash is None or (group := group_of[key[-GROUP_BYTES:]]) is None else (block_hash, group.index)
            for block_hash, key in zip(hashes, keys, strict=True)
        ]

    def get_request_blocks(self, request_id: str) -> BlockIds:
        """The request's block table per group."""
        return block_ids(self._groups.select(self._tables.blocks(request_id)))

    def waiting_requests(self) -> Iterable[RequestView]:
        """Requests not running yet, in the order in which they will be tried."""
        return self._waiting()

    def would_free(self, held: Mapping[int, int]) -> bool:
        """Whether some block would become free if the references in ``held``, counted by block id, were given back."""
        blocks = self._pool.blocks
        return any(blocks[block_id].ref_cnt == count for block_id, count in held.items())

    def _own(self, block_ids: Sequence[int], operation: str) -> list[Any]:
        if min(block_ids, default=1) <= NULL_BLOCK_ID:
            if NULL_BLOCK_ID in block_ids:
                raise NullBlockError(operation)
            raise IndexError(f"block {min(block_ids)} does not exist")
        return [self._blocks[block_id] for block_id in block_ids]

    def _is_whole(self, key: bytes | None, block: Any) -> bool:
        group, num_tokens = None if key is None else self._group_of[key[-GROUP_BYTES:]], block.block_hash_num_tokens
        return group is not None and (num_tokens is None or num_tokens % group.block_tokens == 0)


def block_ids(tables: Iterable[Sequence[Any]]) -> BlockIds:
    """Ids of vLLM's blocks, read when they are asked for."""
    return tuple([BlockIdTable(table) for table in tables])
