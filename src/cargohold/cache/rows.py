"""Rows of host memory: how many a block of each KV-cache group takes, and which hold which block.

Where all groups' blocks have one size, a block is a row, and block ``i`` of the chunk in slot ``s`` is row ``s * k + i``, with
``k = blocks_per_chunk``. Where sizes differ, rows are smaller, a block takes as many as it needs, anywhere, and a chunk's slot
is the tuple of its rows::

    group 0, blocks of 5 rows    |aaaaa|        host memory    |a|b|a|a|c|b|a|b|a|c|c| |b| | |
    group 1, blocks of 4 rows    |bbbb|
    group 2, blocks of 3 rows    |ccc|

So any free row serves any group, nothing is lost between rows, and of each block less than a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Final, NamedTuple

from cargohold.cache.chunk_table import READY, ChunkTable
from cargohold.cache.manager import OffloadKey, Slot, split_key
from cargohold.protocol import NULL_BLOCK_ID, KVCacheLayout

_MAX_PADDING: Final = 0.02
_MAX_ROWS: Final = 16
"""Most rows of a block: each is a copy of its own, and a few bytes of the scheduler's memory."""
_ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How blocks lie in host memory.

    Attributes:
        row_bytes: bytes of a row on one worker; no more than any group's blocks have.
        per_block: rows of a block, by group. All 1 where a row is a block of whatever group.
    """

    row_bytes: int
    per_block: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """Whether each block is one row."""
        return max(self.per_block) == 1

    @property
    def most(self) -> int:
        """Rows of a block of the largest group."""
        return max(self.per_block)

    def token_bytes(self, layout: KVCacheLayout) -> float:
        """Return the bytes that one token's KV takes in a tier, for all workers, in the blocks of all groups."""
        rows = sum(count / group.block_tokens for count, group in zip(self.per_block, layout.groups, strict=True))
        return rows * self.row_bytes * layout.num_shards

    def mean_block_bytes(self, layout: KVCacheLayout) -> float:
        """Return the mean bytes of the blocks that a long prompt fills, on one worker."""
        num_blocks = sum(1 / group.block_tokens for group in layout.groups)
        return self.token_bytes(layout) / layout.num_shards / num_blocks


def even_rows(layout: KVCacheLayout) -> RowPlan:
    """Return the plan in which each block is a row, as large as a block of the largest group."""
    return RowPlan(layout.block_bytes, (1,) * len(layout.groups))


