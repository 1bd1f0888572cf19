"""Gives requests blocks of the device pool, lets them share prefixes, and takes the blocks back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cargohold.blocks import ABSENT, READY, GroupUnits, longest_hit
from cargohold.engine.core.block_pool import BlockPool, KVCacheBlock
from cargohold.engine.core.request import Request
from cargohold.protocol import MEDIUM_DEVICE, BlockIds, BlockRemoved, BlockStored, KVCacheGroup, KVCacheLayout, KVEvent


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
        ids: their ids; kept next to them because workers and connectors need the ids alone, every step.
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
            if not block.is_null and block.prefix is None and pool.cache_block(block, hashes[at], self.group.index):
                new.append(at)
        self.num_cached = max(self.num_cached, num_full)
        return new


# --- gives requests blocks of the device pool -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalHit:
    """The prefix of a request that the device pool already holds. Takes no references: use it before the pool changes.

    Attributes:
        num_tokens: length of the prefix.
        blocks: per group, the prefix's blocks; the null block where none is needed.
    """

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]


class _PoolStates:
    """Presence of one request's blocks of one group in the pool; see ``cargohold.blocks.UnitStates``."""

    def __init__(self, pool: BlockPool, group: KVCacheGroup, hashes: Sequence[bytes]) -> None:
        self._pool = pool
        self._group_id = group.index
        self._hashes = hashes

    def run(self, first: int, end: int) -> bytes:
        num_ready = 0
        for block_hash in self._hashes[first:end]:
            if not self._pool.contains(block_hash, self._group_id):
                break
            num_ready += 1
        return bytes([READY]) * num_ready

    def window(self, first: int, end: int) -> bytes:
        return bytes(
            READY if self._pool.contains(block_hash, self._group_id) else ABSENT
            for block_hash in self._hashes[first:end]
        )


