"""Leftovers: chunks that were not stored yet when their request ended.

While a request runs, chunks that cannot be stored now are offered again in the next step. A request may end before that: one
with a long prompt and a short answer often does, because stores may hold only a part of the device pool. Its blocks are free
then, but until they are reused the device's prefix cache still knows what they hold. So leftovers hold no blocks; their chunks
are offered as long as the blocks still hold the same KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from cargohold.connector.offloading.requests import RequestState
from cargohold.protocol import NULL_BLOCK_ID, BlockIds, SchedulerContext

MAX_LEFTOVERS: Final = 256
"""Maximum number of ended requests remembered; beyond it, those that ended first are forgotten."""

_BlockContent: TypeAlias = tuple[bytes, int | None] | None


@dataclass(slots=True)
class Leftover:
    """An ended request with chunks that were not offered for storing.

    Attributes:
        state: the request; its ``next_chunk`` says which chunks come next.
        tables: its block tables when it ended.
        contents: per group, the block hash and group that each block held then, beginning with the first chunk not offered.
        starts: per group, the number of the block that the first entry of ``contents`` is about.
    """

    state: RequestState
    tables: tuple[tuple[int, ...], ...]
    contents: tuple[list[_BlockContent], ...]
    starts: tuple[int, ...]

    def end_chunk(self, group: int, blocks_per_chunk: int, context: SchedulerContext, limit: int) -> int:
        """Return the number of the chunk before which all chunks not offered yet still hold the same KV.

        Looks at ``limit`` chunks at most.
        """
        table, contents, start = self.tables[group], self.contents[group], self.starts[group]
        number = self.state.next_chunk[group] * blocks_per_chunk
        if number < start:
            return self.state.next_chunk[
                group
            ]  # chunks to be offered again; ``contents`` has nothing about their blocks
        end = min(start + len(contents), number + limit * blocks_per_chunk)
        while number < end:
            if _content_of(table[number], context) != contents[number - start]:
                break
            number += 1
        return number // blocks_per_chunk


class Leftovers:
    """Ended requests whose chunks are still to be offered, the one that ended first in front."""

    def __init__(self) -> None:
        self._leftovers: deque[Leftover] = deque(maxlen=MAX_LEFTOVERS)

    def __len__(self) -> int:
        return len(self._leftovers)

    def __iter__(self) -> Iterator[Leftover]:
        return iter(tuple(self._leftovers))

    def add(self, state: RequestState, tables: BlockIds, num_tokens: int, context: SchedulerContext) -> None:
        """Remember a request that ended, if the prefix cache knows some of its unstored blocks.

        Only chunks within its first ``num_tokens`` tokens are remembered.
        """
        state.extend_keys()
        starts, contents = [], []
        for keys, first, table in zip(state.keys, state.next_chunk, tables, strict=True):
            per_chunk = keys.chunk_tokens // keys.group.block_tokens
            end = min(num_tokens // keys.chunk_tokens, len(keys.keys)) * per_chunk
            starts.append(first * per_chunk)
            contents.append(_contents(table[first * per_chunk : end], context))
        if any(contents):
            self._leftovers.append(
                Leftover(state, tuple(tuple(table) for table in tables), tuple(contents), tuple(starts))
            )

    def remove(self, leftover: Leftover) -> None:
        """Forget a request of which no chunk is left to be offered."""
        self._leftovers.remove(leftover)


def _contents(block_ids: Sequence[int], context: SchedulerContext) -> list[_BlockContent]:
    """Return what blocks hold, up to the first that is not in the prefix cache; ``None`` for null blocks."""
    contents: list[_BlockContent] = []
    for block_id in block_ids:
        held = _content_of(block_id, context)
        if held is None and block_id != NULL_BLOCK_ID:
            break
        contents.append(held)
    return contents


def _content_of(block_id: int, context: SchedulerContext) -> _BlockContent:
    block = context.get_block(block_id)
    return None if block.block_hash is None else (block.block_hash, block.group_id)
