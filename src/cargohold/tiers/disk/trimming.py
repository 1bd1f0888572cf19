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

_EMPTY = bytes(HEADER_BYTES)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a chunk is.

    Attributes:
        segment: number of the segment.
        slot: number of the slot in it.
    """

    segment: int
    slot: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done. Nothing is, before ``carry_out``.

    Attributes:
        doomed: the chunks that go.
        num_left: number of chunks that stay.
        num_bytes: bytes that are deleted.
        unused: the slots without a chunk, before the chunks go.
    """

    doomed: Sequence[Place]
    num_left: int
    num_bytes: int
    unused: Sequence[Place]


def plan(segments: Sequence[Segment], num_bytes: int) -> Plan:
    """Return how to delete at least ``num_bytes`` bytes of chunks, or all chunks. Raises ``OSError``."""
    headers: dict[Place, Header | None] = {}
    used_ns: dict[Place, int] = {}
    unused: list[Place] = []
    for number, segment in enumerate(segments):
        table, uses = segment.read_headers(), segment.read_uses()
        times = np.frombuffer(uses, np.dtype("<i8"), len(uses) // USE_BYTES)
        for slot in range(len(table) // HEADER_BYTES):
            place, data = Place(number, slot), table[slot * HEADER_BYTES :][:HEADER_BYTES]
            if data == _EMPTY:
                unused.append(place)
                continue
            header = headers[place] = unpack_header(data)
            if header is not None:
                used = int(times[slot]) if slot < len(times) else 0
                used_ns[place] = max(header.stored_ns, used, int(header.retention.until_s) * 10**9)
    slot_bytes = segments[0].slot_bytes if segments else 1
    doomed = list(least_worth_first(headers, used_ns))[: -(-num_bytes // slot_bytes)]
    return Plan(doomed, len(headers) - len(doomed), len(doomed) * slot_bytes, unused)


def least_worth_first(headers: Mapping[Place, Header | None], used_ns: Mapping[Place, int]) -> Iterator[Place]:
    """Yield chunks in the order in which they go: damaged ones, then those used longest ago.

    A chunk goes after those behind it in its prefix, which nobody finds without it.

    Args:
        headers: by place; ``None`` for damaged ones.
        used_ns: when each of the others was used last.
    """
    yield from (place for place, header in headers.items() if header is None)
    newest_first = sorted(used_ns, key=used_ns.__getitem__, reverse=True)
    by_key: dict[OffloadKey, Place] = {}
    for place in reversed(newest_first):  # so that of a chunk that is there twice the newer one counts
        header = headers[place]
        assert header is not None
        by_key[header.key] = place
    kept: dict[Place, None] = {}
    for place in newest_first:
        way: dict[Place, None] = {}
        at: Place | None = place
        while at is not None and at not in kept and at not in way:  # damaged keys may claim to be before each other
            way[at] = None
            header = headers[at]
            at = None if header is None else by_key.get(header.parent)
        kept.update(reversed(way.items()))
    yield from reversed(kept)


def carry_out(planned: Plan, segments: Sequence[Segment]) -> None:
    """Delete what is doomed, and give back what no chunk takes then.

    Raises ``OSError``; with ``EOPNOTSUPP``, the file system cannot give back parts of files, and nothing was deleted.
    """
    for segment in segments:
        segment.give_back(segment.num_slots, 1)  # behind the end, where there is nothing: only to try whether it can
    for place in planned.doomed:
        segments[place.segment].write_header(place.slot)
    for number, of in groupby(sorted((*planned.unused, *planned.doomed)), lambda place: place.segment):
        for first, count in _runs([place.slot for place in of]):
            segments[number].give_back(first, count)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of consecutive numbers, and how many they are."""
    for _, run in groupby(enumerate(slots), lambda numbered: numbered[1] - numbered[0]):
        found = [slot for _, slot in run]
        yield found[0], len(found)
