"""vLLM as the contract shows an engine: its block pool, its requests and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Protocol, overload

from cargohold.connector.tenants import tenant_in
from cargohold.errors import NullBlockError, StaleCursorError
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.groups import Groups
from cargohold.protocol import (
    NULL_BLOCK_ID,
    Adapter,
    AttentionKind,
    BlockIds,
    ExtraKey,
    KVCacheBlockView,
    KVCacheGroup,
    KVCacheLayout,
    Prefix,
    RequestView,
    ToolTokens,
    TurnEnd,
)

_GROUP_BYTES = 4
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
        return self._key_of(key[:-_GROUP_BYTES])

    @property
    def group_id(self) -> int | None:
        """KV-cache group whose KV it holds."""
        return None if self._group is None else self._group.index

    @property
    def _group(self) -> KVCacheGroup | None:
        key = self.block.block_hash
        return None if key is None else self._groups[_group_of(key)]


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
    """Tables noted when blocks are allocated, for versions of vLLM that do not hand their KV-cache manager to connectors.

    The manager changes these very lists as blocks come and go, so they are always current.
    """

    def __init__(self, num_groups: int) -> None:
        self._tables: dict[str, Sequence[Sequence[Any]]] = {}
        self._empty: Sequence[Sequence[Any]] = ((),) * num_groups

    def note(self, request_id: str, blocks: Sequence[Sequence[Any]]) -> None:
        """Note a request's tables. They hold until the request is noted again or forgotten."""
        self._tables[request_id] = blocks

    def forget(self, request_id: str) -> None:
        """Forget the tables of a request that has ended."""
        self._tables.pop(request_id, None)

    def blocks(self, request_id: str) -> Sequence[Sequence[Any]]:
        """See ``BlockTables``."""
        return self._tables.get(request_id, self._empty)


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


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


class SeenRequest:
    """A view of one of vLLM's requests; see ``cargohold.protocol.RequestView``.

    Args:
        own: vLLM's request object.

    Attributes:
        own: vLLM's request object.
        request_id: its id.
        turn_end: how it ended.
    """

    __slots__ = ("own", "request_id", "turn_end")

    def __init__(self, own: Any) -> None:
        self.own = own
        self.request_id: str = own.request_id
        self.turn_end = TurnEnd.UNKNOWN

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the user sent."""
        return int(self.own.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return int(self.own.num_tokens)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Their ids, prompt first."""
        token_ids: Sequence[int] = self.own.all_token_ids
        return token_ids

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Digests that vLLM made."""
        hashes: Sequence[bytes] = self.own.block_hashes
        return hashes

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter."""
        lora = getattr(self.own, "lora_request", None)
        return None if lora is None else Adapter(lora.lora_name, lora.lora_int_id)

    @property
    def salt(self) -> str | None:
        """The request's ``cache_salt``."""
        salt: str | None = self.own.cache_salt
        return salt

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What block hashes cover of these tokens besides their ids, in the form of vLLM's own events."""
        keys: tuple[Any, ...] | None = compat.extra_keys(self.own, start, end, 0)[0]
        return () if keys is None else compat.event_keys([keys])[0]

    @property
    def tenant(self) -> str | None:
        """The salt, with which a gateway in front of vLLM keeps its tenants apart; of ours, the tenant's part of it."""
        return tenant_in(getattr(self.own, "cache_salt", None))

    def prefix(self, token_ids: list[int]) -> Prefix:
        """Another prefix that this request's hints are about, with the request's salt and adapter."""
        hashes = compat.hashes_of(self.own, token_ids)
        return Prefix(hashes, token_ids, len(token_ids), self.salt, self.tenant)

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """The trace that it belongs to; ``None`` unless vLLM itself traces."""
        headers: Mapping[str, str] | None = getattr(self.own, "trace_headers", None)
        return headers

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client asks of the connectors."""
        params: Mapping[str, Any] | None = self.own.kv_transfer_params
        return params


_ENDS: Final = {
    "FINISHED_STOPPED": TurnEnd.ANSWER,
    "FINISHED_LENGTH_CAPPED": TurnEnd.LENGTH,
    "FINISHED_IGNORED": TurnEnd.LENGTH,  # its prompt is too long
    "FINISHED_REPETITION": TurnEnd.LENGTH,
    "FINISHED_ABORTED": TurnEnd.ABORT,
    "FINISHED_ERROR": TurnEnd.ERROR,
}


def turn_end_of(own: Any, tool_tokens: ToolTokens) -> TurnEnd:
    """How one of vLLM's requests ended, as far as its scheduler can know.

    A stop string is found by the process in front, which then aborts the request. Calls of tools that a grammar forces are
    plain JSON, without the model's own token.
    """
    sampling = getattr(own, "sampling_params", None)
    end = _ENDS.get(getattr(own.status, "name", ""), TurnEnd.UNKNOWN)
    if end is TurnEnd.ABORT and getattr(sampling, "stop", None):
        return TurnEnd.UNKNOWN
    if end is not TurnEnd.ANSWER:
        return end
    end = tool_tokens.end_of(own.all_token_ids[own.num_prompt_tokens :])
    is_forced = getattr(sampling, "structured_outputs", None) is not None
    return TurnEnd.UNKNOWN if is_forced and end is TurnEnd.ANSWER else end


# --- vLLM's scheduler output as the step of the contract --------------------------------------------------------------


class Share:
    """One request's share of a step; see ``cargohold.protocol.ScheduledRequest``.

    Args:
        request: vLLM's request, before this step is counted as computed.
        num_scheduled_tokens: tokens this step computes.
        layout: the paged KV.
        tables: the requests' block tables, of all groups of vLLM's.
        groups: the KV-cache groups.

    Attributes:
        request_id: the request.
        num_computed_tokens: tokens whose KV is in the device pool before this step.
        num_scheduled_tokens: tokens this step computes.
    """

    __slots__ = (
        "_groups",
        "_hash_tokens",
        "_request",
        "_tables",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "request_id",
    )

    def __init__(
        self, request: Any, num_scheduled_tokens: int, layout: KVCacheLayout, tables: BlockTables, groups: Groups
    ) -> None:
        self._request = request
        self._hash_tokens = layout.hash_block_tokens
        self._tables = tables
        self._groups = groups
        self.request_id: str = request.request_id
        self.num_computed_tokens: int = request.num_computed_tokens
        self.num_scheduled_tokens = num_scheduled_tokens

    @property
    def block_ids(self) -> BlockIds:
        """The request's block tables; made when asked for, since few steps complete a chunk."""
        tables = zip(self._groups.by_number, self._tables.blocks(self.request_id), strict=True)
        return tuple(
            self._states(group, number, table) if group.kind is AttentionKind.RECURRENT else BlockIdTable(table)
            for number, (group, table) in enumerate(tables)
            if group is not None
        )

    def _states(self, group: KVCacheGroup, number: int, table: Sequence[Any]) -> list[int]:
        """Blocks of recurrent state; null where a block does not hold the state at its end.

        vLLM keeps running states, checkpoints and scratch space in the same table. A block holds the state that belongs to its
        place exactly if vLLM's own prefix cache has it under the hash of that place.
        """
        per_block = group.block_tokens // self._hash_tokens
        hashes = self._request.block_hashes
        suffix = number.to_bytes(_GROUP_BYTES, "big")
        ids = [NULL_BLOCK_ID] * len(table)
        for at, block in enumerate(table):
            last = (at + 1) * per_block - 1
            if block.block_hash is not None and last < len(hashes) and block.block_hash == hashes[last] + suffix:
                ids[at] = block.block_id
        return ids


