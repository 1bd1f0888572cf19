"""Makes a shard that no engine uses smaller: the chunks used longest ago go, and the file system gets back what no chunk takes.

For ``cargohold cache prune`` the files keep their size, and what was given back becomes a hole in them. A later write to a slot
there takes space again, or is refused if the disk is full by then. At a start with a lower limit the last files are deleted,
after what is worth keeping of them was moved into the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from cargohold.cache.manager import OffloadKey
from cargohold.tiers.chunk_format import HEADER_BYTES, Header, unpack_header
from cargohold.tiers.disk.files import USE_BYTES, Segment
from cargohold.tiers.disk.slots import Found, Links, SlotPlan, gather, place_in
from cargohold.tiers.memory import Staging

_EMPTY = bytes(HEADER_BYTES)
_USES: Final = np.dtype("<i8")


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


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is in a shard.

    Attributes:
        chunks: the chunks that are there as a whole, in the order in which they go: their headers and slots.
        bad: slots of no such chunk that have a header, damaged or of a chunk that is not there as a whole.
        num_slots: number of slots.
    """

    chunks: Sequence[Found]
    bad: Sequence[int]
    num_slots: int

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> _Contents:
        """Read what is in a shard. Raises ``OSError``."""
        found: list[tuple[Header, int]] = []
        bad: list[int] = []
        used_ns: dict[int, int] = {}
        for slot, data, used in _headers(segments):
            header = unpack_header(data)
            if header is None:
                bad += [] if data == _EMPTY else [slot]
            else:
                found.append((header, slot))
                used_ns[slot] = max(header.stored_ns, used, int(header.retention.until_s) * 10**9)
        links = Links(segments, segments[0].num_slots if segments else 0)
        slot_bytes = segments[0].slot_bytes if segments else 1
        chunks, left = gather(found, links, SlotPlan(slot_bytes, most=links.num_slots))
        taken = {slot for _, slots in chunks for slot in slots}
        chunk_at = {slots[0]: (header, slots) for header, slots in chunks}
        order = least_worth_first({first: header for first, (header, _) in chunk_at.items()}, used_ns)
        bad = [slot for slot in (*bad, *left) if slot not in taken]
        return cls([chunk_at[first] for first in order], bad, links.num_slots)


def plan(segments: Sequence[Segment], num_bytes: int) -> TrimPlan:
    """Return how to delete at least ``num_bytes`` bytes of chunks, or all chunks. Raises ``OSError``."""
    slot_bytes = segments[0].slot_bytes if segments else 1
    contents, num_slots = _Contents.of(segments), -(-num_bytes // slot_bytes)
    taken = {slot for _, slots in contents.chunks for slot in slots}.union(contents.bad)
    unused = [slot for slot in range(contents.num_slots) if slot not in taken]
    doomed, num_left = list(contents.bad[:num_slots]), len(contents.chunks)
    for _, slots in contents.chunks:
        if len(doomed) >= num_slots:
            break
        doomed += slots
        num_left -= 1
    return TrimPlan(doomed, num_left, len(doomed) * slot_bytes, unused)


def move_down(segments: Sequence[Segment], num_kept: int, ends: float) -> int:
    """Move the chunks used last into the first segments, as far as they fit; return how many chunks do not.

    Args:
        segments: all of a shard that the caller has locked.
        num_kept: number of segments that will be left.
        ends: when to stop, by ``time.monotonic``.

    Raises ``OSError``.
    """
    chunks, per_segment, kept = _Contents.of(segments).chunks, segments[0].num_slots, list[Found]()
    num_slots = num_free = num_kept * per_segment
    for header, slots in reversed(chunks):
        if len(slots) <= num_free:
            num_free -= len(slots)
            kept.append((header, slots))
    free = set(range(num_slots)).difference(*[slots for _, slots in kept])
    uses = np.array([used for _, _, used in _headers(segments)], dtype=_USES)
    buffer = Staging(segments[0].slot_bytes).view
    num_left = len(chunks)
    for header, old in kept:
        if time.monotonic() >= ends:
            break
        new = [slot if slot < num_slots else free.pop() for slot in old]
        with suppress(OSError):  # a bad place on the disk costs its chunk alone
            _move(segments, header, old, new, buffer)
            num_left -= 1
        uses[new[0]] = uses[old[0]]
    for at, segment in enumerate(segments[:num_kept]):
        segment.write_uses(uses[at * per_segment :][:per_segment].tobytes())
    return num_left


def _move(
    segments: Sequence[Segment], header: Header, old: Sequence[int], new: Sequence[int], buffer: memoryview
) -> None:
    """Move a chunk to other slots, some of which may be its own. Raises ``OSError``."""
    moved = [(before, after) for before, after in zip(old, new, strict=True) if before != after]
    if not moved:
        return
    source, target, per_segment = place_in(segments, old), place_in(segments, new), segments[0].num_slots
    details = source.read_details()
    source.wipe()
    target.wipe()
    for before, after in moved:
        segments[before // per_segment].read_payload(before % per_segment, buffer)
        segments[after // per_segment].write_payload(after % per_segment, buffer)
    target.write_details(details)
    target.write_header(header.pack())


def _headers(segments: Sequence[Segment]) -> Iterator[tuple[int, bytes, int]]:
    """Yield all slots, what is in the place of their headers, and when they were used last, if that is known."""
    first = 0
    for segment in segments:
        table, uses = segment.read_headers(), segment.read_uses()
        times = np.frombuffer(uses, _USES, len(uses) // USE_BYTES)
        for slot in range(segment.num_slots):
            used = int(times[slot]) if slot < len(times) else 0
            yield first + slot, table[slot * HEADER_BYTES :][:HEADER_BYTES], used
        first += segment.num_slots


def least_worth_first(headers: Mapping[int, Header], used_ns: Mapping[int, int]) -> Iterator[int]:
    """Yield chunks in the order in which they go: those used longest ago first.

    A chunk goes after its successors in its prefix, which cannot be found without it.

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
        segment.give_back(segment.num_slots, 1)  # after the end, where there is nothing: only to try whether it can
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
