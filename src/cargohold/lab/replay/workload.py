"""A trace in memory: its requests, ordered, cut into chunks that are numbered in the order of their first use.

All is in flat arrays that processes can share.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cargohold.errors import ConfigError
from cargohold.lab.replay.traces import MAX_TOKENS, TraceRequest
from cargohold.option_values import format_count, is_positive_int, is_positive_number
from cargohold.protocol import TurnEnd

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Chunks = npt.NDArray[np.int32]
Name = TypeVar("Name", bound=Hashable)

UNKNOWN: Final = -1
FIRST_TOKEN_S: Final = 1.0
"""When the first token of an answer comes, where the trace does not say when the answer was complete."""
TURN_ENDS: Final = tuple(TurnEnd)
_LIKELY_BLOCK_TOKENS: Final = tuple(1 << power for power in range(14))
_BELIEVED_FROM: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a trace, each as a sequence of chunks.

    ::

        chunks         | prompt of request 0 | its answer | prompt of request 1 | its answer | ...
        prompt_ends                          ^                                  ^
        ends                                              ^                                  ^

    Attributes:
        chunks: numbers of all chunks used, request after request.
        prompt_ends: per request, index after the last chunk of its prompt.
        ends: per request, index after the last chunk that its answer completed; in most traces the same.
        prompt_tokens: per request, tokens of its prompt, or ``UNKNOWN``.
        reused_blocks: per request, blocks that the recording engine reused, or ``UNKNOWN``.
        arrivals_s: per request, seconds since the trace's first request; NaN where the trace does not say.
        answered_s: per request, when its answer is complete, in the same seconds; minus infinity, which is at once, where the
            trace does not say when it arrived. See ``WorkloadOptions.rate``.
        sessions: per request, number of its session, or ``UNKNOWN``.
        turn_ends: per request, how it ended, as its number in ``TURN_ENDS``.
        num_unique: number of different chunks.
        num_prompt_blocks: blocks of all prompts, including those left over at the ends of prompts, which are in no chunk.
        blocks_per_chunk: blocks of the trace per chunk.
        block_tokens: tokens per block; ``None`` if the trace does not say.
        told_block_tokens: least and most tokens per block that requests tell; ``None`` if none tells.
        step_tokens: tokens of a prompt that the recording engine computed in a step; ``None`` if the trace does not say.
        is_timed: whether all requests have an arrival time.
        is_sorted: whether the requests that have one were in the order of their times.
        device_chunks: chunks that the device pool in front holds; 0 if none is replayed.
        on_device: per request, how many leading chunks of its prompt the device pool finds by itself.
    """

    chunks: Chunks
    prompt_ends: Ints
    ends: Ints
    prompt_tokens: Ints
    reused_blocks: Ints
    arrivals_s: Floats
    answered_s: Floats
    sessions: Ints
    turn_ends: Ints
    on_device: Ints
    num_unique: int
    num_prompt_blocks: int
    blocks_per_chunk: int = 1
    block_tokens: int | None = None
    told_block_tokens: tuple[int, int] | None = None
    step_tokens: int | None = None
    is_timed: bool = True
    is_sorted: bool = True
    device_chunks: int = 0

    def behind(self, device_chunks: int) -> Workload:
        """The same requests behind a device pool that holds so many chunks."""
        pool, spans = DevicePool[int](device_chunks), list(self.spans())
        runs: list[int] = []
        for request, is_answered in self.events():
            start, prompt_end, end = spans[request]
            if is_answered:
                pool.end(self.chunks[start:end].tolist(), prompt_end - start)
                continue
            prompt = self.chunks[start:prompt_end].tolist()
            runs.append(pool.find(prompt))
            pool.use(prompt)
        return replace(self, device_chunks=device_chunks, on_device=np.array(runs, dtype=np.int64))

    def events(self) -> Iterator[tuple[int, bool]]:
        """Yield each request twice, in the order of time: when it arrives, and, with ``True``, when its answer is complete."""
        running: list[tuple[float, int]] = []
        for request, (arrival_s, answered_s) in enumerate(
            zip(self.arrivals_s.tolist(), self.answered_s.tolist(), strict=True)
        ):
            while running and not running[0][0] > arrival_s:
                yield heappop(running)[1], True
            yield request, False
            heappush(running, (answered_s, request))
        while running:
            yield heappop(running)[1], True

    @property
    def num_requests(self) -> int:
        return len(self.ends)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last; 0 if the trace does not say."""
        return self.seconds_from(0)

    def seconds_from(self, first: int) -> float:
        """Seconds from a request to the last; 0 if the trace does not say."""
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
        """Number of chunks of all prompts; a chunk counts each time."""
        return self.lookups_from(0)

    def lookups_from(self, first: int) -> int:
        """Number of chunks of the prompts from a request on; a chunk counts each time."""
        return int((self.prompt_ends - self.starts)[first:].sum())

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens per chunk, ``None`` if the trace does not say."""
        return None if self.block_tokens is None else self.block_tokens * self.blocks_per_chunk

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of all prompts; ``None`` if the trace does not say."""
        return None if (self.prompt_tokens == UNKNOWN).any() else int(self.prompt_tokens.sum())

    def prompt_tokens_from(self, first: int) -> int:
        """Tokens of the prompts from a request on that the device pool lacks; where the trace does not say, of their chunks.

        It must be known how many tokens a chunk has.
        """
        assert self.chunk_tokens is not None, "it is known how many tokens a chunk has"
        in_chunks = (self.prompt_ends - self.starts) * self.chunk_tokens
        asked = int(np.where(self.prompt_tokens == UNKNOWN, in_chunks, self.prompt_tokens)[first:].sum())
        return asked - (self.tokens_in(self.on_device, first) or 0)

    @property
    def num_reused_blocks(self) -> int | None:
        """Blocks that the recording engine reused; ``None`` if the trace does not say."""
        return None if (self.reused_blocks == UNKNOWN).any() else int(self.reused_blocks.sum())

    def first_use_requests(self) -> Ints:
        """Per different chunk, in the order of their first uses, the request that used it first."""
        _, first_uses = np.unique(self.chunks, return_index=True)
        return np.searchsorted(self.ends, np.sort(first_uses), side="right")

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Per request: index of its first chunk, index after its prompt's last chunk, and index after its last chunk."""
        return zip(self.starts.tolist(), self.prompt_ends.tolist(), self.ends.tolist(), strict=True)

    def tokens_in(self, hits: Ints, first: int = 0) -> int | None:
        """Tokens in the leading ``hits[r]`` chunks of every request ``r`` from ``first`` on.

        A prompt may end inside its last chunk. ``None`` if the trace does not say how many tokens a block has.
        """
        if self.chunk_tokens is None:
            return None
        known = self.prompt_tokens != UNKNOWN
        tokens = hits * self.chunk_tokens
        tokens[known] = np.minimum(tokens, self.prompt_tokens)[known]
        return int(tokens[first:].sum())

    def count_misplaced(self) -> int:
        """Number of uses of a chunk after another chunk than at its first use; 0 if ids form a trie, standing for prefixes."""
        before = np.empty_like(self.chunks)
        before[:1] = UNKNOWN
        before[1:] = self.chunks[:-1]
        starts = self.starts
        before[starts[starts < self.ends]] = UNKNOWN
        numbers, first_uses = np.unique(self.chunks, return_index=True)
        first_before = np.empty(self.num_unique, dtype=np.int32)
        first_before[numbers] = before[first_uses]
        return int(np.count_nonzero(first_before[self.chunks] != before))


