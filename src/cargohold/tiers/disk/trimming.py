"""Makes a shard that nobody uses smaller: the chunks used longest ago go, and the file system gets back what no chunk takes.

The files keep their size, and what was given back becomes a hole in them. A later write to a slot there takes space again, or
is refused if the disk is full by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from cargohold.cache.manager import OffloadKey
from cargohold.tiers.chunk_format import HEADER_BYTES, Header, unpack_header
from cargohold.tiers.disk.files import USE_BYTES, Segment
from cargohold.tiers.disk.slots import Links, SlotPlan, gather

_EMPTY = bytes(HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """What would be done. Nothing is, before ``carry_out``.

    Attributes:
        doomed: the slots of the chunks that go.
        num_left: number of chunks that stay.
        num_bytes: bytes that are deleted.
        unused: the slots without a chunk, before the chunks go.
    """

    doomed: Sequence[int]
    num_left: int
    num_bytes: int
    unused: Sequence[int]


def plan(segments: Sequence[Segment], num_bytes: int) -> TrimPlan:
    """Return how to delete at least ``num_bytes`` bytes of chunks, or all chunks. Raises ``OSError``."""
    slot_bytes = segments[0].slot_bytes if segments else 1
    found: list[tuple[Header, int]] = []
    doomed: list[int] = []
    used_ns: dict[int, int] = {}
    for slot, data, used in _headers(segments):
        header = unpack_header(data)
        if header is None:
            doomed += [] if data == _EMPTY else [slot]
        else:
            found.append((header, slot))
            used_ns[slot] = max(header.stored_ns, used, int(header.retention.until_s) * 10**9)
    links = Links(segments, segments[0].num_slots if segments else 0)
    chunks, left = gather(found, links, SlotPlan(slot_bytes, most=links.num_slots))
    taken = {slot for _, slots in chunks for slot in slots}.union(doomed, left)
    unused = [slot for slot in range(links.num_slots) if slot not in taken]
    doomed += left
    num_left, num_slots = len(chunks), -(-num_bytes // slot_bytes)
    del doomed[num_slots:]
    slots_of = {slots[0]: slots for _, slots in chunks}
    for first in least_worth_first({slots[0]: header for header, slots in chunks}, used_ns):
        if len(doomed) >= num_slots:
            break
        doomed += slots_of[first]
        num_left -= 1
    return TrimPlan(doomed, num_left, len(doomed) * slot_bytes, unused)


def _headers(segments: Sequence[Segment]) -> Iterator[tuple[int, bytes, int]]:
    """Yield all slots, what is in the place of their headers, and when they were used last, if that is known."""
    first = 0
    for segment in segments:
        table, uses = segment.read_headers(), segment.read_uses()
        times = np.frombuffer(uses, np.dtype("<i8"), len(uses) // USE_BYTES)
        for slot in range(segment.num_slots):
            used = int(times[slot]) if slot < len(times) else 0
            yield first + slot, table[slot * HEADER_BYTES :][:HEADER_BYTES], used
        first += segment.num_slots


def least_worth_first(headers: Mapping[int, Header], used_ns: Mapping[int, int]) -> Iterator[int]:
    """Yield chunks in the order in which they go: those used longest ago first.

    A chunk goes after those behind it in its prefix, which nobody finds without it.

    Args:
        headers: by the place of the first slot.
        used_ns: when each was used last.
    """
    newest_first = sorted(headers, key=used_ns.__getitem__, reverse=True)
    # Reversed, so that of a chunk that is there twice the newer one counts.
    by_key: dict[OffloadKey, int] = {headers[place].key: place for place in reversed(newest_first)}
    kept: dict[int, None] = {}
    for place in newest_first:
        way: dict[int, None] = {}
        at: int | None = place
        while at is not None and at not in kept and at not in way:  # damaged keys may claim to be before each other
            way[at] = None
            at = by_key.get(headers[at].parent)
        kept.update(reversed(way.items()))
    yield from reversed(kept)


def carry_out(planned: TrimPlan, segments: Sequence[Segment]) -> None:
    """Delete what is doomed, and give back what no chunk takes then.

    Raises ``OSError``; with ``EOPNOTSUPP``, the file system cannot give back parts of files, and nothing was deleted.
    """
    for segment in segments:
        segment.give_back(segment.num_slots, 1)  # behind the end, where there is nothing: only to try whether it can
    per_segment = segments[0].num_slots if segments else 1
    for slot in planned.doomed:
        segments[slot // per_segment].write_header(slot % per_segment)
    for number, of in groupby(sorted((*planned.unused, *planned.doomed)), lambda slot: slot // per_segment):
        for first, count in _runs([slot % per_segment for slot in of]):
            segments[number].give_back(first, count)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of consecutive numbers, and how many they are."""
    for _, run in groupby(enumerate(slots), lambda numbered: numbered[1] - numbered[0]):
        found = [slot for _, slot in run]
        yield found[0], len(found)
