"""Load and store plans against a definition so plain that it cannot be wrong, on all small cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from cargohold.blocks import ABSENT, READY, GroupUnits, longest_hit
from cargohold.cache.manager import ChunkKeys, ChunkPins, offload_key
from cargohold.cache.rows import rows_to_load, rows_to_store
from cargohold.connector.kernel.loads import blocks_to_load
from cargohold.connector.kernel.offers import blocks_to_store
from cargohold.protocol import AttentionKind, KVCacheGroup

BLOCK_TOKENS = 2
FULL = (AttentionKind.FULL, None)
KINDS: list[tuple[AttentionKind, int | None]] = [
    FULL,
    *((AttentionKind.SLIDING_WINDOW, window) for window in (1, 2, 3, 4, 7)),
    (AttentionKind.CHUNKED_LOCAL, 4),
    (AttentionKind.RECURRENT, None),
]


def group_of(kind: tuple[AttentionKind, int | None], index: int = 0) -> KVCacheGroup:
    return KVCacheGroup(index, kind[0], BLOCK_TOKENS, (f"layers.{index}",), kind[1])


def table_at(group: KVCacheGroup, num_blocks: int, next_query: int) -> list[int]:
    """A block table as an engine keeps it: null where no query from ``next_query`` on looks; ids 1, 2, ..."""
    num_skipped = group.num_skipped_tokens(next_query) // BLOCK_TOKENS
    return [0 if at < num_skipped else at + 1 for at in range(num_blocks)]


def to_load(table: Sequence[int], num_computed_tokens: int, num_hit_tokens: int) -> list[tuple[int, int]]:
    """Numbers and ids of the blocks that a load fills."""
    return list(zip(*blocks_to_load(table, BLOCK_TOKENS, num_computed_tokens, num_hit_tokens), strict=True))


def stored_blocks(blocks: tuple[Sequence[int], Sequence[int]], per_chunk: int) -> dict[int, int]:
    """Ids of the blocks that are copied, by their number in the request."""
    chunks, block_ids = blocks
    numbers = [chunk * per_chunk + at for chunk in chunks for at in range(per_chunk)]
    stored = {number: block_id for number, block_id in zip(numbers, block_ids, strict=True) if block_id}
    assert {number // per_chunk for number in stored} == set(chunks), "a chunk without blocks is no chunk"
    return stored


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_loads_fill_exactly_the_blocks_that_are_neither_computed_nor_null(
    kind: tuple[AttentionKind, int | None], per_chunk: int
) -> None:
    group = group_of(kind)
    for num_hit_blocks in range(per_chunk, 9, per_chunk):
        num_hit_tokens = num_hit_blocks * BLOCK_TOKENS
        table = table_at(group, num_hit_blocks, num_hit_tokens)
        for num_computed_blocks in range(num_hit_blocks):
            blocks = to_load(table, num_computed_blocks * BLOCK_TOKENS, num_hit_tokens)
            expected = [(at, table[at]) for at in range(num_computed_blocks, num_hit_blocks) if table[at]]
            assert blocks == expected
            assert {number // per_chunk for number, _ in blocks} == {at // per_chunk for at, _ in expected}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_whatever_a_hit_needs_was_stored_however_late(kind: tuple[AttentionKind, int | None], per_chunk: int) -> None:
    """A chunk is stored in a step whose first query is ``start``; later, a request of any length loads it."""
    group = group_of(kind)
    chunk_tokens = per_chunk * BLOCK_TOKENS
    num_chunks = 4
    for index in range(num_chunks):
        for start in range(num_chunks * chunk_tokens):
            table = table_at(group, num_chunks * per_chunk, start)
            stored = stored_blocks(blocks_to_store(group, table, per_chunk, index, index + 1), per_chunk)
            if not stored:
                continue  # left out as a whole: a miss, which is always right
            for num_hit_tokens in range((index + 1) * chunk_tokens, num_chunks * chunk_tokens + 1, chunk_tokens):
                # The hit may be the whole request: then its last token is computed again.
                for num_tokens in (num_hit_tokens, num_hit_tokens + 1):
                    next_query = min(num_hit_tokens, num_tokens - 1)
                    destination = table_at(group, num_hit_tokens // BLOCK_TOKENS, next_query)
                    blocks = to_load(destination, 0, num_hit_tokens)
                    needed = {number for number, _ in blocks if number // per_chunk == index}
                    assert needed <= stored.keys(), "a load would read a row that was never written"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_a_chunk_that_is_complete_when_it_is_offered_is_stored(
    kind: tuple[AttentionKind, int | None], per_chunk: int
) -> None:
    """In the step that completes a chunk, all that later requests need of it is there."""
    group = group_of(kind)
    chunk_tokens = per_chunk * BLOCK_TOKENS
    for index in range(4):
        for start in range(index * chunk_tokens, (index + 1) * chunk_tokens):
            table = table_at(group, (index + 1) * per_chunk, start)
            assert list(blocks_to_store(group, table, per_chunk, index, index + 1)[0]) == [index]


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS[1:5], repeat=2)))
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_what_is_looked_up_can_be_loaded_and_suffices(
    kinds: Sequence[tuple[AttentionKind, int | None]], per_chunk: int
) -> None:
    """Three groups, every combination of present chunks: a hit's loads use present chunks alone and leave no gap."""
    groups = [group_of(kind, index) for index, kind in enumerate((FULL, *kinds))]
    chunk_tokens = per_chunk * BLOCK_TOKENS
    num_chunks = 3
    num_tokens = num_chunks * chunk_tokens + 1
    for presence in itertools.product(itertools.product((ABSENT, READY), repeat=num_chunks), repeat=len(groups)):
        for num_computed in (0, BLOCK_TOKENS):
            units = [
                GroupUnits(group, chunk_tokens, Present(bytes(of))) for group, of in zip(groups, presence, strict=True)
            ]
            num_hit = longest_hit(units, num_tokens, num_computed).num_tokens
            for group, of in zip(groups, presence, strict=True):
                table = table_at(group, num_hit // BLOCK_TOKENS, num_hit)
                numbers = [number for number, _ in to_load(table, num_computed, num_hit)]
                assert all(of[number // per_chunk] == READY for number in numbers)
                first_needed = max(num_computed, group.num_skipped_tokens(num_hit)) // BLOCK_TOKENS
                assert set(numbers) == set(range(first_needed, num_hit // BLOCK_TOKENS)) - {
                    at for at, block_id in enumerate(table) if not block_id
                }


class Present:
    """Unit states from bytes."""

    def __init__(self, states: bytes) -> None:
        self.states = states

    def run(self, first: int, end: int) -> bytes:
        return self.states[first:end]

    def window(self, first: int, end: int) -> bytes:
        return self.states[first:end]


def test_rows_of_a_chunk_are_those_of_its_slot_without_null_blocks() -> None:
    keys = [offload_key(b"a", 0), offload_key(b"b", 0)]
    assert rows_to_store([7, 8, 9, 0, 10, 11], [3, 0], keys, [4, 2], 3)[:2] == ((10, 11, 7, 8, 9), (13, 14, 6, 7, 8))
    assert rows_to_store([7, 8, 9], [2, 0], keys, [4, 2], 1) == ((9, 7), (4, 2), ())


def test_rows_of_chunks_that_differ_in_size_are_their_own() -> None:
    """Group 1's blocks have two rows, group 0's one; the first block of the second chunk is null."""
    keys = [offload_key(b"a", 0), offload_key(b"b", 1)]
    slots = [(7, 9), (1, 4, 5, 8)]
    assert rows_to_store([10, 11, 0, 12], [0, 2], keys, slots, 2) == ((10, 11, 12), (7, 9, 5, 8), (0, 0, 1))
    group = ChunkKeys(group_of(FULL, 1), 2, BLOCK_TOKENS)
    group.keys = [offload_key(bytes([at]), 1) for at in range(4)]
    pins = ChunkPins(group.keys[2:4], [2, 3], nothing)
    pins.slots = [(1, 4, 5, 8), (3, 2, 0, 6)]
    assert rows_to_load(pins, [(group, [5, 6])], 2) == ((5, 8, 3, 2), (1, 1))


def nothing(*_: object) -> None:
    """The end of a handle."""


@pytest.mark.parametrize(
    ("per_chunk", "numbers", "rows"), [(3, [7, 8, 9, 11], (16, 17, 3, 5)), (1, [7, 9], (5, 1)), (2, [], ())]
)
def test_rows_to_load_are_those_of_the_blocks_places_in_their_chunks(
    per_chunk: int, numbers: list[int], rows: tuple[int, ...]
) -> None:
    """With three blocks per chunk, the first lies inside chunk 2, and one of chunk 3's is not needed."""
    group = ChunkKeys(group_of(FULL), per_chunk, BLOCK_TOKENS)
    group.keys = [offload_key(bytes([at]), 0) for at in range(10)]
    chunks = dict.fromkeys(number // per_chunk for number in numbers)
    pins = ChunkPins([group.keys[chunk] for chunk in chunks], [5, 1][: len(chunks)], nothing)
    assert rows_to_load(pins, [(group, numbers)], per_chunk) == (rows, ())


def test_a_load_of_nothing_has_no_blocks() -> None:
    assert to_load([1, 2, 3], 4, 4) == []
