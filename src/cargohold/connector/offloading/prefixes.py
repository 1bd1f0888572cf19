"""Which prefixes the last requests have left in the tier: for people, who ask what is kept. It changes no decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

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
    """A prefix that requests have left.

    Attributes:
        tenant: whose requests they were.
        first: its first chunk; most prompts differ there already.
        num_chunks: number of its chunks.
        apart: one of so many of them is a mark.
        marks: these, in order, and the last one.
        at: when the last of the requests ended.
        num_uses: number of requests that have begun with it.
        is_shared: whether it is what requests have in common that went on differently.
    """

    tenant: str | None
    first: OffloadKey
    num_chunks: int
    apart: int
    marks: list[OffloadKey]
    at: float
    num_uses: int = 1
    is_shared: bool = False

    @classmethod
    def of(cls, keys: list[OffloadKey], tenant: str | None, at: float) -> Self:
        """Make that of a request that has ended."""
        apart = -(-len(keys) // MAX_MARKS)
        marks = keys[apart - 1 :: apart]
        if len(keys) % apart:
            marks.append(keys[-1])
        return cls(tenant, keys[0], len(keys), apart, marks, at)

    def end_of(self, num_marks: int) -> int:
        """Return the number of chunks up to a mark."""
        return min(num_marks * self.apart, self.num_chunks)

    def num_in_common(self, keys: list[OffloadKey]) -> int:
        """Return with how many of its chunks a request begins, rounded down to a mark."""
        num_alike = 0
        for number, mark in enumerate(self.marks, 1):
            end = self.end_of(number)
            if end > len(keys) or keys[end - 1] != mark:
                break
            num_alike = number
        return self.end_of(num_alike)


class Prefixes:
    """Remembers the prefixes of the last requests.

    A request that continues an earlier one, as the next turn of a conversation does, takes its place. Requests that have half
    of their chunks or more in common, as questions about one document have, are remembered as what they have in common.

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
        # The least recently used first.
        self._left: list[_Left] = []

    def note_ended(self, state: RequestState) -> None:
        """Learn that a request has ended."""
        if self._group is None:
            return
        state.extend_keys()
        chunks = state.keys[self._group]
        keys, self._chunk_tokens = chunks.keys, chunks.chunk_tokens
        if not keys:
            return
        own, others, shared = _Left.of(keys, state.tenant, self._clock()), [], []
        for left in self._left:
            may_be_alike = left.first == own.first and left.tenant == own.tenant
            common = left.num_in_common(keys) if may_be_alike else 0
            if common == left.num_chunks and not left.is_shared:
                own.num_uses = max(own.num_uses, left.num_uses + 1)
            elif common and (common == left.num_chunks or 2 * common >= max(left.num_chunks, len(keys))):
                part = _Left.of(keys[:common], own.tenant, own.at)
                part.num_uses, part.is_shared = left.num_uses + 1, True
                shared.append(part)
            else:
                others.append(left)
        is_told = any(2 * part.num_chunks >= len(keys) for part in shared)
        self._left = [*others, *shared, *([] if is_told else [own])][-MAX_PREFIXES:]

    def kept(self) -> list[KeptPrefix]:
        """Return those of which something is in the tier, the longest first."""
        now, kept = self._clock(), []
        for left in self._left:
            # A prefix is lost from its end.
            num_chunks = left.end_of(self._manager.lookup_run(left.marks).count(READY))
            if num_chunks:
                kept.append(KeptPrefix(left.tenant, num_chunks * self._chunk_tokens, left.num_uses, now - left.at))
        return sorted(kept, key=lambda prefix: -prefix.num_tokens)

    def forget(self) -> None:
        """Forget all of them, because all chunks are dropped."""
        self._left.clear()
