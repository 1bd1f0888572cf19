"""Which prefixes the last requests have left in the tier: for people, who ask what is kept. It changes no decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.connector.offloading.requests import RequestState
from cargohold.protocol import AttentionKind, Clock, KeptPrefix, KVCacheLayout

MAX_PREFIXES: Final = 64
"""Maximum number of prefixes that are remembered; beyond it those that were used least recently are forgotten."""
MAX_MARKS: Final = 16
"""Maximum number of chunks of a prefix that are looked for, so that an answer costs a millisecond at a million chunks. Of a
longer prefix, what is there is rounded down to a 16th, unless it is all there."""


@dataclass(slots=True)
class _Left:
    """A prefix that a request has left.

    Attributes:
        tenant: whose request it was.
        num_chunks: number of its chunks.
        marks: some of its chunks in order, the last one included.
        apart: one of so many chunks is a mark.
        num_uses: number of requests that it is of.
        at: when the last of them ended.
    """

    tenant: str | None
    num_chunks: int
    marks: list[OffloadKey]
    apart: int
    num_uses: int
    at: float


class Prefixes:
    """Remembers the prefixes of the last requests, those that continue each other as one.

    Args:
        manager: the manager of the tier.
        layout: the engine's paged KV.
        clock: monotonic time in seconds.
    """

    def __init__(self, manager: OffloadManager, layout: KVCacheLayout, clock: Clock) -> None:
        self._manager = manager
        self._clock = clock
        # Only a group of full attention keeps a prefix from its start.
        full = [group.index for group in layout.groups if group.kind is AttentionKind.FULL]
        self._group = full[0] if full else None
        self._chunk_tokens = 0
        # By their last chunk, the least recently used first.
        self._left: dict[OffloadKey, _Left] = {}

    def note_ended(self, state: RequestState) -> None:
        """Learn that a request has ended. What it continued is part of its own prefix from now on."""
        if self._group is None:
            return
        state.extend_keys()
        chunks = state.keys[self._group]
        keys, self._chunk_tokens = chunks.keys, chunks.chunk_tokens
        if not keys:
            return
        continued = [
            end for end, left in self._left.items() if left.num_chunks <= len(keys) and keys[left.num_chunks - 1] == end
        ]
        num_uses = 1 + max([self._left.pop(end).num_uses for end in continued], default=0)
        apart = -(-len(keys) // MAX_MARKS)
        marks = keys[apart - 1 :: apart]
        if len(keys) % apart:
            marks.append(keys[-1])
        self._left[keys[-1]] = _Left(state.tenant, len(keys), marks, apart, num_uses, self._clock())
        if len(self._left) > MAX_PREFIXES:
            del self._left[next(iter(self._left))]

    def kept(self) -> list[KeptPrefix]:
        """Return those of which something is in the tier, the longest first."""
        now, kept = self._clock(), []
        for left in self._left.values():
            # A prefix is lost from its end.
            num_marks = self._manager.lookup_run(left.marks).count(READY)
            num_tokens = min(num_marks * left.apart, left.num_chunks) * self._chunk_tokens
            if num_tokens:
                kept.append(KeptPrefix(left.tenant, num_tokens, left.num_uses, now - left.at))
        return sorted(kept, key=lambda prefix: -prefix.num_tokens)

    def forget(self) -> None:
        """Forget all of them, because all chunks are dropped."""
        self._left.clear()