class DevicePool(Generic[Name]):
    """The engine's own prefix cache: it evicts what was used least recently, ends of prefixes first.

    Args:
        capacity: chunks that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[Name, None] = {}  # next to be evicted first

    def __contains__(self, chunk: Name) -> bool:
        return chunk in self._held

    def find(self, chunks: Sequence[Name]) -> int:
        """Return how many leading chunks it holds."""
        return next((at for at, chunk in enumerate(chunks) if chunk not in self._held), len(chunks))

    def end(self, chunks: Sequence[Name], num_prompt: int) -> list[Name]:
        """Use a request's chunks once more at its end, with those after its prompt, and return what is evicted for them."""
        return self.use([chunk for at, chunk in enumerate(chunks) if at >= num_prompt or chunk in self._held])

    def use(self, chunks: Sequence[Name]) -> list[Name]:
        """Take in the chunks of one prefix; return what is evicted for them, in that order."""
        held = self._held
        for chunk in reversed(chunks):
            held.pop(chunk, None)
            held[chunk] = None
        lost = list(islice(held, max(0, len(held) - self._capacity)))
        for chunk in lost:
            del held[chunk]
        return lost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """How a trace is replayed. Raises ``ConfigError`` for impossible values.

    Attributes:
        blocks_per_chunk: consecutive blocks that are kept as one chunk; blocks left over at a prompt's end are not kept.
        block_tokens: tokens per block; by default the number that the trace says, or that its lengths imply.
        rate: tokens of an answer per second. Where the trace does not say when an answer was complete, it takes so long after
            ``FIRST_TOKEN_S``, and at most until its session goes on.
    """

    blocks_per_chunk: int = 1
    block_tokens: int | None = None
    rate: float = 80.0

    def __post_init__(self) -> None:
        if not is_positive_int(self.blocks_per_chunk):
            raise ConfigError("blocks_per_chunk", self.blocks_per_chunk, "it must be an integer from 1")
        size = self.block_tokens
        if size is not None and not (is_positive_int(size) and size <= MAX_TOKENS):
            raise ConfigError("block_tokens", size, f"it must be an integer from 1 to {MAX_TOKENS}")
        if not is_positive_number(self.rate):
            raise ConfigError("rate", self.rate, "it must be a number of tokens per second above 0")


