"""From the requests of a trace to a workload: which of them, in which order, in chunks of how many blocks."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cargohold.errors import ConfigError
from cargohold.replay.traces import MAX_TOKENS, TraceRequest
from cargohold.replay.workload import UNKNOWN, Ints, Workload
from cargohold.units import is_number, is_positive_int, is_positive_number

_LIKELY_BLOCK_TOKENS: Final = tuple(1 << power for power in range(14))
_BELIEVED_FROM: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which requests of a trace are replayed, and how. Raises ``ConfigError`` for what cannot be.

    Attributes:
        blocks_per_chunk: consecutive blocks that are kept as one; what is left at a prompt's end is not kept.
        block_tokens: tokens per block; by default what the trace says, or what its lengths imply.
        sessions: only requests of these sessions; all if empty.
        from_s, until_s: only requests that arrive in this window, in seconds since the trace's first request.
    """

    blocks_per_chunk: int = 1
    block_tokens: int | None = None
    sessions: Collection[str] = ()
    from_s: float | None = None
    until_s: float | None = None

    def __post_init__(self) -> None:
        if not is_positive_int(self.blocks_per_chunk):
            raise ConfigError("blocks_per_chunk", self.blocks_per_chunk, "it must be an integer from 1")
        size = self.block_tokens
        if size is not None and not (is_positive_int(size) and size <= MAX_TOKENS):
            raise ConfigError("block_tokens", size, f"it must be an integer from 1 to {MAX_TOKENS}")
        if self.from_s is not None and not (is_number(self.from_s) and self.from_s >= 0):
            raise ConfigError("from", self.from_s, "it must be a number of seconds from 0")
        if self.until_s is not None and not is_positive_number(self.until_s):
            raise ConfigError("until", self.until_s, "it must be a number of seconds above 0")
        if self.from_s is not None and self.until_s is not None and self.from_s >= self.until_s:
            raise ConfigError(
                "until", self.until_s, f"the window must end after it starts, which is at {self.from_s} s"
            )

    @property
    def needs_times(self) -> bool:
        """Whether requests must say when they arrived."""
        return self.from_s is not None or self.until_s is not None

    def includes(self, request: TraceRequest, since_first_s: float | None) -> bool:
        """Whether a request is replayed. Raises ``ConfigError`` if its time is needed and not there."""
        if self.sessions and str(request.session_id) not in self.sessions:
            return False
        if not self.needs_times:
            return True
        if since_first_s is None:
            raise ConfigError("from/until", "a time window", "the trace must say when each request arrived")
        return (self.from_s is None or since_first_s >= self.from_s) and (
            self.until_s is None or since_first_s < self.until_s
        )


