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

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Final, TypeAlias

from cargohold.cache.chunk_table import ON_DEVICE, READY, WRITING, ChunkTable
from cargohold.cache.manager import ChunkKeys, ChunkPins, OffloadKey, Slot, split_key
from cargohold.protocol import NULL_BLOCK_ID, KVCacheLayout

_MAX_PADDING: Final = 0.02
MAX_ROWS: Final = 16
"""Most rows of a block: each is a copy of its own, and a few bytes of the scheduler's memory."""
ALIGNMENT: Final = 256
"""Bytes: copies are fastest where rows begin at multiples of it."""
MAX_PASSED: Final = 64
"""Groups of copies that may not be taken are passed over; at most so many in one search."""


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

    It counts in the largest chunks: what is free is said to be as many as there is room for in any case. So a caller that makes
    room for some chunks may have to do it again, because those that were evicted were smaller.

    Args:
        capacity: maximum number of rows.
        least: rows that the smallest chunk takes.
        most: rows that the largest chunk takes.
        num_rows: number of rows that there are at first; by default all. See ``add_rows``.
        num_more: number of slots besides, of chunks without rows.

    Attributes:
        num_rows: number of rows that there are.
        rows_at: by slot of the table, the rows of its chunk; where each chunk takes one, its number.
        num_ready_rows: number of rows of chunks that can be loaded.
    """

    def __init__(self, capacity: int, least: int, most: int, num_rows: int | None = None, num_more: int = 0) -> None:
        self._least, self.most = least, most
        self.num_rows = self.num_ready_rows = 0
        self._free_rows: list[int] = []
        super().__init__(capacity // least + num_more, num_slots=0)
        self.rows_at: list[Slot] = [()] * self.capacity
        self.add_rows(capacity if num_rows is None else num_rows)
        self.add_slots(num_more)

    @property
    def num_free(self) -> int:
        """Number of chunks, of whatever size, for which there are free rows."""
        return min(len(self._free), self.num_free_rows // self.most)

    @property
    def num_free_rows(self) -> int:
        """Number of free rows."""
        return len(self._free_rows)

    def add_rows(self, count: int) -> None:
        """Add ``count`` free rows after those that there are. Low ones are used first."""
        first, self.num_rows = self.num_rows, self.num_rows + count
        self._free_rows[:0] = range(first, self.num_rows)[::-1]
        self.add_slots(self.num_rows // self._least - self.num_slots)

    def give_rows(self, slot: int, count: int) -> None:
        """Give a chunk that was placed its rows."""
        start = len(self._free_rows) - count
        self.rows_at[slot] = tuple(sorted(self._free_rows[start:]))
        del self._free_rows[start:]

    def publish(self, slots: Sequence[int]) -> None:
        """See ``ChunkTable.publish``."""
        super().publish(slots)
        self.num_ready_rows += self._num_rows_at(slots)

    def remove(self, slots: Sequence[int]) -> None:
        """See ``ChunkTable.remove``."""
        self.num_ready_rows -= self._num_rows_at([slot for slot in slots if self.states[slot] == READY])
        super().remove(slots)

    def clear(self) -> None:
        """See ``ChunkTable.clear``."""
        super().clear()
        self.num_ready_rows = 0

    def check(self) -> None:
        """See ``ChunkTable.check``."""
        super().check()
        used = [row for slot in range(self.capacity) for row in self._rows_at(slot)]
        assert sorted(used + self._all_free()) == list(range(self.num_rows)), "a row is lost, or has two owners"
        assert self._num_rows_at(self.slots_in(READY)) == self.num_ready_rows, "rows are counted wrongly"

    def _all_free(self) -> list[int]:
        return self._free_rows

    def _rows_at(self, slot: int) -> Sequence[int]:
        rows: Sequence[int] = self.rows_at[slot]
        return rows

    def _num_rows_at(self, slots: Sequence[int]) -> int:
        return sum([len(self.rows_at[slot]) for slot in slots])

    def _erase(self, slots: list[int]) -> None:
        super()._erase(slots)
        self.num_ready_rows -= self._num_rows_at(slots)
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
        num_more: see ``RowTable``.
    """

    def __init__(self, num_rows: int, per_chunk: Sequence[int], num_more: int = 0) -> None:
        super().__init__(num_rows, min(per_chunk), max(per_chunk), num_more=num_more)
        self._per_chunk = per_chunk

    def place(self, keys: Sequence[bytes], slots: Sequence[int], parent: int, owner: int = 0) -> None:
        """See ``ChunkTable.place``; the chunks get rows."""
        super().place(keys, slots, parent, owner)
        self.give_each(slots)

    def give_each(self, slots: Sequence[int]) -> None:
        """Give chunks that were placed their rows."""
        for slot, key in zip(slots, self.keys_at(slots), strict=True):
            self.give_rows(slot, self._per_chunk[split_key(key)[1]])


# --- a table in which host memory and the device pool are one cache ---------------------------------------------------