def plan_rows(layout: KVCacheLayout) -> RowPlan:
    """Return how a layout's blocks lie in host memory: with the fewest rows that leave hardly anything empty.

    The first row of a block, and the last, begin and end with the block; so rows are no longer than any group's blocks.
    """
    sizes = layout.group_bytes
    best = even_rows(layout)
    least = _padding(best, sizes)
    common = gcd(*sizes)
    unit = min(_ALIGNMENT, common & -common)  # copies are fastest where rows begin at whole numbers
    lengths = {-(-size // count // unit) * unit for size in sizes for count in range(1, _MAX_ROWS + 1)}
    for length in sorted((length for length in lengths if length <= min(sizes)), reverse=True):
        plan = RowPlan(length, tuple(-(-size // length) for size in sizes))
        padding = _padding(plan, sizes)
        if least <= _MAX_PADDING or plan.most > _MAX_ROWS:
            break
        if padding < least:
            best, least = plan, padding
    return best


def _padding(plan: RowPlan, sizes: Sequence[int]) -> float:
    return 1 - sum(sizes) / (plan.row_bytes * sum(plan.per_block))


# --- which rows a copy reads or writes --------------------------------------------------------------------------------


class Places(NamedTuple):
    """Device blocks, and where they lie in host memory.

    Attributes:
        block_ids: ids of device blocks.
        rows: the rows of each block, one after the other.
        groups: the group of each block; empty where a block is a row, whatever its group.
    """

    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    groups: tuple[int, ...] = ()


def lie_in_rows(slots: Sequence[Slot]) -> bool:
    """Whether chunks lie in rows of their own, because groups' blocks differ in size."""
    return bool(slots) and not isinstance(slots[0], int)


def rows_to_load(
    numbers: Sequence[int], chunks: Sequence[int], slots: Sequence[Slot], blocks_per_chunk: int
) -> Sequence[int]:
    """Return the rows of blocks of one group, those of each block in order.

    Args:
        numbers: the blocks, by their numbers in the request.
        chunks: the numbers of the chunks that contain them, each once.
        slots: the chunks' slots.
        blocks_per_chunk: blocks per chunk.
    """
    if lie_in_rows(slots):
        rows_of = dict(zip(chunks, slots, strict=True))
        places = [divmod(number, blocks_per_chunk) for number in numbers]
        return [row for chunk, at in places for row in _rows_of_block(rows_of[chunk], at, blocks_per_chunk)]
    if blocks_per_chunk == 1:
        return slots
    slot_of = dict(zip(chunks, slots, strict=True))
    return [slot_of[number // blocks_per_chunk] * blocks_per_chunk + number % blocks_per_chunk for number in numbers]


def rows_to_store(
    block_ids: Sequence[int], starts: Sequence[int], keys: Sequence[OffloadKey], slots: Sequence[Slot], per_chunk: int
) -> Places:
    """Return the device blocks to copy for some chunks, and their rows. Null blocks are left out.

    Args:
        block_ids: ids of device blocks.
        starts: for each chunk, where in ``block_ids`` its blocks begin.
        keys: the chunks, parallel to ``starts``.
        slots: their slots, parallel to ``starts``.
        per_chunk: blocks per chunk.
    """
    if lie_in_rows(slots):
        copies = [
            (block_id, _rows_of_block(rows, at, per_chunk), split_key(key)[1])
            for start, key, rows in zip(starts, keys, slots, strict=True)
            for at, block_id in enumerate(block_ids[start : start + per_chunk])
            if block_id != NULL_BLOCK_ID
        ]
        blocks, rows, groups = zip(*copies, strict=True) if copies else ((), (), ())
        return Places(tuple(blocks), tuple(chain.from_iterable(rows)), tuple(groups))
    if per_chunk == 1:
        return Places(tuple([block_ids[start] for start in starts]), tuple(slots))
    pairs = [
        (block_id, slot * per_chunk + at)
        for start, slot in zip(starts, slots, strict=True)
        for at, block_id in enumerate(block_ids[start : start + per_chunk])
        if block_id != NULL_BLOCK_ID
    ]
    return Places(tuple([block_id for block_id, _ in pairs]), tuple([row for _, row in pairs]))


def _rows_of_block(rows: tuple[int, ...], at: int, blocks_per_chunk: int) -> tuple[int, ...]:
    """Return the rows of block number ``at`` of a chunk."""
    count = len(rows) // blocks_per_chunk
    return rows[at * count : (at + 1) * count]


# --- the table of a tier whose chunks differ in size ------------------------------------------------------------------


class RowTable(ChunkTable):
    """A table of chunks that take rows, as many as their group needs.

    It counts in chunks of the largest group: what is free is said to be as many as there is room for in any case. So whoever
    makes room for some chunks may have to do it again, because those that were evicted were smaller.

    Args:
        num_rows: number of rows.
        per_chunk: rows that a chunk takes, by group.

    Attributes:
        rows_at: by slot of the table, the rows of its chunk.
        num_ready_rows: number of rows of chunks that can be loaded.
    """

    def __init__(self, num_rows: int, per_chunk: Sequence[int]) -> None:
        self.num_rows = num_rows
        self._per_chunk, self._most = per_chunk, max(per_chunk)
        self._free_rows = list(range(num_rows))[::-1]
        self.num_ready_rows = 0
        super().__init__(num_rows // min(per_chunk))
        self.rows_at: list[tuple[int, ...]] = [()] * self.capacity

    @property
    def num_free(self) -> int:
        """Number of chunks, of whatever group, for which there are free rows."""
        return len(self._free_rows) // self._most

    def place(self, keys: Sequence[bytes], slots: Sequence[int], parent: int, owner: int = 0) -> None:
        """See ``ChunkTable.place``; the chunks get rows."""
        super().place(keys, slots, parent, owner)
        free = self._free_rows
        for key, slot in zip(keys, slots, strict=True):
            start = len(free) - self._per_chunk[split_key(key)[1]]
            self.rows_at[slot] = tuple(sorted(free[start:]))
            del free[start:]

    def publish(self, slots: Sequence[int]) -> None:
        """See ``ChunkTable.publish``."""
        super().publish(slots)
        self.num_ready_rows += sum(len(self.rows_at[slot]) for slot in slots)

    def remove(self, slots: Sequence[int]) -> None:
        """See ``ChunkTable.remove``."""
        self.num_ready_rows -= sum(len(self.rows_at[slot]) for slot in slots if self.states[slot] == READY)
        super().remove(slots)

    def clear(self) -> None:
        """See ``ChunkTable.clear``."""
        super().clear()
        self.num_ready_rows = 0

    def check(self) -> None:
        """See ``ChunkTable.check``."""
        super().check()
        used = [row for rows in self.rows_at for row in rows]
        assert sorted(used + self._free_rows) == list(range(self.num_rows)), "a row is lost, or has two owners"
        ready = sum(len(self.rows_at[slot]) for slot in self.slots_in(READY))
        assert ready == self.num_ready_rows, "rows are counted wrongly"

    def _erase(self, slots: list[int]) -> None:
        super()._erase(slots)
        self.num_ready_rows -= sum(len(self.rows_at[slot]) for slot in slots)
        for slot in slots:
            self._give_back(slot)

    def _free_again(self, slot: int) -> None:
        super()._free_again(slot)
        self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._free_rows += self.rows_at[slot][::-1]
        self.rows_at[slot] = ()
