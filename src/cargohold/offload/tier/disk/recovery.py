"""Restores the index of chunks that earlier processes stored, from the headers of all slots and the slots' last uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Final

from cargohold.offload.tier.chunk_format import HEADER_BYTES, MAGIC, ChunkCodec, Header, unpack_header
from cargohold.offload.tier.disk.slot_index import SlotIndex
from cargohold.offload.tier.disk.uses import Uses

_MOST_USES: Final = 1024


def restore_index(index: SlotIndex, tables: Iterable[bytes], uses: Uses, codec: ChunkCodec) -> list[int]:
    """Fill an index of free slots with the chunks whose headers are good.

    The index's policy learns of stores and last uses in the order in which they happened, as far as that is known. Chunks that
    were stored one after the other along a prefix are told to it together.

    Args:
        index: has as many slots as there are headers, all free; mutated.
        tables: headers of consecutive slots.
        uses: time at which each slot was last used. Times before the chunk was stored or in the future are ignored.
        codec: tells which headers are of this namespace, and what time it is.

    Returns:
        Slots whose header must be wiped: damaged, of another namespace, of a chunk that is stored twice, or with a key of
        unusual length.
    """
    good, bad = _sort_out(tables, codec)
    index.forget_free(slot for _, slot in good)
    later = _used_later(good, uses, codec.now_ns())
    use = next(later, None)
    for run in _runs(good):
        while use is not None and use[0] < run[0][0].stored_ns:
            index.touch(use[1])
            use = next(later, None)
        index.restore([header.key for header, _ in run], [slot for _, slot in run], run[0][0].parent)
    for _, keys in () if use is None else chain([use], later):
        index.touch(keys)
    return bad


def _used_later(found: Sequence[tuple[Header, int]], uses: Uses, now_ns: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield times of use with the chunks that were last used then, after they were stored; the oldest time first.

    Chunks used at the same time are in the order in which they were stored. If there are more than ``_MOST_USES`` times,
    neighbouring ones are merged, with the chunks used last first: a touch costs the policy about as much for few chunks as
    for many.
    """
    used = [
        (when, header.key)
        for (header, _), when in zip(found, uses[[slot for _, slot in found]].tolist(), strict=True)
        if header.stored_ns < when <= now_ns
    ]
    used.sort(key=itemgetter(0))
    groups = [(when, [key for _, key in together]) for when, together in groupby(used, key=itemgetter(0))]
    size = -(-len(groups) // _MOST_USES) or 1
    for first in range(0, len(groups), size):
        part = groups[first : first + size]
        yield part[-1][0], [key for _, keys in reversed(part) for key in keys]


def _sort_out(tables: Iterable[bytes], codec: ChunkCodec) -> tuple[list[tuple[Header, int]], list[int]]:
    """Return the good headers with their slots, the oldest first, and the slots with bad headers."""
    newest: dict[bytes, tuple[Header, int]] = {}
    bad = []
    for slot, data in _used_slots(tables):
        header = unpack_header(data)
        if header is None or not codec.is_ours(header):
            bad.append(slot)
            continue
        other = newest.get(header.key)
        if other is not None and other[0].stored_ns > header.stored_ns:
            bad.append(slot)
            continue
        if other is not None:
            bad.append(other[1])
        newest[header.key] = (header, slot)
    bad += [newest.pop(key)[1] for key in _strange(newest)]
    return sorted(newest.values(), key=lambda found: (found[0].stored_ns, found[1])), bad


def _strange(keys: Collection[bytes]) -> list[bytes]:
    """Return the keys whose length differs from that of most keys.

    All keys of an engine have one length, on which policies rely; others have other writers.
    """
    lengths = Counter(map(len, keys))
    if len(lengths) <= 1:
        return []
    ((usual, _),) = lengths.most_common(1)
    return [key for key in keys if len(key) != usual]


def _used_slots(tables: Iterable[bytes]) -> Iterator[tuple[int, memoryview]]:
    """Yield the slots whose header is not empty, with their headers."""
    empty = bytes(len(MAGIC))
    headers = chain.from_iterable(
        (memoryview(table)[at : at + HEADER_BYTES] for at in range(0, len(table), HEADER_BYTES)) for table in tables
    )
    return ((slot, data) for slot, data in enumerate(headers) if data[: len(MAGIC)] != empty)


def _runs(found: Iterable[tuple[Header, int]]) -> Iterator[list[tuple[Header, int]]]:
    """Cut headers into runs in which each chunk is the parent of the next."""
    run: list[tuple[Header, int]] = []
    for header, slot in found:
        if run and header.parent != run[-1][0].key:
            yield run
            run = []
        run.append((header, slot))
    if run:
        yield run
