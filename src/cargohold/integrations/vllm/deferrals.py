"""What vLLM does not tell: how long a request was deferred, resets of its prefix cache, room for loads.

Room for loads: no two loaded requests may wait for each other's blocks for ever.

A request that was given blocks for a load keeps them until it has run, for vLLM preempts only running requests. So vLLM admits
another load only if the blocks that earlier loaded requests still need stay free. Where a group forgets the past, as with a
window, vLLM counts too few: from the most blocks that a request holds at a time it subtracts the length of the request's
table, forgotten blocks included::

    window of 16, blocks of 4, load of 64 tokens, 128 in all      at most 8 blocks at a time, 4 of them held
    table   |  |  |  |  |  |  |  |  |  |  |  |  |##|##|##|##|     16 long: 8 - 16 < 0, so nothing is reserved

Two such requests can then fill the pool, and neither of them has room for its next tokens. Here, the blocks that requests
really hold are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.deadlines import Patience
from cargohold.integrations.vllm.engine_view import BlockTables
from cargohold.protocol import AttentionKind, Clock, KVCacheGroup


@dataclass(slots=True)
class _Wait:
    """The wait of one request.

    Attributes:
        patience: decides when the wait is too long; each request has its own, for vLLM does not ask for all in the same steps.
        seconds: how long the request has waited.
    """

    patience: Patience
    seconds: float = 0.0


class Deferrals:
    """Measures how long each request has waited for the connector's answer, and for nothing else.

    vLLM asks again only when it has a place for the request, which may be minutes later. So the time between two steps counts
    only for requests about which vLLM asked again at its end.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._asked: set[str] = set()
        self._last_step = clock()

    def __len__(self) -> int:
        return len(self._waits.keys() | self._asked)

    def note(self, request_id: str) -> bool:
        """Note that a request was told to ask again. Returns whether that was the first time."""
        is_first = request_id not in self._waits and request_id not in self._asked
        self._asked.add(request_id)
        return is_first

    def forget(self, request_id: str) -> None:
        """Forget a request that has its answer, or needs none any more."""
        self._waits.pop(request_id, None)
        self._asked.discard(request_id)

    def clear(self) -> None:
        """Forget all requests: the connector is asked no more."""
        self._waits.clear()
        self._asked.clear()

    def note_step(self, limit_s: float) -> str | None:
        """Count the time since the last step. Returns a request that has waited longer than ``limit_s``, if there is one."""
        asked, self._asked = sorted(self._asked), set()
        before, self._last_step = self._last_step, self._clock()
        late = None
        for request_id in asked:
            wait = self._waits.get(request_id)
            if wait is None:
                self._waits[request_id] = _Wait(Patience(self._clock))
                continue
            wait.seconds += self._last_step - before
            overdue = request_id if wait.seconds > limit_s else None
            if wait.patience.has_run_out(overdue, limit_s):
                late = late or request_id
        return late


# --- room for loads ---------------------------------------------------------------------------------------------------

_FORGETTING = (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)
_MAX_STATES = 3
"""Recurrent states that a request holds at a time: the one that a step advances, the one that it was copied from, and one of a
step before that is still in flight."""


class LoadRoom:
    """Decides whether the pool has room for another load.

    Args:
        pool: vLLM's block pool.
        groups: the KV-cache groups.
        tables: the requests' block tables.
        max_in_flight_tokens: most tokens that vLLM schedules before it frees the blocks that these tokens move out of a window.
    """

    def __init__(
        self, pool: Any, groups: Sequence[KVCacheGroup], tables: BlockTables, max_in_flight_tokens: int
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._tables = tables
        self._max_in_flight_tokens = max_in_flight_tokens
        self._counts_too_little = any(group.kind in _FORGETTING for group in groups)

    def admits(self, num_tokens: int, parked: Iterable[Any]) -> bool:
        """Whether a load can have its blocks without any of ``parked`` being short of them.

        Args:
            num_tokens: tokens that will be on the device after the load.
            parked: requests that were given blocks for a load, and have not run since.
        """
        if not self._counts_too_little:
            return True
        needed = [self._num_needed(request) for request in parked]
        if not needed:
            return True
        taken = sum(
            -(-num_tokens // group.block_tokens) - group.num_skipped_tokens(num_tokens) // group.block_tokens
            for group in self._groups
        )
        return taken + sum(needed) <= int(self._pool.get_num_free_blocks())

    def _num_needed(self, request: Any) -> int:
        """Blocks that a parked request will need beyond those it holds."""
        tables = self._tables.blocks(request.request_id)
        return sum(
            max(self._max_held(group, request.num_tokens) - sum(not block.is_null for block in table), 0)
            for group, table in zip(self._groups, tables, strict=True)
        )

    def _max_held(self, group: KVCacheGroup, num_tokens: int) -> int:
        """Blocks that a request holds at most at a time until its prompt is computed."""
        all_blocks = -(-num_tokens // group.block_tokens)
        if group.kind is AttentionKind.RECURRENT:
            return min(all_blocks, _MAX_STATES)
        if group.window_tokens is None:
            return all_blocks
        return min(all_blocks, -(-(group.window_tokens + self._max_in_flight_tokens) // group.block_tokens) + 1)