class WorkloadBuilder:
    """Collects requests, in the order in which they are to be replayed if they have no times.

    Args:
        selection: which.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._numbers: dict[int, int] = {}
        self._chunks = array("i")
        self._prompt_lengths, self._lengths = array("q"), array("q")
        self._blocks, self._tokens, self._reused = array("q"), array("q"), array("q")
        self._times_ms = array("d")
        self._first_ms: float | None = None
        self._last_s = 0.0
        self._block_tokens: int | None = None
        self._step_tokens: int | None = None

    def add(self, request: TraceRequest) -> None:
        """Take a request in, if it is selected."""
        arrival_ms = request.arrival_ms
        if self._first_ms is None:
            self._first_ms = arrival_ms
        since_first_s = None if arrival_ms is None or self._first_ms is None else (arrival_ms - self._first_ms) / 1000
        self._last_s = max(self._last_s, since_first_s or 0.0)
        if not self._selection.includes(request, since_first_s):
            return
        step = self._selection.blocks_per_chunk
        ids = [*request.hash_ids, *request.output_hash_ids][step - 1 :: step]
        numbers = self._numbers
        self._chunks.extend([numbers.setdefault(chunk, len(numbers)) for chunk in ids])
        self._lengths.append(len(ids))
        self._prompt_lengths.append(len(request.hash_ids) // step)
        self._blocks.append(len(request.hash_ids))
        self._tokens.append(UNKNOWN if request.input_length is None else request.input_length)
        self._reused.append(UNKNOWN if request.reused_blocks is None else request.reused_blocks)
        self._times_ms.append(float("nan") if arrival_ms is None else arrival_ms)
        self._block_tokens = self._block_tokens or request.block_tokens
        self._step_tokens = self._step_tokens or request.step_tokens

    def build(self) -> Workload:
        """The workload of all requests added, in the order of their times. Raises ``ConfigError`` if there are none."""
        if not self._chunks:
            raise self._nothing_to_replay()
        ends = np.cumsum(np.array(self._lengths, dtype=np.int64))
        starts = np.concatenate(([0], ends[:-1]))
        times = np.array(self._times_ms)
        is_sorted = bool((np.diff(times[~np.isnan(times)]) >= 0).all())
        workload = Workload(
            chunks=np.array(self._chunks, dtype=np.int32),
            prompt_ends=starts + np.array(self._prompt_lengths, dtype=np.int64),
            ends=ends,
            prompt_tokens=np.array(self._tokens, dtype=np.int64),
            reused_blocks=np.array(self._reused, dtype=np.int64),
            num_unique=len(self._numbers),
            blocks_per_chunk=self._selection.blocks_per_chunk,
            block_tokens=self._selection.block_tokens or self._block_tokens or self._implied_block_tokens(),
            step_tokens=self._step_tokens,
            duration_s=float(np.nanmax(times) - np.nanmin(times)) / 1000 if not np.isnan(times).all() else 0.0,
            is_sorted=is_sorted,
        )
        return workload if is_sorted or np.isnan(times).any() else _reordered(workload, times.argsort(kind="stable"))

    def _nothing_to_replay(self) -> ConfigError:
        """Why, by the option that has left nothing over."""
        wanted, nothing = self._selection, "there is nothing to replay: "
        if self._lengths and wanted.blocks_per_chunk > 1:
            return ConfigError("blocks_per_chunk", wanted.blocks_per_chunk, f"{nothing}no request has so many blocks")
        if not self._lengths and wanted.sessions:
            when = " in that time" if wanted.needs_times else ""
            return ConfigError("session", ", ".join(sorted(wanted.sessions)), f"{nothing}no request is of it{when}")
        if not self._lengths and wanted.needs_times:
            key, value = ("until", wanted.until_s) if wanted.from_s is None else ("from", wanted.from_s)
            return ConfigError(key, value, f"{nothing}the trace ends {self._last_s:.1f} s after its first request")
        return ConfigError("trace", f"{len(self._lengths)} requests", f"{nothing}they have no blocks")

    def _implied_block_tokens(self) -> int | None:
        """The block size for which prompts of so many tokens have so many blocks; ``None`` if none is convincing."""
        blocks, tokens = np.array(self._blocks, dtype=np.int64), np.array(self._tokens, dtype=np.int64)
        known = (tokens > 0) & (blocks > 1)
        blocks, tokens = blocks[known], tokens[known]
        if not len(blocks):
            return None

        def agreement(size: int) -> float:
            return float(((tokens // size == blocks) | (-(-tokens // size) == blocks)).mean())

        best = max(_LIKELY_BLOCK_TOKENS, key=agreement)
        return best if agreement(best) >= _BELIEVED_FROM else None


def load_workload(requests: Iterable[TraceRequest], selection: Selection | None = None) -> Workload:
    """A workload of requests, which are read one by one.

    Raises:
        ConfigError: there is nothing to replay.
    """
    builder = WorkloadBuilder(selection or Selection())
    for request in requests:
        builder.add(request)
    return builder.build()


def _reordered(workload: Workload, order: Ints) -> Workload:
    """The same requests in another order."""
    starts, lengths = workload.starts[order], (workload.ends - workload.starts)[order]
    prompt_lengths = (workload.prompt_ends - workload.starts)[order]
    ends = np.cumsum(lengths)
    new_starts = ends - lengths
    gather = np.arange(int(ends[-1])) + np.repeat(starts - new_starts, lengths)
    return replace(
        workload,
        chunks=workload.chunks[gather],
        prompt_ends=new_starts + prompt_lengths,
        ends=ends,
        prompt_tokens=workload.prompt_tokens[order],
        reused_blocks=workload.reused_blocks[order],
    )