class PooledTable(GroupedRowTable):
    """A table that also lists chunks which only the device holds.

    A chunk that the device holds needs no place in host memory; one that has a place all the same is a *copy*. The table lists
    both, so that a policy knows the uses of all::

                      list                               device loses it
        absent --------------> ON_DEVICE, no place ---------------------------> absent
                                |    ^        |
                           save |    |        | take: its place is needed
                                v    |        v
                 WRITING --publish--> READY, a copy --device loses it--> READY, in host memory alone

    To its policy, a chunk without a place has a continuation, the device, so it is never a victim.

    Args:
        num_rows: number of rows of host memory.
        per_chunk: rows that a chunk takes, by group.
        num_more: how many chunks without a place there may be.

    Attributes:
        num_more: as given.
        is_copy: by slot, whether the device holds the chunk.
        num_listed: number of chunks without a place.
    """

    def __init__(self, num_rows: int, per_chunk: Sequence[int], num_more: int) -> None:
        self._is_even = max(per_chunk) == 1
        super().__init__(num_rows, per_chunk, num_more)
        self.num_more = num_more
        self.is_copy = bytearray(self.capacity)
        self.num_listed = 0
        # Copies in the order in which the device has used them, the last ones last; some are none any more.
        self._copies: deque[Sequence[int]] = deque()
        self._num_noted = 0

    @property
    def num_unused(self) -> int:
        """Number of slots without a chunk, which need not have a place."""
        return len(self._free)

    @property
    def num_places(self) -> int:
        """Number of listed chunks, of whatever size, for which there is room."""
        return self.num_free_rows // self.most

    def sizes_of(self, slots: Sequence[int]) -> list[int]:
        """Return the rows that these chunks take, or would take."""
        return [self._per_chunk[split_key(key)[1]] for key in self.keys_at(slots)]

    def list_absent(self, keys: Sequence[bytes], slots: Sequence[int], parent: int, owner: int = 0) -> None:
        """List absent chunks that the device holds, each the parent of the next, in taken slots."""
        ChunkTable.place(self, keys, slots, parent, owner)
        for slot in slots:
            self.states[slot], self.pins[slot], self.is_copy[slot] = ON_DEVICE, 0, 1
            self.children[slot] += 1
        self.num_writing -= len(slots)
        self.num_listed += len(slots)
        self._count_owned(slots, -1)

    def save(self, slots: Sequence[int]) -> None:
        """Give listed chunks places, for which there must be room; they are being written now."""
        for slot in slots:
            self.states[slot], self.pins[slot] = WRITING, 1
            self.children[slot] -= 1
        self.give_each(slots)
        self.num_writing += len(slots)
        self.num_listed -= len(slots)
        self._count_owned(slots, 1)

    def note_copies(self, slots: Sequence[int]) -> None:
        """Note that the device holds these chunks, and uses them now."""
        if slots:
            for slot in slots:
                self.is_copy[slot] = 1
            self._copies.append(slots)
            self._num_noted += len(slots)
            while self._num_noted > 2 * self.capacity:
                self._num_noted -= len(self._copies.popleft())

    def take_copies(self, num_free_rows: int, may_take: Callable[[Sequence[int]], Sequence[bool]]) -> list[int]:
        """Take the places of copies that the device will lose last, until so many rows are free; return their slots.

        ``may_take`` says which ones may be taken.
        """
        taken: list[int] = []
        passed: list[Sequence[int]] = []
        while self._copies and self.num_free_rows < num_free_rows and len(passed) < MAX_PASSED:
            slots = self._copies.pop()
            self._num_noted -= len(slots)
            noted = [slot for slot in slots if self.is_copy[slot] and self.states[slot] in (WRITING, READY)]
            copies = [slot for slot in noted if self.states[slot] == READY]
            for slot, may in zip(copies, may_take(copies), strict=True):
                if may and self.num_free_rows < num_free_rows:
                    self._unplace(slot)
                    taken.append(slot)
            if left := [slot for slot in noted if self.states[slot] in (WRITING, READY)]:
                passed.append(left)
        self._copies += reversed(passed)
        self._num_noted += sum(map(len, passed))
        return taken

    def give_each(self, slots: Sequence[int]) -> None:
        """See ``GroupedRowTable``."""
        if not self._is_even:
            super().give_each(slots)
            return
        start = len(self._free_rows) - len(slots)
        for slot, row in zip(slots, sorted(self._free_rows[start:]), strict=True):
            self.rows_at[slot] = row
        del self._free_rows[start:]

    def clear(self) -> None:
        """See ``ChunkTable.clear``."""
        super().clear()
        self.is_copy = bytearray(self.capacity)
        self._copies.clear()
        self.num_listed = self._num_noted = 0

    def check(self) -> None:
        """See ``ChunkTable.check``."""
        super().check()
        listed = self.slots_in(ON_DEVICE)
        assert len(listed) == self.num_listed, "chunks without a place are counted wrongly"
        assert all(self.is_copy[slot] and self.rows_at[slot] == () for slot in listed), (
            "a chunk is nowhere, or has a place"
        )

    def _unplace(self, slot: int) -> None:
        """Let a copy be listed without a place."""
        self.num_ready_rows -= self._num_rows_at((slot,))
        self.states[slot] = ON_DEVICE
        self.children[slot] += 1
        self.num_ready -= 1
        self.num_listed += 1
        self._count_owned((slot,), -1)
        self._give_back(slot)

    def remove(self, slots: Sequence[int]) -> None:
        """See ``ChunkTable.remove``."""
        for slot in slots:
            self.is_copy[slot] = 0
            if self.states[slot] == ON_DEVICE:
                self.num_listed -= 1
        super().remove(slots)

    def _erase(self, slots: list[int]) -> None:
        super()._erase(slots)
        for slot in slots:
            self.is_copy[slot] = 0

    def _rows_at(self, slot: int) -> Sequence[int]:
        return (self.rows_at[slot],) if self._is_even and self.rows_at[slot] != () else super()._rows_at(slot)

    def _num_rows_at(self, slots: Sequence[int]) -> int:
        return len(slots) if self._is_even else super()._num_rows_at(slots)

    def _give_back(self, slot: int) -> None:
        if self._is_even and self.rows_at[slot] != ():
            self._free_rows.append(self.rows_at[slot])
            self.rows_at[slot] = ()
        elif not self._is_even:
            super()._give_back(slot)

    def _count_owned(self, slots: Sequence[int], count: int) -> None:
        if self.owners is not None:
            for slot in slots:
                self.used[self.owners[slot]] += count