class WorkloadBuilder:
    """Collects requests. They are replayed in this order if they have no times.

    Args:
        options: how they are cut.
    """

    def __init__(self, options: WorkloadOptions) -> None:
        self._options = options
        self._numbers: dict[int, int] = {}
        self._chunks = array("i")
        self._prompt_lengths, self._lengths = array("q"), array("q")
        self._blocks, self._tokens, self._reused = array("q"), array("q"), array("q")
        self._times_ms, self._ended_ms, self._answers = array("d"), array("d"), array("q")
        self._sessions = array("q")
        self._turn_ends = array("b")
        self._session_numbers: dict[int | str, int] = {}
        self._first_ms = math.inf
        self._block_tokens: int | None = None
        self._told_block_tokens: tuple[int, int] | None = None
        self._step_tokens: int | None = None

    def add(self, request: TraceRequest) -> None:
        step, arrival_ms = self._options.blocks_per_chunk, request.arrival_ms
        self._first_ms = min(self._first_ms, math.inf if arrival_ms is None else arrival_ms)
        ids = [*request.hash_ids, *request.output_hash_ids][step - 1 :: step]
        numbers = self._numbers
        self._chunks.extend([numbers.setdefault(chunk, len(numbers)) for chunk in ids])
        self._lengths.append(len(ids))
        self._prompt_lengths.append(len(request.hash_ids) // step)
        self._blocks.append(len(request.hash_ids))
        self._tokens.append(UNKNOWN if request.input_length is None else request.input_length)
        self._reused.append(UNKNOWN if request.reused_blocks is None else request.reused_blocks)
        self._times_ms.append(math.nan if arrival_ms is None else arrival_ms)
        self._ended_ms.append(math.nan if request.ended_ms is None else request.ended_ms)
        self._answers.append(request.output_length or 0)
        session, known = request.session_id, self._session_numbers
        self._sessions.append(UNKNOWN if session is None else known.setdefault(session, len(known)))
        self._turn_ends.append(TURN_ENDS.index(request.turn_end))
        self._block_tokens = self._block_tokens or request.block_tokens
        self._step_tokens = self._step_tokens or request.step_tokens
        if request.block_tokens is not None:
            least, most = self._told_block_tokens or (request.block_tokens, request.block_tokens)
            self._told_block_tokens = min(least, request.block_tokens), max(most, request.block_tokens)

    def build(self) -> Workload:
        """The workload of the requests, ordered by time. Raises ``ConfigError`` if no prompt has a chunk."""
        if not sum(self._prompt_lengths):
            raise self._nothing_to_replay()
        arrivals_s = (np.array(self._times_ms) - self._first_ms) / 1000
        is_timed = bool(np.isfinite(arrivals_s).all())
        is_sorted = bool((np.diff(arrivals_s[np.isfinite(arrivals_s)]) >= 0).all())
        ends = np.cumsum(np.array(self._lengths, dtype=np.int64))
        starts = np.concatenate(([0], ends[:-1]))
        sessions = np.array(self._sessions, dtype=np.int64)
        workload = Workload(
            chunks=np.array(self._chunks, dtype=np.int32),
            prompt_ends=starts + np.array(self._prompt_lengths, dtype=np.int64),
            ends=ends,
            prompt_tokens=np.array(self._tokens, dtype=np.int64),
            reused_blocks=np.array(self._reused, dtype=np.int64),
            arrivals_s=arrivals_s,
            answered_s=self._answered_s(arrivals_s, sessions),
            sessions=sessions,
            turn_ends=np.array(self._turn_ends, dtype=np.int64),
            on_device=np.zeros(len(ends), dtype=np.int64),
            num_unique=len(self._numbers),
            num_prompt_blocks=sum(self._blocks),
            blocks_per_chunk=self._options.blocks_per_chunk,
            block_tokens=self._options.block_tokens or self._block_tokens or self._implied_block_tokens(),
            told_block_tokens=self._told_block_tokens,
            step_tokens=self._step_tokens,
            is_timed=is_timed,
            is_sorted=is_sorted,
        )
        return _reordered(workload, arrivals_s.argsort(kind="stable")) if is_timed and not is_sorted else workload

    def _answered_s(self, arrivals_s: Floats, sessions: Ints) -> Floats:
        """When each answer is complete; see ``WorkloadOptions.rate``."""
        answered_s = arrivals_s + FIRST_TOKEN_S + np.array(self._answers) / self._options.rate
        order = np.lexsort((arrivals_s, sessions))
        goes_on = (sessions[order[:-1]] == sessions[order[1:]]) & (sessions[order[1:]] != UNKNOWN)
        before, after = order[:-1][goes_on], order[1:][goes_on]
        answered_s[before] = np.fmin(answered_s[before], arrivals_s[after])
        recorded_s = (np.array(self._ended_ms) - self._first_ms) / 1000
        return np.nan_to_num(np.where(np.isnan(recorded_s), answered_s, recorded_s), nan=-np.inf)

    def _nothing_to_replay(self) -> ConfigError:
        """An error that names the option because of which nothing is left."""
        wanted, num_requests = self._options, len(self._lengths)
        if num_requests and wanted.blocks_per_chunk > 1:
            expected = "there is nothing to replay: no prompt has so many blocks"
            return ConfigError("blocks_per_chunk", wanted.blocks_per_chunk, expected)
        have = "has" if num_requests == 1 else "have"
        expected = (
            f"the {format_count(num_requests, 'request')} in it {have} no full block, so there is nothing to replay"
        )
        return ConfigError("trace", None, expected)

    def _implied_block_tokens(self) -> int | None:
        """The block size that fits the prompts' numbers of tokens and blocks best; ``None`` if it does not fit nearly all."""
        blocks, tokens = np.array(self._blocks, dtype=np.int64), np.array(self._tokens, dtype=np.int64)
        known = (tokens > 0) & (blocks > 1)
        blocks, tokens = blocks[known], tokens[known]
        if not len(blocks):
            return None

        def agreement(size: int) -> float:
            return float(((tokens // size == blocks) | (-(-tokens // size) == blocks)).mean())

        best = max(_LIKELY_BLOCK_TOKENS, key=agreement)
        return best if agreement(best) >= _BELIEVED_FROM else None


def load_workload(requests: Iterable[TraceRequest], options: WorkloadOptions | None = None) -> Workload:
    """Make a workload of requests, which are read one by one.

    Raises:
        ConfigError: there is nothing to replay.
    """
    builder = WorkloadBuilder(options or WorkloadOptions())
    for request in requests:
        builder.add(request)
    return builder.build()


def _reordered(workload: Workload, order: Ints) -> Workload:
    """The same requests in another order, given as their indices."""
    starts, lengths = workload.starts[order], (workload.ends - workload.starts)[order]
    prompt_lengths = (workload.prompt_ends - workload.starts)[order]
    ends = np.cumsum(lengths)
    new_starts = ends - lengths
    return replace(
        workload,
        chunks=workload.chunks[np.arange(int(ends[-1])) + np.repeat(starts - new_starts, lengths)],
        prompt_ends=new_starts + prompt_lengths,
        ends=ends,
        prompt_tokens=workload.prompt_tokens[order],
        reused_blocks=workload.reused_blocks[order],
        arrivals_s=workload.arrivals_s[order],
        answered_s=workload.answered_s[order],
        sessions=workload.sessions[order],
        turn_ends=workload.turn_ends[order],
        on_device=workload.on_device[order],
    )
