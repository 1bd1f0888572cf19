"""Slots of a disk: how large they are, and which chunk lies in which.

Where all chunks have about one size, a slot is as large as a chunk, and each chunk has one. Where groups' chunks differ in
size, or chunks are packed, slots are smaller, and a chunk takes as many as it needs, anywhere, as in host memory
(``cache.rows``). Its header is at the first one, and each has a link to the next::

    segment-00000.data       |a0  |a1  |a2  |b0  |b1  |c0  |d0  |c1  |
    segment-00000.headers    |a   |    |    |b   |    |c   |d   |    |
                             |1 a |2 a |- a |4 b |- b |7 c |- d |- c |    links: the next slot, and whose they are

A header is written last and wiped first. A chunk is there if all its links are, and its own. What else is left of a chunk that
was evicted counts for nothing; its first slot is the first to be used again, so that its header is wiped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from cargohold.cache.rows import RowTable, fit_rows
from cargohold.tiers.chunk_format import HEADER_BYTES, Header, tag_of
from cargohold.tiers.disk.files import Segment
from cargohold.tiers.memory import PAGE_BYTES, padded
from cargohold.tiers.packing import least_part, packed_sizes


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How chunks lie in slots.

    Attributes:
        slot_bytes: bytes of a slot; whole pages.
        least: slots of the smallest chunk.
        most: slots of the largest chunk.
        packs: whether chunks may be packed, and then take fewer.
    """

    slot_bytes: int
    least: int = 1
    most: int = 1
    packs: bool = False

    @classmethod
    def of(cls, chunk_sizes: Sequence[int]) -> SlotPlan:
        """Return the plan for chunks of these sizes, of which there are about as many of each."""
        rows = fit_rows([padded(size) for size in chunk_sizes], PAGE_BYTES)
        return cls(rows.row_bytes, min(rows.per_block), rows.most)

    @classmethod
    def of_packed(cls, chunk_sizes: Sequence[int], number_types: Sequence[str]) -> SlotPlan:
        """Return the plan for packed chunks of these sizes and types: with slots such that little of the last one is empty."""
        expected = packed_sizes(chunk_sizes, number_types)
        lengths = {padded(-(-size // count)) for size in expected for count in range(1, MOST_PACKED + 1)}

        def taken(slot_bytes: int) -> float:
            # Of some chunks a little more is left than is expected.
            return sum((slots_for(size, slot_bytes) + _MORE) * (slot_bytes + _SLOT_EXTRAS) for size in expected)

        fitting = [length for length in lengths if slots_for(max(chunk_sizes), length) <= MOST_PACKED]
        return cls.with_slots(min(fitting, key=taken), chunk_sizes)

    @classmethod
    def with_slots(cls, slot_bytes: int, chunk_sizes: Sequence[int]) -> SlotPlan:
        """Return the plan for chunks of these sizes, packed or not, in slots of ``slot_bytes``."""
        least = slots_for(least_part(min(chunk_sizes)), slot_bytes)
        return cls(slot_bytes, least, slots_for(max(chunk_sizes), slot_bytes), packs=True)

    def count_for(self, num_bytes: int) -> int:
        """Return how many slots a chunk takes; never fewer than the smallest one, which limits how many chunks there can be."""
        return max(self.least, slots_for(num_bytes, self.slot_bytes))

    @property
    def link_bytes(self) -> int:
        return _LINK.size if self.most > 1 else 0

    def details_room(self, num_bytes: int) -> int:
        """Return the room at each slot for a chunk's details, which lie at all of its slots together."""
        return num_bytes if self.least == 1 else padded(-(-num_bytes // self.least), 8 if self.packs else HEADER_BYTES)


Found: TypeAlias = tuple[Header, tuple[int, ...]]
"""A chunk's header, and its slots."""
MOST_PACKED: Final = 24
"""Most slots of a chunk that may be packed: each is a number in memory."""
_MORE: Final = 0.1
_SLOT_EXTRAS: Final = HEADER_BYTES + 96
"""About how many bytes a slot takes besides its part of a payload."""
_NO_HEADER: Final = bytes(HEADER_BYTES)
_LINK: Final = struct.Struct("<II")
_END: Final = 2**32 - 1
ONE_EACH: Final = SlotPlan(PAGE_BYTES)
"""The plan of chunks that each take one slot, however large."""


def slots_for(num_bytes: int, slot_bytes: int) -> int:
    """Return how many slots of a size a payload takes."""
    return max(1, -(-num_bytes // slot_bytes))


def runs_of(slots: Sequence[int], per_segment: int) -> Iterator[tuple[int, int]]:
    """Yield the neighbours among a chunk's slots, which are read and written together: the first one, and how many."""
    first, count = slots[0], 0
    for slot in slots:
        if slot != first + count or (count and slot % per_segment == 0):
            yield first, count
            first, count = slot, 0
        count += 1
    yield first, count


class Place:
    """A chunk's slots in the files. All methods raise ``OSError``.

    Args:
        slots: the slots, in order.
        runs: the neighbours among them: their segment, the number of the first one in it, and how many.
    """

    def __init__(self, slots: Sequence[int], runs: Sequence[tuple[Segment, int, int]]) -> None:
        self._slots, self._runs = slots, runs

    def wipe(self) -> None:
        """Mark all slots as empty."""
        for segment, at, count in self._runs:
            segment.write_header(at, _NO_HEADER * count)

    def read_header(self) -> bytes:
        """Return the chunk's header."""
        segment, at, _ = self._runs[0]
        return segment.read_header(at)

    def write_header(self, header: bytes) -> None:
        """Write the chunk's links, and then its header: now it is there."""
        if len(self._slots) > 1:
            self._write_links(tag_of(header))
        segment, at, _ = self._runs[0]
        segment.write_header(at, header)

    def _write_links(self, tag: int) -> None:
        links = [_LINK.pack(following, tag) for following in (*self._slots[1:], _END)]
        begin = 0
        for segment, at, count in self._runs:
            segment.write_links(at, b"".join(links[begin : begin + count]))
            begin += count

    def read_payload(self, into: memoryview) -> None:
        """Read the chunk's payload, as long as ``into``."""
        begin = 0
        for segment, at, count in self._runs:
            end = begin + count * segment.slot_bytes
            segment.read_payload(at, into[begin:end])
            begin = end

    def write_payload(self, payload: memoryview) -> None:
        """Write the chunk's payload."""
        begin = 0
        for segment, at, count in self._runs:
            end = begin + count * segment.slot_bytes
            segment.write_payload(at, payload[begin:end])
            begin = end

    def read_details(self) -> bytes:
        """Return what lies in the room for the chunk's details."""
        return b"".join([segment.read_details(at) for segment, at in self._each()])

    def write_details(self, details: bytes) -> None:
        """Write the chunk's details to as many slots as they need."""
        for segment, at in self._each():
            part, details = details[: segment.details_bytes], details[segment.details_bytes :]
            if part:
                segment.write_details(at, part)

    def _each(self) -> Iterator[tuple[Segment, int]]:
        return ((segment, slot) for segment, at, count in self._runs for slot in range(at, at + count))


def place_in(segments: Sequence[Segment], slots: Sequence[int]) -> Place:
    """Return the place of a chunk that has these slots of equal segments."""
    per_segment = segments[0].num_slots
    runs = [(slots[0], 1)] if len(slots) == 1 else runs_of(slots, per_segment)
    return Place(slots, [(segments[first // per_segment], first % per_segment, count) for first, count in runs])


class Links:
    """The links of all slots, as they are on the disk. Those that cannot be read lead nowhere.

    Args:
        segments: the segments, in the order of their slots; ``None`` for those that cannot be opened.
        per_segment: number of slots in a segment.

    Attributes:
        num_slots: number of slots.
    """

    def __init__(self, segments: Sequence[Segment | None], per_segment: int) -> None:
        self.num_slots = per_segment * len(segments)
        self._links = bytearray(_LINK.size * self.num_slots)
        for number, segment in enumerate(segments):
            with suppress(OSError):
                table = b"" if segment is None else segment.read_links()
                first = _LINK.size * per_segment * number
                self._links[first : first + len(table)] = table

    def follow(self, header: Header, first: int, count: int) -> tuple[int, ...] | None:
        """Return the slots of a chunk that takes ``count`` of them, by its header and first one; ``None`` if one is not its."""
        if count == 1:
            return (first,)
        tag, slots, at = tag_of(header.pack()), [], first
        for _ in range(count):
            if at >= self.num_slots:
                return None
            following, of = _LINK.unpack_from(self._links, at * _LINK.size)
            if of != tag:
                return None
            slots.append(at)
            at = following
        return tuple(slots) if at == _END else None


def gather(found: Iterable[tuple[Header, int]], links: Links, plan: SlotPlan) -> tuple[list[Found], list[int]]:
    """Find the slots of chunks.

    Args:
        found: sound headers of one namespace, and where they are.
        links: the links.
        plan: how chunks lie in slots.

    Returns:
        The chunks that are there as a whole; and the slots with headers of others.
    """
    whole: list[Found] = []
    left: list[int] = []
    is_claimed = bytearray(links.num_slots)
    for header, first in found:
        count = plan.count_for(header.num_bytes)
        slots = links.follow(header, first, count) if count <= plan.most else None
        if slots is None or any(is_claimed[slot] for slot in slots):
            left.append(first)
            continue
        whole.append((header, slots))
        for slot in slots:
            is_claimed[slot] = True
    return whole, left


class SlotTable(RowTable):
    """A table of chunks that take several slots of a disk. First slots of chunks that are gone are used first.

    Args:
        capacity: maximum number of slots; at first there are none.
        plan: how many slots chunks take.
    """

    def __init__(self, capacity: int, plan: SlotPlan) -> None:
        self._firsts: list[int] = []
        super().__init__(capacity, plan.least, plan.most, num_rows=0)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows) + len(self._firsts)

    def has_room(self, count: int) -> bool:
        """Whether a chunk that takes ``count`` slots can be placed."""
        return bool(self._free) and self.num_free_rows >= count

    def give_rows(self, slot: int, count: int) -> None:
        firsts = self._firsts[-count:]
        del self._firsts[-count:]
        super().give_rows(slot, count - len(firsts))
        self.rows_at[slot] = tuple(sorted((*firsts, *self.rows_at[slot])))

    def take_rows(self, rows: Iterable[int]) -> None:
        """Take certain free slots, because chunks were found in them."""
        gone = set(rows)
        self._free_rows = [row for row in self._free_rows if row not in gone]

    def _all_free(self) -> list[int]:
        return self._free_rows + self._firsts

    def _give_back(self, slot: int) -> None:
        first, *others = self.rows_at[slot]
        self._firsts.append(first)
        self._free_rows += others[::-1]
        self.rows_at[slot] = ()
