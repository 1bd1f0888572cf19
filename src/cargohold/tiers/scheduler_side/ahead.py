"""Prefetches that hints ask for: chunks of lower tiers come up before a request asks for them.

A hint's prefetch waits for its chunks as a request does (see ``Prefetcher``), but behind all requests, and whether computing
would be faster does not matter: no request is kept waiting. What has come is retained for a while, so that it is still there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cargohold.cache.manager import ChunkKeys, OffloadManager
from cargohold.deadlines import AHEAD
from cargohold.protocol import Clock, Hint, HintEnd
from cargohold.tiers.scheduler_side.plan import Wanted
from cargohold.tiers.scheduler_side.prefetch import Prefetcher
from cargohold.tiers.scheduler_side.waiting import Waiting

MAX_AHEAD: Final = 64
"""Maximum number of prefetches under way; one tenant may have half of them."""


@dataclass(slots=True, eq=False)
class Ahead:
    """One prefetch under way.

    Attributes:
        hint: what asked for it.
        tenant: who gave the hint.
        wanted: what is to be fetched.
        deadline: time after which nobody needs it.
        on_ask: called before tiers are asked for its chunks, or chunks are fetched.
        waiting: the wait for its chunks; ``None`` before the next step.
        notes: why chunks were not fetched.
    """

    hint: Hint
    tenant: str | None
    wanted: Wanted
    deadline: float
    on_ask: Callable[[], None]
    waiting: Waiting | None = None
    notes: list[str] = field(default_factory=list)


EndAhead = Callable[[Ahead, HintEnd], None]


class Prefetches:
    """Carries out the prefetches that hints ask for.

    Args:
        prefetcher: fetches chunks from the tiers.
        host: the manager of host memory.
        clock: monotonic time in seconds.
        end: called when a prefetch has ended.
    """

    def __init__(self, prefetcher: Prefetcher, host: OffloadManager, clock: Clock, end: EndAhead) -> None:
        self._prefetcher = prefetcher
        self._host = host
        self._clock = clock
        self._end = end
        self._under_way: list[Ahead] = []
        self._num_of: Counter[str | None] = Counter()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def has_room(self, tenant: str | None) -> bool:
        """Whether a tenant may ask for one more."""
        return len(self._under_way) < MAX_AHEAD and self._num_of[tenant] < MAX_AHEAD // 2

    def lacks_any(self, keys: Sequence[ChunkKeys], num_tokens: int) -> bool:
        """Whether host memory lacks a chunk of the first ``num_tokens`` tokens."""
        return any(
            len(self._host.lookup_run(of_group.keys[first:end])) < end - first
            for of_group in keys
            for end in [num_tokens // of_group.chunk_tokens]
            for first in [min(end, of_group.group.num_skipped_tokens(num_tokens) // of_group.chunk_tokens)]
        )

    def begin(
        self, hint: Hint, tenant: str | None, keys: Sequence[ChunkKeys], num_tokens: int, on_ask: Callable[[], None]
    ) -> None:
        """Fetch the chunks of the first ``num_tokens`` tokens of a prefix, from the next step on."""
        deadline = self._clock() + (hint.deadline_s or AHEAD.seconds())
        # A hit of all tokens would need one less, because the last one is computed: here it may have all.
        wanted = Wanted(keys, num_tokens + 1, 0, num_tokens, tenant)
        self._under_way.append(Ahead(hint, tenant, wanted, deadline, on_ask))
        self._num_of[tenant] += 1

    def step(self) -> None:
        """Go on with all of them. To be called once a step, when all requests have been asked for."""
        for ahead in list(self._under_way):
            if ahead.waiting is None:
                ahead.waiting = self._prefetcher.begin(ahead.wanted, ahead.notes, on_ask=ahead.on_ask, is_ahead=True)
            elif self._prefetcher.must_wait(ahead.waiting, ahead.wanted):
                if self._clock() >= ahead.deadline:
                    ahead.waiting.end()
                    self._forget(ahead, HintEnd.FAILED)
                continue
            if not ahead.waiting.must_wait:
                has_all = not self.lacks_any(ahead.wanted.keys, ahead.wanted.limit_tokens)
                self._forget(ahead, HintEnd.DONE if has_all else HintEnd.FAILED)
                ahead.waiting.end()

    def end_all(self) -> None:
        """Give all of them up: the tiers were reset, or the connector is shut down."""
        for ahead in list(self._under_way):
            if ahead.waiting is not None:
                ahead.waiting.end()
            self._forget(ahead, HintEnd.VOID)

    def _forget(self, ahead: Ahead, how: HintEnd) -> None:
        self._under_way.remove(ahead)
        self._num_of[ahead.tenant] -= 1
        if not self._num_of[ahead.tenant]:
            del self._num_of[ahead.tenant]
        self._end(ahead, how)
