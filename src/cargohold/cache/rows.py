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
from typing import Final, TypeAlias

from cargohold.cache.chunk_table import READY, ChunkTable
from cargohold.cache.manager import ChunkKeys, ChunkPins, OffloadKey, Slot, split_key
from cargohold.protocol import NULL_BLOCK_ID, KVCacheLayout

_MAX_PADDING: Final = 0.02
MAX_ROWS: Final = 16
"""Most rows of a block: each is a copy of its own, and a few bytes of the scheduler's memory."""
ALIGNMENT: Final = 256
"""Bytes: copies are fastest where rows begin at multiples of it."""


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
    common = gcd(*sizes)
    return fit_rows(sizes, min(ALIGNMENT, common & -common))


def fit_rows(sizes: Sequence[int], unit: int) -> RowPlan:
    """Return how blocks of these sizes, by group, lie in rows of a multiple of ``unit`` bytes."""
    best = RowPlan(max(sizes), (1,) * len(sizes))
    least = _padding(best, sizes)
    lengths = {-(-size // count // unit) * unit for size in sizes for count in range(1, MAX_ROWS + 1)}
    for length in sorted((length for length in lengths if length <= min(sizes)), reverse=True):
        plan = RowPlan(length, tuple(-(-size // length) for size in sizes))
        padding = _padding(plan, sizes)
        if least <= _MAX_PADDING or plan.most > MAX_ROWS:
            break
        if padding < least:
            best, least = plan, padding
    return best


def _padding(plan: RowPlan, sizes: Sequence[int]) -> float:
    return 1 - sum(sizes) / (plan.row_bytes * sum(plan.per_block))


# --- which rows a copy reads or writes --------------------------------------------------------------------------------


Places: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Ids of device blocks; the rows of each in host memory, one after the other; and the group of each, or nothing where a block
is a row, whatever its group."""


def lie_in_rows(slots: Sequence[Slot]) -> bool:
    """Whether chunks lie in rows of their own, because groups' blocks differ in size."""
    return bool(slots) and not isinstance(slots[0], int)


def rows_to_load(
    pins: ChunkPins, wanted: Sequence[tuple[ChunkKeys, Sequence[int]]], blocks_per_chunk: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows of blocks, those of each block in order, and their groups, as in ``Places``.

    Args:
        pins: the chunks that contain them, and no others, in this order.
        wanted: per group, its keys, and the blocks by their numbers in the request.
        blocks_per_chunk: blocks per chunk.
    """
    if not lie_in_rows(pins.slots) and (blocks_per_chunk == 1 or not pins.slots):
        return tuple(pins.slots), ()
    slot_of = dict(zip(pins.keys, pins.slots, strict=True))
    places = [
        (keys.group.index, slot_of[keys.keys[number // blocks_per_chunk]], number % blocks_per_chunk)
        for keys, numbers in wanted
        for number in numbers
    ]
    if not lie_in_rows(pins.slots):
        return tuple([slot * blocks_per_chunk + at for _, slot, at in places]), ()
    rows = [row for _, slot, at in places for row in _rows_of_block(slot, at, blocks_per_chunk)]
    return tuple(rows), tuple([group for group, _, _ in places])


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
        return tuple(blocks), tuple(chain.from_iterable(rows)), tuple(groups)
    if per_chunk == 1:
        return tuple([block_ids[start] for start in starts]), tuple(slots), ()
    pairs = [
        (block_id, slot * per_chunk + at)
        for start, slot in zip(starts, slots, strict=True)
        for at, block_id in enumerate(block_ids[start : start + per_chunk])
        if block_id != NULL_BLOCK_ID
    ]
    return tuple([block_id for block_id, _ in pairs]), tuple([row for _, row in pairs]), ()


def _rows_of_block(rows: tuple[int, ...], at: int, blocks_per_chunk: int) -> tuple[int, ...]:
    """Return the rows of block number ``at`` of a chunk."""
    count = len(rows) // blocks_per_chunk
    return rows[at * count : (at + 1) * count]


# --- the table of a tier whose chunks differ in size ------------------------------------------------------------------


class RowTable(ChunkTable):
    """A table of chunks that take rows, as many as each needs.

    It counts in the largest chunks: what is free is said to be as many as there is room for in any case. So whoever makes room
    for some chunks may have to do it again, because those that were evicted were smaller.

    Args:
        capacity: maximum number of rows.
        least: rows that the smallest chunk takes.
        most: rows that the largest chunk takes.
        num_rows: number of rows that there are at first; by default all. See ``add_rows``.

    Attributes:
        num_rows: number of rows that there are.
        rows_at: by slot of the table, the rows of its chunk.
        num_ready_rows: number of rows of chunks that can be loaded.
    """

    def __init__(self, capacity: int, least: int, most: int, num_rows: int | None = None) -> None:
        self._least, self._most = least, most
        self.num_rows = self.num_ready_rows = 0
        self._free_rows: list[int] = []
        super().__init__(capacity // least, num_slots=0)
        self.rows_at: list[tuple[int, ...]] = [()] * self.capacity
        self.add_rows(capacity if num_rows is None else num_rows)

    @property
    def num_free(self) -> int:
        """Number of chunks, of whatever size, for which there are free rows."""
        return min(len(self._free), self.num_free_rows // self._most)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def add_rows(self, count: int) -> None:
        """Add ``count`` free rows behind those that there are. Low ones are used first."""
        first, self.num_rows = self.num_rows, self.num_rows + count
        self._free_rows[:0] = range(first, self.num_rows)[::-1]
        self.add_slots(self.num_rows // self._least - self.num_slots)

    def give_rows(self, slot: int, count: int) -> None:
        """Give a chunk that was placed its rows."""
        start = len(self._free_rows) - count
        self.rows_at[slot] = tuple(sorted(self._free_rows[start:]))
        del self._free_rows[start:]

    def publish(self, slots: Sequence[int]) -> None:
        super().publish(slots)
        self.num_ready_rows += sum(len(self.rows_at[slot]) for slot in slots)

    def remove(self, slots: Sequence[int]) -> None:
        self.num_ready_rows -= sum(len(self.rows_at[slot]) for slot in slots if self.states[slot] == READY)
        super().remove(slots)

    def clear(self) -> None:
        super().clear()
        self.num_ready_rows = 0

    def check(self) -> None:
        """See ``ChunkTable.check``."""
        super().check()
        used = [row for rows in self.rows_at for row in rows]
        assert sorted(used + self._all_free()) == list(range(self.num_rows)), "a row is lost, or has two owners"
        ready = sum(len(self.rows_at[slot]) for slot in self.slots_in(READY))
        assert ready == self.num_ready_rows, "rows are counted wrongly"

    def _all_free(self) -> list[int]:
        return self._free_rows

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


class GroupedRowTable(RowTable):
    """The same where a chunk takes what its group needs.

    Args:
        num_rows: number of rows.
        per_chunk: rows that a chunk takes, by group.
    """

    def __init__(self, num_rows: int, per_chunk: Sequence[int]) -> None:
        super().__init__(num_rows, min(per_chunk), max(per_chunk))
        self._per_chunk = per_chunk

    def place(self, keys: Sequence[bytes], slots: Sequence[int], parent: int, owner: int = 0) -> None:
        super().place(keys, slots, parent, owner)
        for key, slot in zip(keys, slots, strict=True):
            self.give_rows(slot, self._per_chunk[split_key(key)[1]])
