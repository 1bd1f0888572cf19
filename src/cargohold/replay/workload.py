"""A trace in memory: chunks numbered in the order of their first use, in flat arrays that processes can share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Chunks = npt.NDArray[np.int32]

UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests as paths of chunks.

    ::

        chunks         | prompt of request 0 | its answer | prompt of request 1 | its answer | ...
        prompt_ends                          ^                                  ^
        ends                                              ^                                  ^

    Attributes:
        chunks: number of every chunk used, request after request.
        prompt_ends: per request, where its prompt's chunks end.
        ends: per request, where the chunks that its answer completed end; for most traces the same.
        prompt_tokens: per request, tokens of its prompt, or ``UNKNOWN``.
        reused_blocks: per request, the blocks that the engine which recorded it reused, or ``UNKNOWN``.
        num_unique: different chunks.
        num_prompt_blocks: blocks of all prompts, also those left over at the ends of prompts, which no chunk has.
        blocks_per_chunk: blocks of the trace that make a chunk.
        block_tokens: tokens per block, ``None`` if the trace does not tell.
        told_block_tokens: the least and the most tokens that a block has by what requests say; ``None`` if none says it.
        step_tokens: tokens of a prompt that the recording engine computed in a step; ``None`` if the trace does not tell.
        duration_s: from the first request to the last; 0 if the trace does not tell.
        is_timed: whether all requests say when they arrived.
        is_sorted: whether those that say so came in the order of their times.
    """

    chunks: Chunks
    prompt_ends: Ints
    ends: Ints
    prompt_tokens: Ints
    reused_blocks: Ints
    num_unique: int
    num_prompt_blocks: int
    blocks_per_chunk: int = 1
    block_tokens: int | None = None
    told_block_tokens: tuple[int, int] | None = None
    step_tokens: int | None = None
    duration_s: float = 0.0
    is_timed: bool = True
    is_sorted: bool = True

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.ends)

    @property
    def starts(self) -> Ints:
        """Per request, where its chunks begin."""
        starts = np.zeros_like(self.ends)
        starts[1:] = self.ends[:-1]
        return starts

    @property
    def num_lookups(self) -> int:
        """Chunks of prompts, counted every time."""
        return int((self.prompt_ends - self.starts).sum())

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens per chunk, ``None`` if the trace does not tell."""
        return None if self.block_tokens is None else self.block_tokens * self.blocks_per_chunk

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of all prompts; ``None`` if the trace does not tell."""
        return None if (self.prompt_tokens == UNKNOWN).any() else int(self.prompt_tokens.sum())

    @property
    def num_reused_blocks(self) -> int | None:
        """Blocks that the recording engine reused; ``None`` if the trace does not tell."""
        return None if (self.reused_blocks == UNKNOWN).any() else int(self.reused_blocks.sum())

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Per request: where its chunks begin, where those of its prompt end, and where all end."""
        return zip(self.starts.tolist(), self.prompt_ends.tolist(), self.ends.tolist(), strict=True)

    def tokens_in(self, hits: Ints) -> int | None:
        """Tokens in the leading ``hits[r]`` chunks of every request ``r``: a prompt may end inside its last chunk."""
        if self.chunk_tokens is None:
            return None
        known = self.prompt_tokens != UNKNOWN
        tokens = hits * self.chunk_tokens
        tokens[known] = np.minimum(tokens, self.prompt_tokens)[known]
        return int(tokens.sum())

    def count_misplaced(self) -> int:
        """Uses of a chunk behind another one than at its first use. In a trie, where ids stand for prefixes, there are none."""
        before = np.empty_like(self.chunks)
        before[:1] = UNKNOWN
        before[1:] = self.chunks[:-1]
        starts = self.starts
        before[starts[starts < self.ends]] = UNKNOWN
        numbers, first_uses = np.unique(self.chunks, return_index=True)
        first_before = np.empty(self.num_unique, dtype=np.int32)
        first_before[numbers] = before[first_uses]
        return int(np.count_nonzero(first_before[self.chunks] != before))
