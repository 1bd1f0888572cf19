"""A trace in memory: chunks numbered in the order of their first use, in flat arrays that processes can share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
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
        arrivals_s: per request, seconds since the trace's first request; NaN where the trace does not tell.
        num_warm: leading requests that only warm the cache up: they are replayed, but not counted.
        num_unique: number of different chunks.
        num_prompt_blocks: blocks of counted prompts, including those left over at the ends of prompts, which are in no chunk.
        blocks_per_chunk: blocks of the trace per chunk.
        block_tokens: tokens per block; ``None`` if the trace does not tell.
        told_block_tokens: least and most tokens per block that requests tell; ``None`` if none tells.
        step_tokens: tokens of a prompt that the recording engine computed in a step; ``None`` if the trace does not tell.
        is_timed: whether all requests have an arrival time.
        is_sorted: whether the requests that have one were in the order of their times.
    """

    chunks: Chunks
    prompt_ends: Ints
    ends: Ints
    prompt_tokens: Ints
    reused_blocks: Ints
    arrivals_s: Floats
    num_unique: int
    num_prompt_blocks: int
    blocks_per_chunk: int = 1
    block_tokens: int | None = None
    told_block_tokens: tuple[int, int] | None = None
    step_tokens: int | None = None
    num_warm: int = 0
    is_timed: bool = True
    is_sorted: bool = True

    @property
    def num_requests(self) -> int:
        """How many requests there are, without those that only warm up."""
        return len(self.ends) - self.num_warm

    @property
    def duration_s(self) -> float:
        """Seconds from the first counted request to the last; 0 if the trace does not tell."""
        return self.seconds_from(self.num_warm)

    def seconds_from(self, first: int) -> float:
        """Seconds from a request to the last; 0 if the trace does not tell."""
        arrivals_s = self.arrivals_s[first:]
        arrivals_s = arrivals_s[np.isfinite(arrivals_s)]
        return float(arrivals_s.max() - arrivals_s.min()) if len(arrivals_s) else 0.0

    @property
    def starts(self) -> Ints:
        """Per request, index of its first chunk."""
        starts = np.zeros_like(self.ends)
        starts[1:] = self.ends[:-1]
        return starts

    @property
    def num_lookups(self) -> int:
        """Number of chunks of all counted prompts; a chunk counts each time."""
        return self.lookups_from(self.num_warm)

    def lookups_from(self, first: int) -> int:
        """Number of chunks of the prompts from a request on; a chunk counts each time."""
        return int((self.prompt_ends - self.starts)[first:].sum())

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens per chunk, ``None`` if the trace does not tell."""
        return None if self.block_tokens is None else self.block_tokens * self.blocks_per_chunk

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of all counted prompts; ``None`` if the trace does not tell."""
        counted = self.prompt_tokens[self.num_warm :]
        return None if (counted == UNKNOWN).any() else int(counted.sum())

    def prompt_tokens_from(self, first: int) -> int:
        """Tokens of the prompts from a request on; where the trace does not tell, those of their chunks.

        It must be known how many tokens a chunk has.
        """
        assert self.chunk_tokens is not None, "it is known how many tokens a chunk has"
        in_chunks = (self.prompt_ends - self.starts) * self.chunk_tokens
        return int(np.where(self.prompt_tokens == UNKNOWN, in_chunks, self.prompt_tokens)[first:].sum())

    @property
    def num_reused_blocks(self) -> int | None:
        """Blocks that the recording engine reused; ``None`` if the trace does not tell."""
        counted = self.reused_blocks[self.num_warm :]
        return None if (counted == UNKNOWN).any() else int(counted.sum())

    def first_use_requests(self) -> Ints:
        """Per different chunk, in the order of their first uses, the request that used it first."""
        _, first_uses = np.unique(self.chunks, return_index=True)
        return np.searchsorted(self.ends, np.sort(first_uses), side="right")

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Per request: index of its first chunk, index behind its prompt's last chunk, and index behind its last chunk."""
        return zip(self.starts.tolist(), self.prompt_ends.tolist(), self.ends.tolist(), strict=True)

    def tokens_in(self, hits: Ints, first: int = 0) -> int | None:
        """Tokens in the leading ``hits[r]`` chunks of every request ``r`` from ``first`` on.

        A prompt may end inside its last chunk. ``None`` if the trace does not tell how many tokens a block has.
        """
        if self.chunk_tokens is None:
            return None
        known = self.prompt_tokens != UNKNOWN
        tokens = hits * self.chunk_tokens
        tokens[known] = np.minimum(tokens, self.prompt_tokens)[known]
        return int(tokens[first:].sum())

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
