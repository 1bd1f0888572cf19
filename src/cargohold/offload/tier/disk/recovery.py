"""Finds the chunks again that earlier processes stored, from the headers of all slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from cargohold.offload.tier.codec import ChunkCodec
from cargohold.offload.tier.disk.slot_index import SlotIndex
from cargohold.offload.tier.header import HEADER_BYTES, MAGIC, Header, unpack_header


def restore_index(index: SlotIndex, tables: Iterable[bytes], codec: ChunkCodec) -> list[int]:
    """Fill an index of free slots with the chunks whose headers are good.

    Chunks that were stored one after the other along a prefix are restored as such, the oldest first, so the policy
    finds them in the order in which it would have seen them.

    Args:
        index: has as many slots as there are headers, all free; mutated.
        tables: headers of consecutive slots.
        codec: tells which are of this namespace.

    Returns:
        Slots whose header must be wiped: damaged, of another namespace, or of a chunk that is stored twice.
    """
    good, bad = _sort_out(tables, codec)
    index.forget_free(slot for _, slot in good)
    for run in _runs(good):
        index.restore([header.key for header, _ in run], [slot for _, slot in run], run[0][0].parent)
    return bad


def _sort_out(tables: Iterable[bytes], codec: ChunkCodec) -> tuple[list[tuple[Header, int]], list[int]]:
    """Good headers with their slots, the oldest first; and slots with bad ones."""
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
    return sorted(newest.values(), key=lambda found: (found[0].stored_ns, found[1])), bad


def _used_slots(tables: Iterable[bytes]) -> Iterator[tuple[int, memoryview]]:
    """Slots whose header is not all zeros."""
    empty = bytes(len(MAGIC))
    headers = chain.from_iterable(
        (memoryview(table)[at : at + HEADER_BYTES] for at in range(0, len(table), HEADER_BYTES)) for table in tables
    )
    return ((slot, data) for slot, data in enumerate(headers) if data[: len(MAGIC)] != empty)


def _runs(found: Iterable[tuple[Header, int]]) -> Iterator[list[tuple[Header, int]]]:
    """Cut into runs in which each chunk is the parent of the next."""
    run: list[tuple[Header, int]] = []
    for header, slot in found:
        if run and header.parent != run[-1][0].key:
            yield run
            run = []
        run.append((header, slot))
    if run:
        yield run
