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
    """The requests of a trace, each as a sequence of chunks.

    ::

        chunks         | prompt of request 0 | its answer | prompt of request 1 | its answer | ...
        prompt_ends                          ^                                  ^
        ends                                              ^                                  ^

    Attributes:
        chunks: numbers of all chunks used, request after request.
        prompt_ends: per request, index behind the last chunk of its prompt.
        ends: per request, index behind the last chunk that its answer completed; in most traces the same.
        prompt_tokens: per request, tokens of its prompt, or ``UNKNOWN``.
        reused_blocks: per request, blocks that the recording engine reused, or ``UNKNOWN``.
        num_unique: number of different chunks.
        num_prompt_blocks: blocks of all prompts, including those left over at the ends of prompts, which are in no chunk.
        blocks_per_chunk: blocks of the trace per chunk.
        block_tokens: tokens per block; ``None`` if the trace does not tell.
        told_block_tokens: least and most tokens per block that requests tell; ``None`` if none tells.
        step_tokens: tokens of a prompt that the recording engine computed in a step; ``None`` if the trace does not tell.
        duration_s: seconds from the first request to the last; 0 if the trace does not tell.
        is_timed: whether all requests have an arrival time.
        is_sorted: whether the requests that have one were in the order of their times.
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
        """Per request, index of its first chunk."""
        starts = np.zeros_like(self.ends)
        starts[1:] = self.ends[:-1]
        return starts

    @property
    def num_lookups(self) -> int:
        """Number of chunks of all prompts; a chunk counts each time."""
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
        """Per request: index of its first chunk, index behind its prompt's last chunk, and index behind its last chunk."""
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
        """Number of uses of a chunk behind another chunk than at its first use; 0 if ids form a trie, standing for prefixes."""
        before = np.empty_like(self.chunks)
        before[:1] = UNKNOWN
        before[1:] = self.chunks[:-1]
        starts = self.starts
        before[starts[starts < self.ends]] = UNKNOWN
        numbers, first_uses = np.unique(self.chunks, return_index=True)
        first_before = np.empty(self.num_unique, dtype=np.int32)
        first_before[numbers] = before[first_uses]
        return int(np.count_nonzero(first_before[self.chunks] != before))