class KVCacheManager:
    """Block tables of all requests over one device pool.

    Args:
        layout: the paged KV cache.
        prefix_caching: whether blocks may be found again by their prefix.
        emit_events: whether to collect KV events for ``take_events``.
        emit_salted_events: whether that includes events of salted requests' blocks.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        prefix_caching: bool = True,
        emit_events: bool = False,
        emit_salted_events: bool = False,
    ) -> None:
        self.layout = layout
        self.pool = BlockPool(layout.num_blocks, on_removed=self._note_removed if emit_events else None)
        self._null_block = self.pool.null_block
        self._prefix_caching = prefix_caching
        self._emit_events = emit_events
        self._emit_salted_events = emit_salted_events
        # Cached blocks of salted requests that are not published, by hash and group.
        self._unpublished: set[tuple[bytes, int]] = set()
        self._events: list[KVEvent] = []
        self._tables: dict[str, tuple[BlockTable, ...]] = {}

    def block_ids(self, request_id: str) -> BlockIds:
        """The request's block tables as ids; the manager's own lists, to be read at once or copied."""
        return tuple([table.ids for table in self.tables(request_id)])

    def tables(self, request_id: str) -> tuple[BlockTable, ...]:
        """The request's block tables; empty ones if it holds no blocks."""
        tables = self._tables.get(request_id)
        return tuple(BlockTable(group) for group in self.layout.groups) if tables is None else tables

    def holds_blocks(self, request: Request) -> bool:
        return request.request_id in self._tables

    def find_local_hit(self, request: Request) -> LocalHit:
        """The longest prefix of the request that the pool holds, leaving at least its last token to compute."""
        groups = self.layout.groups
        if not self._prefix_caching:
            return LocalHit(0, tuple([] for _ in groups))
        hashes = [self._hashes(request, group) for group in groups]
        units = [
            GroupUnits(group, group.block_tokens, _PoolStates(self.pool, group, group_hashes))
            for group, group_hashes in zip(groups, hashes, strict=True)
        ]
        num_tokens = longest_hit(units, request.num_tokens, limit_tokens=request.num_tokens - 1).num_tokens
        return LocalHit(
            num_tokens,
            tuple(self._hit_blocks(group, of, num_tokens) for group, of in zip(groups, hashes, strict=True)),
        )

    def allocate_first(
        self, request: Request, hit: LocalHit, num_external_tokens: int, num_tokens: int, num_spare_blocks: int
    ) -> bool:
        """Give a request that holds no blocks its hit and new blocks, so that ``num_tokens`` tokens fit.

        Positions that no query after the hit and the ``num_external_tokens`` will read get null blocks.

        Returns:
            Whether there was room, with ``num_spare_blocks`` left over; if not, nothing was changed.
        """
        assert request.request_id not in self._tables
        null = self._null_block
        tables = tuple(BlockTable(group) for group in self.layout.groups)
        num_new = []
        # The last token is computed even if the KV of all tokens is there, so the tokens in its window must be there.
        next_query = min(hit.num_tokens + num_external_tokens, request.num_tokens - 1)
        for table, blocks in zip(tables, hit.blocks, strict=True):
            table.append(blocks)
            num_skipped = table.group.num_skipped_tokens(next_query) // table.group.block_tokens
            table.append([null] * (num_skipped - len(blocks)))
            table.skip(next_query, null)
            table.num_cached = len(blocks)
            num_new.append(table.num_missing_blocks(num_tokens))
        hit_blocks = [block for table in tables for block in table.held_blocks()]
        num_taken = sum(num_new) + sum(block.ref_cnt == 0 for block in hit_blocks)
        if num_taken + num_spare_blocks > self.pool.num_free_blocks:
            return False
        # Touch before allocating, or the allocation might evict the hit.
        self.pool.touch_ids([block.block_id for block in hit_blocks])
        for table, count in zip(tables, num_new, strict=True):
            table.append(self.pool.allocate(count))
        self._tables[request.request_id] = tables
        return True

    def allocate_more(self, request: Request, num_tokens: int, num_spare_blocks: int = 0) -> bool:
        """Make room for ``num_tokens`` tokens of a request that holds blocks; frees blocks that fell out of its windows.

        Returns:
            Whether there was room, with ``num_spare_blocks`` left over; if not, nothing was allocated.
        """
        tables = self._tables[request.request_id]
        for table in tables:
            passed = table.skip(request.num_computed_tokens, self._null_block)
            if passed:
                self.pool.free_ids([block.block_id for block in passed])
        num_new = [table.num_missing_blocks(num_tokens) for table in tables]
        if sum(num_new) + num_spare_blocks > self.pool.num_free_blocks:
            return False
        for table, count in zip(tables, num_new, strict=True):
            if count:
                table.append(self.pool.allocate(count))
        return True

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Put the full blocks of the request's first ``num_tokens`` tokens, whose KV is in place, into the prefix cache."""
        if not self._prefix_caching:
            return
        for table in self._tables[request.request_id]:
            if num_tokens // table.group.block_tokens <= table.num_cached:
                continue  # as in most steps while generating
            hashes = self._hashes(request, table.group)
            new = table.cache_full_blocks(self.pool, hashes, num_tokens)
            if self._emit_events:
                self._note_stored(request, table.group, hashes, new)

    def free(self, request: Request) -> None:
        """Give back all blocks of the request, last first, so that the ends of prefixes are evicted before their starts."""
        for table in self._tables.pop(request.request_id, ()):
            self.pool.free_ids([block.block_id for block in table.held_blocks()])

    def requests_using(self, block_ids: frozenset[int]) -> list[str]:
        return [
            request_id
            for request_id, tables in self._tables.items()
            if any(not block_ids.isdisjoint(table.ids) for table in tables)
        ]

    def reference_counts(self) -> Counter[int]:
        """References that requests hold, per block."""
        return Counter(
            block.block_id
            for tables in self._tables.values()
            for table in tables
            for block in table.blocks
            if not block.is_null
        )

    def take_events(self) -> list[KVEvent]:
        """KV events of the device pool since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Verify that no block is lost. Raises ``AssertionError``."""
        self.pool.check()
        for tables in self._tables.values():
            for table in tables:
                assert table.ids == [block.block_id for block in table.blocks]
                assert all(block.is_null or block.ref_cnt > 0 for block in table.blocks)

    def _hashes(self, request: Request, group: KVCacheGroup) -> Sequence[bytes]:
        per_block = group.block_tokens // self.layout.hash_block_tokens
        return request.block_hashes if per_block == 1 else request.block_hashes[per_block - 1 :: per_block]

    def _hit_blocks(self, group: KVCacheGroup, hashes: Sequence[bytes], num_tokens: int) -> list[KVCacheBlock]:
        num_skipped = group.num_skipped_tokens(num_tokens) // group.block_tokens
        blocks = [self._null_block] * num_skipped
        for block_hash in hashes[num_skipped : num_tokens // group.block_tokens]:
            block = self.pool.lookup(block_hash, group.index)
            assert block is not None, "a block of the hit vanished"
            blocks.append(block)
        return blocks

    def _note_stored(
        self, request: Request, group: KVCacheGroup, hashes: Sequence[bytes], blocks: Iterable[int]
    ) -> None:
        """Note that a request's blocks with these numbers entered the prefix cache."""
        if request.salt is None or self._emit_salted_events:
            self._events.extend(self._stored_event(request, group, hashes, at) for at in blocks)
        else:
            self._unpublished.update((hashes[at], group.index) for at in blocks)

    def _stored_event(self, request: Request, group: KVCacheGroup, hashes: Sequence[bytes], at: int) -> BlockStored:
        start = at * group.block_tokens
        end = start + group.block_tokens
        return BlockStored(
            block_hashes=(hashes[at],),
            parent_block_hash=hashes[at - 1] if at else None,
            token_ids=tuple(request.all_token_ids[start:end]),
            block_tokens=group.block_tokens,
            group=group.index,
            medium=MEDIUM_DEVICE,
            adapter=request.adapter,
            extra_keys=(request.extra_keys(start, end),),
        )

    def _note_removed(self, block_hash: bytes, group_id: int) -> None:
        if (block_hash, group_id) in self._unpublished:
            self._unpublished.remove((block_hash, group_id))
        else:
            self._events.append(BlockRemoved((block_hash,), group_id, MEDIUM_DEVICE))


def max_held_blocks(group: KVCacheGroup, num_tokens: int, max_step_tokens: int) -> int:
    """Most blocks of ``group`` that a request of ``num_tokens`` tokens holds if each step computes ``max_step_tokens``.

    Full attention keeps all blocks. A window keeps the tokens that the step's first query still reads, and the step's own
    tokens; the first and the last of their blocks may each lie partly outside.
    """
    all_blocks = -(-num_tokens // group.block_tokens)
    if group.window_tokens is None:
        return all_blocks
    return min(all_blocks, -(-(group.window_tokens - 1 + max_step_tokens) // group.block_tokens) + 1)