class _Shares(Sequence[Share]):
    """The requests' shares of a step, each made when it is asked for: of many that generate, few complete a chunk."""

    def __init__(
        self,
        counts: Mapping[str, int],
        requests: Mapping[str, SeenRequest],
        of: tuple[KVCacheLayout, BlockTables, Groups],
    ) -> None:
        self._counts = counts
        self._requests = requests
        self._of = of
        self._ids: list[str] | None = None

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, at: int) -> Share: ...

    @overload
    def __getitem__(self, at: slice) -> list[Share]: ...

    def __getitem__(self, at: int | slice) -> Share | list[Share]:
        if self._ids is None:
            self._ids = list(self._counts)
        if isinstance(at, slice):
            return list(map(self._share, self._ids[at]))
        return self._share(self._ids[at])

    def _share(self, request_id: str) -> Share:
        return Share(self._requests[request_id].own, self._counts[request_id], *self._of)


class Step:
    """What vLLM decided for one step; see ``cargohold.protocol.StepView``.

    Args:
        output: vLLM's scheduler output.
        requests: the requests that the connector knows, by id.
        layout: the paged KV.
        tables: the requests' block tables, of all groups of vLLM's.
        groups: the KV-cache groups.
    """

    def __init__(
        self,
        output: Any,
        requests: Mapping[str, SeenRequest],
        layout: KVCacheLayout,
        tables: BlockTables,
        groups: Groups,
    ) -> None:
        counts: dict[str, int] = output.num_scheduled_tokens
        if not counts.keys() <= requests.keys():
            counts = {request_id: num_tokens for request_id, num_tokens in counts.items() if request_id in requests}
        self.num_scheduled_tokens = counts
        self.scheduled: Sequence[Share] = _Shares(counts, requests, (layout, tables, groups))
        self.preempted_req_ids: AbstractSet[str] = output.preempted_req_ids or frozenset()
        self.finished_req_ids: AbstractSet[str] = output.finished_req_ids
